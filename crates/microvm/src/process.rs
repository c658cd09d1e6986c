//! The process of a VMM: a child of ours, or one that an earlier process left to us.

use jiffy_engine::ProcessMark;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::{Arc, OnceLock};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::Child;

/// Where the control socket of a kept VMM is; not set while it is not kept.
pub(crate) type Kept = Arc<OnceLock<PathBuf>>;

#[derive(Debug)]
enum Tie {
    Child(Child),
    /// A descriptor of the process, readable when that is gone.
    Adopted(AsyncFd<OwnedFd>),
}

/// A VMM process. Dropping it ends it, unless it is kept.
#[derive(Debug)]
pub(crate) struct Process {
    tie: Tie,
    kept: Kept,
}

impl Process {
    pub fn child(child: Child, kept: Kept) -> Self {
        let tie = Tie::Child(child);
        Self { tie, kept }
    }

    /// The process that `mark` means, if it lives. Must be called inside a tokio runtime.
    pub fn find(mark: &ProcessMark, kept: Kept) -> io::Result<Self> {
        let pidfd = open(mark.pid)?;
        // The descriptor means one process for ever: if the mark is right now, it was opened on the right one.
        if ProcessMark::of(mark.pid)? != *mark {
            return Err(io::ErrorKind::NotFound.into());
        }
        // SAFETY: an OwnedFd is the same descriptor always, and closes it only when dropped.
        let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }
            .map_err(|e| e.into_parts().1)?;
        let tie = Tie::Adopted(pidfd);
        Ok(Self { tie, kept })
    }

    pub fn kill(&mut self) {
        match &mut self.tie {
            Tie::Child(child) => drop(child.start_kill()),
            Tie::Adopted(pidfd) => {
                let fd = pidfd.get_ref().as_raw_fd();
                // SAFETY: an open descriptor of a process, and no siginfo.
                unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, libc::SIGKILL, 0, 0) };
            }
        }
    }

    /// Waits until it is gone; how it ended is told to its parent only. Safe to cancel.
    pub async fn wait(&mut self) -> io::Result<Option<ExitStatus>> {
        match &mut self.tie {
            Tie::Child(child) => child.wait().await.map(Some),
            Tie::Adopted(pidfd) => pidfd.readable().await.map(|_| None),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.kept.get().is_none() {
            self.kill();
        }
    }
}

fn open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: a system call without pointers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    match i32::try_from(fd) {
        // SAFETY: the kernel has just made this descriptor for us; it is close-on-exec by itself.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}
