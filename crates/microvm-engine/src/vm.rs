//! Running microVM: its handle ([`MicroVm`]), and the operations on it.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used. The *greeting* is the first message of the agent, which then
//! receives the identity of its sandbox. A *hook* is an executable in the guest that the agent runs
//! before the state of the guest is stored, and after the guest continues. A *detached* VMM
//! continues to run when its daemon exits.

pub(crate) mod adopt;
mod boot;
mod connector;
mod launch;
mod requests;
pub(crate) mod restore;
pub(crate) mod rollback;
pub(crate) mod snapshot;
pub(crate) mod unassigned;

pub(crate) use connector::ConnectGate;
pub use connector::{ConnectError, Connector};
pub(crate) use launch::{LaunchSpec, MicroVmParts, console_ring};

use crate::boot_steps::NextSteps;
use crate::control_socket::ControlSocket;
use crate::exit_reason::printable;
use crate::snapshot_context::SnapshotContext;
use crate::vmm_launcher::LimitTask;
use crate::vmm_process::DetachedSocket;
use jiffy_engine_api::{BootReport, ExitReason};
use jiffy_proto::agent::Identity;
use jiffy_proto::channel::ChannelError;
use jiffy_proto::console::ConsoleRing;
use jiffy_proto::snapshot::FoldedLayers;
use jiffy_proto::vm::Request;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::JoinHandle;

/// Time after which a VMM is killed if it does not stop on request.
const STOP_TIMEOUT: Duration = Duration::from_millis(500);

/// Guest whose agent has answered. Dropping it terminates the guest, unless the guest is detached.
#[derive(Debug)]
pub struct MicroVm {
    pub(crate) link: Arc<ControlSocket>,
    pub(crate) connect_gate: ConnectGate,
    console: Arc<ConsoleRing>,
    /// Reason why the sandbox ended. `None` while it runs.
    end: watch::Receiver<Option<ExitReason>>,
    /// True when the VMM has reported that the guest no longer runs.
    halted: watch::Receiver<bool>,
    /// Task of the [`crate::vmm_driver::VmmDriver`], which owns the VMM process.
    driver: JoinHandle<()>,
    /// Requests the driver to kill the VMM.
    kill: mpsc::Sender<()>,
    report: BootReport,
    pid: u32,
    pub(crate) detached_socket: DetachedSocket,
    pub(crate) context: Arc<Mutex<SnapshotContext>>,
    /// Identity of the guest, which greeting tasks send to the agent. `None` until it is assigned.
    pub(crate) identity: watch::Sender<Option<Identity>>,
    /// Task that limits the VMM. `None` if the VMM is not limited, or was limited already.
    limit_task: Option<LimitTask>,
    /// First error of the host at a disk of the guest. See [`Self::disk_failure`].
    disk_failure: Arc<OnceLock<String>>,
    pub(crate) next_steps: NextSteps,
    /// Set if the guest may have hooks.
    pub(crate) hooks: Arc<AtomicBool>,
    /// Optional requests that the VMM supports.
    pub(crate) supported_requests: VmmRequests,
}

/// Optional requests, which a VMM started by an earlier version may not support.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VmmRequests {
    /// [`Request::Rollback`].
    pub rollback: bool,
    /// [`Request::FoldLayers`].
    pub fold: bool,
    /// [`SnapshotConfig::disk_only`](jiffy_proto::snapshot::SnapshotConfig::disk_only).
    pub disk_only: bool,
}

impl VmmRequests {
    /// Requests that a VMM of this version supports.
    pub const ALL: Self = Self {
        rollback: true,
        fold: true,
        disk_only: true,
    };
}

impl MicroVm {
    /// Returns whether the guest may have a directory with hooks. `false` only if its agent has
    /// reported that it has none.
    pub fn may_have_hooks(&self) -> bool {
        self.hooks.load(Ordering::Acquire)
    }

    /// Returns boot mode and durations of the boot.
    pub fn report(&self) -> BootReport {
        self.report
    }

    /// Returns the process id of the VMM.
    pub fn vmm_pid(&self) -> u32 {
        self.pid
    }

    /// Returns a connector for streams to the guest. It may outlive this value.
    pub fn connector(&self) -> Connector {
        Connector {
            link: self.link.clone(),
            gate: self.connect_gate.clone(),
        }
    }

    /// Requests the guest to return `target_mib` MiB of its memory.
    pub fn set_balloon(&self, target_mib: u32) -> Result<(), ChannelError> {
        self.link.send(&Request::Balloon { target_mib }, &[])
    }

    /// Makes the VMM close the lower of two layers that were folded into one, so that its disk
    /// space is released while the guest runs. A VMM that does not support the request keeps the
    /// file open.
    pub fn fold_layers(&self, layers: &FoldedLayers) {
        if self.supported_requests.fold {
            // Ignore the error: a VMM that has exited holds no file.
            let _ = self
                .link
                .send(&Request::FoldLayers(Box::new(layers.clone())), &[]);
        }
    }

    /// Waits until the sandbox has ended and returns the reason.
    pub async fn ended(&self) -> ExitReason {
        let mut end = self.end.clone();
        let result = end.wait_for(Option::is_some).await;
        match result.as_deref() {
            Ok(Some(end)) => end.clone(),
            // The driver was aborted before it reported a reason.
            _ => ExitReason::Requested,
        }
    }

    /// Returns the reason why the sandbox ended. `None` if it runs.
    pub fn end(&self) -> Option<ExitReason> {
        self.end.borrow().clone()
    }

    /// Terminates the sandbox and returns when all of its resources are released. If the sandbox
    /// had already ended, returns that earlier reason.
    pub async fn stop(self) -> ExitReason {
        self.stop_shared().await
    }

    /// Same as [`Self::stop`] for a shared value. May be called repeatedly.
    pub async fn stop_shared(&self) -> ExitReason {
        // Ignore the error: a VMM that has closed its socket is exiting already.
        let _ = self.link.send(&Request::Stop, &[]);
        match tokio::time::timeout(STOP_TIMEOUT, self.ended()).await {
            Ok(end) => end,
            Err(_) => {
                // Ignore the error: an earlier request to kill the VMM is pending.
                let _ = self.kill.try_send(());
                self.ended().await
            }
        }
    }

    /// Terminates the sandbox and returns when the guest no longer runs. The VMM exits in the
    /// background; [`Self::stop_shared`] waits for its exit.
    pub async fn halt_shared(&self) {
        // Ignore the error: a VMM that has closed its socket is exiting already.
        let _ = self.link.send(&Request::Stop, &[]);
        let mut halted = self.halted.clone();
        // An error also means that the guest no longer runs: the sender is dropped when the VMM
        // exits.
        let halt = tokio::time::timeout(STOP_TIMEOUT, halted.wait_for(|halted| *halted));
        let timed_out = halt.await.is_err();
        if timed_out {
            self.stop_shared().await;
        }
    }

    /// Sets the identity that is sent to the agent.
    pub(crate) fn set_identity(&self, identity: Identity) {
        self.identity.send_replace(Some(identity));
    }

    /// Returns whether `id` is the current identity of the agent.
    fn has_identity(&self, id: &str) -> bool {
        let current = self.identity.borrow();
        current.as_ref().is_some_and(|identity| identity.id == id)
    }

    /// Withdraws the identity: the stream of the agent's greeting is closed, and the agent greets
    /// again.
    pub(crate) async fn withdraw_identity(&self) {
        // The stream has two descriptors. The greeting task closes the other descriptor when the
        // identity is withdrawn.
        self.context.lock().await.greeting = None;
        self.identity.send_replace(None);
    }

    /// Returns the first error of the host while it served a disk of the guest. The guest received
    /// an I/O error. `None` without an error, or if another process controlled the VMM at that
    /// time.
    pub fn disk_failure(&self) -> Option<String> {
        self.disk_failure.get().cloned()
    }

    /// Returns the end of the guest's console output, without control characters.
    pub fn console_tail(&self) -> String {
        printable(&self.console.tail())
    }
}

impl Drop for MicroVm {
    fn drop(&mut self) {
        // The driver owns the process, which is killed when the driver is dropped unless it is
        // detached.
        self.driver.abort();
    }
}
