//! [`VmmProcess`]: the process of a VMM. It is a child of this daemon, or was adopted from an
//! earlier one.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.

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

/// Path of a detached VMM's control socket. Not set while the VMM is not detached.
pub(crate) type DetachedSocket = Arc<OnceLock<PathBuf>>;

/// Reference to the process of a VMM.
#[derive(Debug)]
enum ProcessRef {
    Child(Child),
    /// Pidfd, which is readable when the process has exited.
    Adopted(AsyncFd<OwnedFd>),
}

/// VMM process. Dropping it kills the process, unless the VMM is detached.
#[derive(Debug)]
pub(crate) struct VmmProcess {
    process_ref: ProcessRef,
    detached_socket: DetachedSocket,
}

impl VmmProcess {
    pub fn child(child: Child, detached_socket: DetachedSocket) -> Self {
        let process_ref = ProcessRef::Child(child);
        Self {
            process_ref,
            detached_socket,
        }
    }

    /// Opens the process that `mark` identifies. Fails if the process has exited. Must be called
    /// inside a tokio runtime.
    pub fn find(mark: &ProcessInstance, detached_socket: DetachedSocket) -> io::Result<Self> {
        let pidfd = open(mark.pid)?;
        // A pidfd always refers to the same process. If the mark matches now, the right process was
        // opened.
        if ProcessInstance::of(mark.pid)? != *mark {
            return Err(io::ErrorKind::NotFound.into());
        }
        // SAFETY: an OwnedFd always is the same descriptor, which is closed only when it is
        // dropped.
        let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }
            .map_err(|e| e.into_parts().1)?;
        let process_ref = ProcessRef::Adopted(pidfd);
        Ok(Self {
            process_ref,
            detached_socket,
        })
    }

    pub fn kill(&mut self) {
        match &mut self.process_ref {
            // Ignore the error: the process has exited already.
            ProcessRef::Child(child) => drop(child.start_kill()),
            ProcessRef::Adopted(pidfd) => {
                // Ignore the error: the process may have exited already.
                let _ = pidfd_send_signal(pidfd.get_ref(), Signal::KILL);
            }
        }
    }

    /// Waits until the process has exited. Only its parent receives the exit status. Cancel-safe.
    pub async fn wait(&mut self) -> io::Result<Option<ExitStatus>> {
        match &mut self.process_ref {
            ProcessRef::Child(child) => child.wait().await.map(Some),
            ProcessRef::Adopted(pidfd) => pidfd.readable().await.map(|_| None),
        }
    }
}

impl Drop for VmmProcess {
    fn drop(&mut self) {
        // A detached VMM continues to run without this process.
        if self.detached_socket.get().is_none() {
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
