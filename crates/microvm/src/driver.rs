//! The task that listens to one `jiffy-vmm` process.

use crate::greeting::{Greeting, GreetingError};
use crate::link::Link;
use jiffy_engine::SandboxEnd;
use jiffy_proto::agent::{HELLO_PORT, Hello, Identity, Ready};
use jiffy_proto::console::ConsoleRing;
use jiffy_proto::vm::{Event, StopCause};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;
use tokio::process::Child;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// How far a guest is on its way up.
pub(crate) enum Step {
    Running,
    Hello { hello: Hello },
    Ready(Result<Ready, GreetingError>),
}

/// Listens to the VMM until it is gone.
pub(crate) struct Driver {
    pub link: Arc<Link>,
    pub child: Child,
    pub console: Arc<ConsoleRing>,
    /// Who the guest is, once that is known.
    pub identity: watch::Receiver<Option<Identity>>,
    pub steps: Option<mpsc::Sender<Step>>,
    pub killed: mpsc::Receiver<()>,
    pub cause: Option<StopCause>,
    /// Takes answers to requests.
    pub replies: mpsc::UnboundedSender<Event>,
    /// The guest was restored: a connection it had asked for before may break without a word.
    pub restored: bool,
}

impl Driver {
    pub async fn run(mut self, tell_end: watch::Sender<Option<SandboxEnd>>) {
        let mut greeting: Option<JoinHandle<Option<tokio::net::UnixStream>>> = None;
        loop {
            tokio::select! {
                event = self.link.recv() => match event {
                    Ok((Event::GuestConnect { port: HELLO_PORT }, fds)) => {
                        let next = self.greet(fds);
                        // The agent gave up the connection before.
                        if let Some(old) = std::mem::replace(&mut greeting, next) {
                            old.abort();
                        }
                    }
                    Ok((event, _)) => self.on_event(event).await,
                    Err(_) => break,
                },
                _ = self.killed.recv() => {
                    let _ = self.child.start_kill();
                }
            }
        }
        let status = self.child.wait().await;
        if let Some(greeting) = greeting {
            greeting.abort();
        }
        let end = judge(self.cause.take(), status, &self.console.tail());
        tracing::debug!(?end, "sandbox ended");
        // The end is known before the steps close, so that whoever waits for a step finds it.
        tell_end.send_replace(Some(end));
    }

    /// Greets in a task of its own, so that the VMM is listened to meanwhile.
    fn greet(&mut self, fds: Vec<OwnedFd>) -> Option<JoinHandle<Option<tokio::net::UnixStream>>> {
        let stream = UnixStream::from(fds.into_iter().next()?);
        stream.set_nonblocking(true).ok()?;
        let stream = tokio::net::UnixStream::from_std(stream).ok()?;
        let mut identity = self.identity.clone();
        let steps = self.steps.clone();
        let restored = self.restored;
        Some(tokio::spawn(async move {
            let result = match Greeting::hear(stream).await {
                Ok(greeting) => {
                    let hello = greeting.hello.clone();
                    if let Some(steps) = &steps {
                        let _ = steps.send(Step::Hello { hello }).await;
                    }
                    let identity = match identity.wait_for(Option::is_some).await {
                        Ok(identity) => identity.clone(),
                        Err(_) => None,
                    };
                    // Nobody wants this guest any more.
                    let identity = identity?;
                    greeting.answer(&identity).await
                }
                // The agent greets again on another connection.
                Err(GreetingError::Io(_) | GreetingError::NoLine) if restored => return None,
                Err(e) => Err(e),
            };
            let (stream, ready) = match result {
                Ok((stream, ready)) => (Some(stream), Ok(ready)),
                Err(e) => (None, Err(e)),
            };
            if let Some(steps) = steps {
                let _ = steps.send(Step::Ready(ready)).await;
            }
            // Held open until the VM ends: its closing would tell the agent to greet again.
            let kept = stream?;
            std::future::pending::<()>().await;
            Some(kept)
        }))
    }

    async fn on_event(&mut self, event: Event) {
        match event {
            Event::Started(_) => {
                if let Some(steps) = &self.steps {
                    let _ = steps.send(Step::Running).await;
                }
            }
            Event::Stopped(cause) => self.cause = Some(cause),
            Event::DeviceFailed { device, reason } => {
                tracing::warn!(device, reason, "a device of the guest failed");
            }
            Event::Paused { .. }
            | Event::Resumed
            | Event::Snapshotted(_)
            | Event::SnapshotFailed { .. }
            | Event::WorkingSet { .. } => {
                let _ = self.replies.send(event);
            }
            Event::GuestConnect { .. } | Event::Stats(_) => {}
        }
    }
}

/// Why the sandbox ended: what the VMM said, how its process ended, and the guest's last words.
fn judge(cause: Option<StopCause>, status: io::Result<ExitStatus>, console: &[u8]) -> SandboxEnd {
    // Whatever a VMM said before: one that made a call its filter forbids was broken, or no longer ours.
    if let Ok(status) = &status
        && status.signal() == Some(libc::SIGSYS)
    {
        return SandboxEnd::VmmDied {
            status: status.to_string(),
        };
    }
    match cause {
        Some(StopCause::Requested) => SandboxEnd::Requested,
        Some(StopCause::GuestReset) => last_words(&printable(console)),
        Some(StopCause::GuestFault { reason }) => SandboxEnd::GuestFault { reason },
        Some(StopCause::BadConfig { reason } | StopCause::HostError { reason }) => {
            SandboxEnd::HostError { reason }
        }
        None => SandboxEnd::VmmDied {
            status: match status {
                Ok(status) => status.to_string(),
                Err(e) => e.to_string(),
            },
        },
    }
}

fn last_words(console: &str) -> SandboxEnd {
    const PANIC: &str = "Kernel panic - not syncing: ";
    let Some(at) = console.rfind(PANIC) else {
        return SandboxEnd::GuestReset;
    };
    let message = console[at + PANIC.len()..]
        .lines()
        .next()
        .unwrap_or_default()
        .trim()
        .to_owned();
    let memory = [
        "Out of memory",
        "out of memory",
        "System is deadlocked on memory",
    ];
    if memory.iter().any(|words| message.contains(words)) {
        SandboxEnd::GuestOutOfMemory { message }
    } else {
        SandboxEnd::GuestPanic { message }
    }
}

/// Text for a terminal: no control characters but line ends and tabs.
pub(crate) fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .chars()
        .filter(|c| !c.is_control() || matches!(c, '\n' | '\t'))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_told_in_the_kernels_own_words() {
        let console =
            "foo\n[    1.2] Kernel panic - not syncing: sysrq triggered crash\n[    1.3] CPU: 0\n";
        let message = "sysrq triggered crash".to_owned();
        assert_eq!(last_words(console), SandboxEnd::GuestPanic { message });
        let oom = "Kernel panic - not syncing: System is deadlocked on memory\n";
        assert!(matches!(
            last_words(oom),
            SandboxEnd::GuestOutOfMemory { .. }
        ));
        assert_eq!(
            last_words("reboot: Restarting system\n"),
            SandboxEnd::GuestReset
        );
    }

    #[test]
    fn a_vmm_that_its_filter_killed_is_not_believed() {
        let end = |signal| {
            judge(
                Some(StopCause::Requested),
                Ok(ExitStatus::from_raw(signal)),
                b"",
            )
        };
        assert!(matches!(end(libc::SIGSYS), SandboxEnd::VmmDied { .. }));
        // One that was slow to leave and was killed for it did nothing wrong.
        assert_eq!(end(libc::SIGKILL), SandboxEnd::Requested);
    }

    #[test]
    fn console_output_cannot_drive_the_terminal() {
        assert_eq!(printable(b"a\x1b[2Jb\r\n\x07c"), "a[2Jb\nc");
    }
}
