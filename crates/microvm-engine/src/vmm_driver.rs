//! Task that serves the control socket of one `jiffy-vmm` process.

use crate::boot_steps::{BootStep, NextSteps};
use crate::control_socket::ControlSocket;
use crate::exit_reason::classify;
use crate::greeting_task::GreetingTask;
use crate::vmm::Vmm;
use crate::vmm_process::{KeptSocket, VmmProcess};
use jiffy_engine_api::ExitReason;
use jiffy_proto::agent::{HELLO_PORT, Identity};
use jiffy_proto::console::ConsoleRing;
use jiffy_proto::vm::{Event, StopCause};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// Time for a VMM to exit once it has closed its control socket.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest reason accepted from a VMM, in characters.
const MAX_REASON_CHARS: usize = 300;

/// Serves the VMM's control socket until the VMM ends.
pub(crate) struct VmmDriver {
    pub link: Arc<ControlSocket>,
    pub vmm: Vmm,
    pub pid: u32,
    pub process: VmmProcess,
    pub kept: KeptSocket,
    pub console: Arc<ConsoleRing>,
    /// Identity of the guest, once it is known.
    pub identity: watch::Receiver<Option<Identity>>,
    pub steps: Option<mpsc::Sender<BootStep>>,
    pub next_steps: NextSteps,
    pub killed: mpsc::Receiver<()>,
    pub cause: Option<StopCause>,
    /// True once the VMM has said that the guest runs no more.
    pub halted: watch::Sender<bool>,
    /// Failure of the host to serve a disk.
    pub disk_failure: Arc<OnceLock<String>>,
    /// Receives answers to requests.
    pub replies: mpsc::UnboundedSender<Event>,
    /// True if the guest was restored: a connection from before the snapshot may break at any time.
    pub restored: bool,
}

impl VmmDriver {
    pub async fn run(mut self, end_sender: watch::Sender<Option<ExitReason>>) {
        let mut greeting: Option<JoinHandle<()>> = None;
        loop {
            tokio::select! {
                event = self.link.recv() => match event {
                    Ok((Event::GuestConnect { port: HELLO_PORT }, fds)) => {
                        let next = self.answer_greeting(fds);
                        // The agent gave up the earlier connection.
                        if let Some(old) = std::mem::replace(&mut greeting, next) {
                            old.abort();
                        }
                    }
                    Ok((event, _)) => {
                        if event == Event::RollbackBegun {
                            // The agent that greeted is no more.
                            if let Some(old) = greeting.take() {
                                old.abort();
                            }
                            self.steps = self.next_steps.take();
                            self.restored = true;
                        }
                        self.on_event(event).await;
                    }
                    Err(_) => break,
                },
                // A dropped sender is no request: the guest may be kept.
                Some(()) = self.killed.recv() => {
                    self.process.kill();
                }
            }
        }
        let left = tokio::time::timeout(EXIT_TIMEOUT, self.process.wait()).await;
        let status = match left {
            Ok(status) => status,
            // It closed the connection but runs on, out of control.
            Err(_) => {
                self.process.kill();
                self.process.wait().await
            }
        };
        let over_limit = self.vmm.ran_out_of_memory(self.pid);
        self.vmm.remove_group(self.pid);
        if let Some(socket) = self.kept.get() {
            let _ = std::fs::remove_file(socket);
        }
        if let Some(greeting) = greeting {
            greeting.abort();
        }
        let end = classify(self.cause.take(), status, over_limit, &self.console.tail());
        tracing::debug!(?end, "sandbox ended");
        // The end is published before the channel of steps closes, so that a waiter for a step
        // finds it.
        end_sender.send_replace(Some(end));
    }

    /// Answers the agent's greeting in a task of its own, so that the control socket is served
    /// meanwhile.
    fn answer_greeting(&mut self, fds: Vec<OwnedFd>) -> Option<JoinHandle<()>> {
        let stream = UnixStream::from(fds.into_iter().next()?);
        stream.set_nonblocking(true).ok()?;
        let stream = tokio::net::UnixStream::from_std(stream).ok()?;
        let (identity, steps) = (self.identity.clone(), self.steps.clone());
        let task = GreetingTask::new(identity, steps, self.restored);
        Some(tokio::spawn(task.run(stream)))
    }

    async fn on_event(&mut self, event: Event) {
        match event {
            Event::Started(_) => {
                if let Some(steps) = &self.steps {
                    let _ = steps.send(BootStep::Running).await;
                }
            }
            Event::Stopped(cause) => {
                self.cause = Some(cause);
                self.halted.send_replace(true);
            }
            Event::DeviceFailed { device, reason } => {
                tracing::warn!(device, reason, "a device of the guest failed");
            }
            Event::DiskFailed { reason } => {
                tracing::warn!(reason, "the host cannot serve a disk of the guest");
                let reason = reason.chars().filter(|c| !c.is_control());
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
                let _ = self.replies.send(event);
            }
            Event::GuestConnect { .. } | Event::Reattached { .. } => {}
        }
    }
}
