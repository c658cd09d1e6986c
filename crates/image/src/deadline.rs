//! Kills child processes that exceed their time limit.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io;
use std::process::Child;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Kills a process at its deadline, unless dropped earlier.
pub(crate) struct Deadline {
    /// Sender whose drop ends the thread.
    cancel: Option<mpsc::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Deadline {
    /// Starts a deadline for `child`, which must not have been waited for yet.
    pub(crate) fn start(child: &Child, timeout: Duration) -> io::Result<Self> {
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        // A pidfd refers to this process even after it has exited and its pid is reused.
        let process = pidfd_open(pid.ok_or(io::ErrorKind::NotFound)?, PidfdFlags::empty())?;
        let (cancel, cancelled) = mpsc::channel();
        let thread = thread::Builder::new().spawn(move || {
            if cancelled.recv_timeout(timeout) == Err(mpsc::RecvTimeoutError::Timeout) {
                // Ignore the error: the process may have exited.
                let _ = pidfd_send_signal(process, Signal::KILL);
            }
        })?;
        Ok(Self {
            cancel: Some(cancel),
            thread: Some(thread),
        })
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        // Closing the channel ends the wait of the thread.
        drop(self.cancel.take());
        if let Some(thread) = self.thread.take() {
            // Ignore the error: the thread cannot panic, and its result is not needed.
            let _ = thread.join();
        }
    }
}
