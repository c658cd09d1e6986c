//! Running microVM.

mod boot;
mod connector;
mod launch;
mod requests;

pub(crate) use connector::ConnectGate;
pub use connector::{ConnectError, Connector};
pub(crate) use launch::{LaunchSpec, MicroVmParts, console_ring};

use crate::boot_steps::NextSteps;
use crate::control_socket::ControlSocket;
use crate::exit_reason::printable;
use crate::snapshot_context::SnapshotContext;
use crate::vmm_launcher::LimitTask;
use crate::vmm_process::KeptSocket;
use jiffy_engine_api::{BootReport, ExitReason};
use jiffy_proto::agent::Identity;
use jiffy_proto::channel::ChannelError;
use jiffy_proto::console::ConsoleRing;
use jiffy_proto::snapshot::FoldedLayers;
use jiffy_proto::vm::Request;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::JoinHandle;

/// Time for a VMM to exit by itself before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_millis(500);

/// Guest whose agent has answered. Dropping it ends the guest, unless it is kept.
#[derive(Debug)]
pub struct MicroVm {
    pub(crate) link: Arc<ControlSocket>,
    pub(crate) connect_gate: ConnectGate,
    console: Arc<ConsoleRing>,
    end: watch::Receiver<Option<ExitReason>>,
    halted: watch::Receiver<bool>,
    driver: JoinHandle<()>,
    kill: mpsc::Sender<()>,
    report: BootReport,
    pid: u32,
    pub(crate) kept: KeptSocket,
    pub(crate) context: Arc<Mutex<SnapshotContext>>,
    pub(crate) identity: watch::Sender<Option<Identity>>,
    limit_task: Option<LimitTask>,
    disk_failure: Arc<OnceLock<String>>,
    pub(crate) next_steps: NextSteps,
    /// Requests that its VMM knows.
    pub(crate) knows: VmmRequests,
}

/// Requests that not every VMM knows: an earlier version may have started it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VmmRequests {
    /// [`Request::Rollback`].
    pub rollback: bool,
    /// [`Request::FoldLayers`].
    pub fold: bool,
}

impl VmmRequests {
    /// Requests of the VMM that belongs to this version.
    pub const ALL: Self = Self {
        rollback: true,
        fold: true,
    };
}

impl MicroVm {
    /// Boot mode and times.
    pub fn report(&self) -> BootReport {
        self.report
    }

    /// Process id of the VMM.
    pub fn vmm_pid(&self) -> u32 {
        self.pid
    }

    /// Opener of streams to the guest that is independent of this value's lifetime.
    pub fn connector(&self) -> Connector {
        Connector {
            link: self.link.clone(),
            gate: self.connect_gate.clone(),
        }
    }

    /// Asks the guest to return `target_mib` MiB of its memory.
    pub fn set_balloon(&self, target_mib: u32) -> Result<(), ChannelError> {
        self.link.send(&Request::Balloon { target_mib }, &[])
    }

    /// Has the VMM close the lower of two layers that were folded into one, so that its disk space
    /// is freed while the guest runs. A VMM that does not know the request keeps the file open.
    pub fn fold_layers(&self, layers: &FoldedLayers) {
        if self.knows.fold {
            // A VMM that is gone holds no file.
            let _ = self
                .link
                .send(&Request::FoldLayers(Box::new(layers.clone())), &[]);
        }
    }

    /// Waits until the sandbox has ended; returns the reason.
    pub async fn ended(&self) -> ExitReason {
        let mut end = self.end.clone();
        let result = end.wait_for(Option::is_some).await;
        match result.as_deref() {
            Ok(Some(end)) => end.clone(),
            _ => ExitReason::Requested,
        }
    }

    /// Reason that the sandbox ended, if it has.
    pub fn end(&self) -> Option<ExitReason> {
        self.end.borrow().clone()
    }

    /// Ends the sandbox; returns when nothing of it is left, with the reason that it ended, which
    /// may precede this call.
    pub async fn stop(self) -> ExitReason {
        self.stop_shared().await
    }

    /// Like [`Self::stop`] for a shared value; may be called repeatedly.
    pub async fn stop_shared(&self) -> ExitReason {
        let _ = self.link.send(&Request::Stop, &[]);
        match tokio::time::timeout(STOP_TIMEOUT, self.ended()).await {
            Ok(end) => end,
            Err(_) => {
                let _ = self.kill.try_send(());
                self.ended().await
            }
        }
    }

    /// Ends the sandbox; returns when its guest runs no more. What is left of the VMM goes by
    /// itself, and [`Self::stop_shared`] waits for that.
    pub async fn halt_shared(&self) {
        let _ = self.link.send(&Request::Stop, &[]);
        let mut halted = self.halted.clone();
        // The sender is gone when the VMM is.
        let said = tokio::time::timeout(STOP_TIMEOUT, halted.wait_for(|halted| *halted));
        let late = said.await.is_err();
        if late {
            self.stop_shared().await;
        }
    }

    /// Sets the identity that the agent gets.
    pub(crate) fn set_identity(&self, identity: Identity) {
        self.identity.send_replace(Some(identity));
    }

    /// Returns true if the agent is to be `id` now.
    fn has_identity(&self, id: &str) -> bool {
        let current = self.identity.borrow();
        current.as_ref().is_some_and(|identity| identity.id == id)
    }

    /// Takes the identity back: the agent's greeting ends, and it greets anew.
    pub(crate) async fn take_identity_back(&self) {
        self.context.lock().await.greeting = None;
        self.identity.send_replace(None);
    }

    /// Failure of the host to serve a disk of the guest, which then saw I/O errors. None without a
    /// failure, or if another process controlled the VMM when it happened.
    pub fn disk_failure(&self) -> Option<String> {
        self.disk_failure.get().cloned()
    }

    /// Last console output of the guest, without control characters.
    pub fn console_tail(&self) -> String {
        printable(&self.console.tail())
    }
}

impl Drop for MicroVm {
    fn drop(&mut self) {
        // The driver owns the process, which is killed with it unless it is kept.
        self.driver.abort();
    }
}
