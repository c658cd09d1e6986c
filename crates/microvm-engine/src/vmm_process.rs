//! Process of a VMM: a child, or one adopted from an earlier process.

use jiffy_engine_api::ProcessInstance;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::{Arc, OnceLock};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::Child;

/// Path of a kept VMM's control socket; not set while it is not kept.
pub(crate) type KeptSocket = Arc<OnceLock<PathBuf>>;

#[derive(Debug)]
enum ProcessRef {
    Child(Child),
    /// Pidfd, readable when the process has ended.
    Adopted(AsyncFd<OwnedFd>),
}

/// VMM process. Dropping it ends the process, unless it is kept.
#[derive(Debug)]
pub(crate) struct VmmProcess {
    process_ref: ProcessRef,
    kept: KeptSocket,
}

impl VmmProcess {
    pub fn child(child: Child, kept: KeptSocket) -> Self {
        let process_ref = ProcessRef::Child(child);
        Self { process_ref, kept }
    }

    /// Opens the process that `mark` identifies, if it lives. Must be called inside a tokio
    /// runtime.
    pub fn find(mark: &ProcessInstance, kept: KeptSocket) -> io::Result<Self> {
        let pidfd = open(mark.pid)?;
        // A pidfd refers to one process for ever: if the mark matches now, it was opened on the
        // right one.
        if ProcessInstance::of(mark.pid)? != *mark {
            return Err(io::ErrorKind::NotFound.into());
        }
        // SAFETY: an OwnedFd is the same descriptor always, and closes it only when dropped.
        let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }
            .map_err(|e| e.into_parts().1)?;
        let process_ref = ProcessRef::Adopted(pidfd);
        Ok(Self { process_ref, kept })
    }

    pub fn kill(&mut self) {
        match &mut self.process_ref {
            ProcessRef::Child(child) => drop(child.start_kill()),
            ProcessRef::Adopted(pidfd) => {
                // The process may have exited already.
                let _ = pidfd_send_signal(pidfd.get_ref(), Signal::KILL);
            }
        }
    }

    /// Waits until the process has ended; only its parent gets the exit status. Safe to cancel.
    pub async fn wait(&mut self) -> io::Result<Option<ExitStatus>> {
        match &mut self.process_ref {
            ProcessRef::Child(child) => child.wait().await.map(Some),
            ProcessRef::Adopted(pidfd) => pidfd.readable().await.map(|_| None),
        }
    }
}

impl Drop for VmmProcess {
    fn drop(&mut self) {
        if self.kept.get().is_none() {
            self.kill();
        }
    }
}

fn open(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    Ok(pidfd_open(
        pid.ok_or(io::ErrorKind::NotFound)?,
        PidfdFlags::empty(),
    )?)
}
