//! Driver of a VMM: the task that reads all messages of one `jiffy-vmm` process and passes them to
//! the operations that wait, until the process exits.
//!
//! The *greeting* is the first message of the agent, which then receives the identity of its
//! sandbox. A *hook* is an executable in the guest that the agent runs before the state of the
//! guest is stored, and after the guest continues. A daemon *adopts* the guests that continued to
//! run while no daemon ran.

use crate::boot_steps::{BootStep, NextSteps};
use crate::control_socket::ControlSocket;
use crate::exit_reason::classify;
use crate::greeting_task::GreetingTask;
use crate::vmm::Vmm;
use crate::vmm_process::{DetachedSocket, VmmProcess};
use jiffy_engine_api::ExitReason;
use jiffy_proto::agent::{HELLO_PORT, Identity};
use jiffy_proto::console::ConsoleRing;
use jiffy_proto::vm::{Event, StopCause};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// Time for which a VMM may run after it closed its control socket. Then it is killed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum length of a reason reported by a VMM, in characters.
const MAX_REASON_CHARS: usize = 300;

/// Serves the VMM's control socket until the VMM exits.
pub(crate) struct VmmDriver {
    pub link: Arc<ControlSocket>,
    pub vmm: Vmm,
    pub pid: u32,
    pub process: VmmProcess,
    pub detached_socket: DetachedSocket,
    pub console: Arc<ConsoleRing>,
    /// Identity of the guest. `None` until it is assigned.
    pub identity: watch::Receiver<Option<Identity>>,
    /// Sender for the steps of the current boot or rollback. `None` for an adopted guest until its
    /// first rollback.
    pub steps: Option<mpsc::Sender<BootStep>>,
    /// Set when the agent reports that the guest may have hooks. The daemon skips hooks of guests
    /// without any.
    pub hooks: Arc<AtomicBool>,
    /// Sender that replaces `steps` when the VMM starts a rollback.
    pub next_steps: NextSteps,
    /// Receives requests to kill the VMM.
    pub killed: mpsc::Receiver<()>,
    /// Cause of the guest's stop that the VMM reported.
    pub cause: Option<StopCause>,
    /// Set when the VMM has reported that the guest no longer runs.
    pub halted: watch::Sender<bool>,
    /// First error of the host while it served a disk.
    pub disk_failure: Arc<OnceLock<String>>,
    /// Passes the VMM's replies to the snapshot context of the VM.
    pub replies: mpsc::UnboundedSender<Event>,
    /// True if the guest was restored. Connections from before the snapshot may then break at any
    /// time.
    pub restored: bool,
}

impl VmmDriver {
    /// Serves the socket until the VMM exits. Then publishes the exit reason to `end_sender`.
    pub async fn run(mut self, end_sender: watch::Sender<Option<ExitReason>>) {
        let mut greeting: Option<JoinHandle<()>> = None;
        loop {
            tokio::select! {
                event = self.link.recv() => match event {
                    // The guest can only connect to this port. The VMM rejects all other ports.
                    Ok((Event::GuestConnect { port: HELLO_PORT }, fds)) => {
                        let next = self.answer_greeting(fds);
                        // The agent abandoned the earlier connection.
                        if let Some(old) = std::mem::replace(&mut greeting, next) {
                            old.abort();
                        }
                    }
                    Ok((event, _)) => {
                        if event == Event::RollbackBegun {
                            // The rollback terminated the agent that had greeted.
                            if let Some(old) = greeting.take() {
                                old.abort();
                            }
                            // Report the steps to the rollback instead of the boot.
                            self.steps = self.next_steps.take();
                            self.restored = true;
                        }
                        self.on_event(event).await;
                    }
                    Err(_) => break,
                },
                // A dropped sender is not a request to kill: the guest may be detached.
                Some(()) = self.killed.recv() => {
                    self.process.kill();
                }
            }
        }
        // The control socket was closed: the VMM is exiting.
        let exit = tokio::time::timeout(EXIT_TIMEOUT, self.process.wait()).await;
        let status = match exit {
            Ok(status) => status,
            // The VMM closed the connection but continues to run without control.
            Err(_) => {
                self.process.kill();
                self.process.wait().await
            }
        };
        // The control group counts OOM kills, so read the counter before the group is removed.
        let over_limit = self.vmm.ran_out_of_memory(self.pid);
        self.vmm.remove_group(self.pid);
        if let Some(socket) = self.detached_socket.get() {
            // Ignore the error: `end_unadopted` removes remaining sockets.
            let _ = std::fs::remove_file(socket);
        }
        if let Some(greeting) = greeting {
            greeting.abort();
        }
        let end = classify(self.cause.take(), status, over_limit, &self.console.tail());
        tracing::debug!(pid = self.pid, ?end, "VMM exited");
        // Publish the reason before the channel of steps closes: a task that waits for a step reads
        // the reason then.
        end_sender.send_replace(Some(end));
    }

    /// Handles the agent's greeting in a separate task, so that the control socket is served
    /// meanwhile.
    fn answer_greeting(&mut self, fds: Vec<OwnedFd>) -> Option<JoinHandle<()>> {
        let stream = UnixStream::from(fds.into_iter().next()?);
        stream.set_nonblocking(true).ok()?;
        let stream = tokio::net::UnixStream::from_std(stream).ok()?;
        let (identity, steps) = (self.identity.clone(), self.steps.clone());
        let hooks = self.hooks.clone();
        let task = GreetingTask::new(identity, steps, self.restored, hooks);
        Some(tokio::spawn(task.run(stream)))
    }

    /// Handles a message of the VMM: records it, or passes it to the operation that waits for it.
    async fn on_event(&mut self, event: Event) {
        match event {
            Event::Started(_) => {
                if let Some(steps) = &self.steps {
                    // Ignore the error: no task waits for the boot now.
                    let _ = steps.send(BootStep::Running).await;
                }
            }
            Event::Stopped(cause) => {
                self.cause = Some(cause);
                self.halted.send_replace(true);
            }
            Event::DeviceFailed { device, reason } => {
                tracing::warn!(
                    pid = self.pid,
                    device,
                    reason,
                    "a device of the guest failed"
                );
            }
            Event::DiskFailed { reason } => {
                tracing::warn!(
                    pid = self.pid,
                    reason,
                    "the host cannot serve a disk of the guest"
                );
                // The VMM may be compromised: remove control characters and limit the length.
                let reason = reason.chars().filter(|c| !c.is_control());
                // Ignore the error: an earlier failure was recorded.
                let _ = self
                    .disk_failure
                    .set(reason.take(MAX_REASON_CHARS).collect());
            }
            Event::Paused { .. }
            | Event::Resumed
            | Event::Captured { .. }
            | Event::Snapshotted(_)
            | Event::SnapshotFailed { .. }
            | Event::RollbackRefused { .. }
            | Event::RollbackBegun
            | Event::RolledBack(_)
            | Event::WorkingSet { .. }
            | Event::Stats(_)
            | Event::Detached
            | Event::SnapshotResolved { .. } => {
                // Ignore the error: the handle of the VM was dropped.
                let _ = self.replies.send(event);
            }
            // These events are not expected here: a connection to another port, or a reply to an
            // adoption.
            Event::GuestConnect { .. } | Event::Reattached { .. } => {}
        }
    }
}
