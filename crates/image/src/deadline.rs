//! Deadlines of processes.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io;
use std::process::Child;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Kills a process at its deadline, unless dropped before.
pub(crate) struct Deadline {
    done: Option<mpsc::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Deadline {
    /// Watches `child`, which has not been waited for.
    pub(crate) fn begin(child: &Child, most: Duration) -> io::Result<Self> {
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        // Refers to this process even after its end.
        let process = pidfd_open(pid.ok_or(io::ErrorKind::NotFound)?, PidfdFlags::empty())?;
        let (done, ended) = mpsc::channel();
        let thread = thread::Builder::new().spawn(move || {
            if ended.recv_timeout(most) == Err(mpsc::RecvTimeoutError::Timeout) {
                // It may have ended.
                let _ = pidfd_send_signal(process, Signal::KILL);
            }
        })?;
        Ok(Self {
            done: Some(done),
            thread: Some(thread),
        })
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        drop(self.done.take());
        if let Some(thread) = self.thread.take() {
            // The thread ends by itself.
            let _ = thread.join();
        }
    }
}
