//! A process forked from the VMM that writes memory as it was at that instant, while the guest runs on. The kernel's copy on
//! write keeps the two views apart, so that the guest stands still for as long as it takes to copy page tables, not memory.

use super::failed;
use super::writer::Writer;
use crate::error::VmmError;
use nix::errno::Errno;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// A writer at work. Dropping it leaves it at work: it dies with the VMM's main thread.
#[derive(Debug)]
pub struct Child {
    /// Readable when it is done.
    pub pidfd: OwnedFd,
}

impl Child {
    /// Forks. Must be called from the main thread, whose death ends the child, while no vCPU runs. The child keeps only the
    /// descriptors in `keep`.
    pub fn start(writer: &mut Writer<'_>, keep: &[RawFd]) -> Result<Self, VmmError> {
        let mut keep = keep.to_vec();
        keep.sort_unstable();
        let flags = libc::CLONE_PIDFD | libc::SIGCHLD;
        let mut pidfd: libc::c_int = -1;
        // SAFETY: without CLONE_VM the child has its own copy of everything and goes on here. It makes only system calls and
        // touches only memory that exists already: it takes no lock and allocates nothing, and leaves by _exit.
        let pid = unsafe {
            libc::syscall(
                libc::SYS_clone,
                libc::c_long::from(flags),
                0,
                &raw mut pidfd,
                0,
                0,
            )
        };
        match pid {
            0 => serve(writer, &keep),
            1.. => Ok(Self {
                // SAFETY: the kernel has just made this descriptor for us.
                pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) },
            }),
            _ => Err(failed("forking the process that writes memory")(
                Errno::last(),
            )),
        }
    }

    /// Ends it: what it writes is not wanted any more. It is done soon afterwards, and has failed.
    pub fn cancel(&self) {
        let fd = self.pidfd.as_raw_fd();
        // SAFETY: an open descriptor of a child of ours, and no siginfo.
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, libc::SIGKILL, 0, 0) };
    }

    /// Takes the result of a child that is done.
    pub fn finish(self) -> Result<(), VmmError> {
        // SAFETY: an all-zero siginfo_t is valid, and the kernel fills it.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let id = libc::id_t::try_from(self.pidfd.as_raw_fd()).unwrap_or(0);
        // SAFETY: waits for a child of ours by an open descriptor, into a local.
        let result = unsafe { libc::waitid(libc::P_PIDFD, id, &raw mut info, libc::WEXITED) };
        if result != 0 {
            return Err(failed("waiting for the process that writes memory")(
                Errno::last(),
            ));
        }
        // SAFETY: waitid succeeded with WEXITED, so this is the field that is set.
        let status = unsafe { info.si_status() };
        match (info.si_code, status) {
            (libc::CLD_EXITED, 0) => Ok(()),
            (libc::CLD_EXITED, errno) => Err(failed("writing memory")(Errno::from_raw(errno))),
            (_, signal) => Err(VmmError::host(
                "writing memory",
                format!("the process that does it was killed by signal {signal}"),
            )),
        }
    }
}

/// The child's life.
fn serve(writer: &mut Writer<'_>, keep: &[RawFd]) -> ! {
    // SAFETY: system calls that take no pointers; the descriptors closed are this process's own copies.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        // KVM's and the sockets' descriptors must not live longer than the VMM because of us.
        let mut next = 3;
        for &fd in keep {
            close_range(next, fd - 1);
            next = next.max(fd + 1);
        }
        close_range(next, libc::c_int::MAX);
    }
    let status = match writer.write() {
        Ok(()) => 0,
        Err(Errno::UnknownErrno) => libc::EIO,
        Err(errno) => errno as libc::c_int,
    };
    // SAFETY: ends this process without running anything else.
    unsafe { libc::_exit(status) }
}

/// Closes `first..=last` if there are any.
///
/// # Safety
/// Nobody may use those descriptors any more.
unsafe fn close_range(first: RawFd, last: RawFd) {
    if first <= last {
        // SAFETY: the caller's promise.
        unsafe {
            libc::syscall(
                libc::SYS_close_range,
                libc::c_long::from(first),
                libc::c_long::from(last),
                0,
            )
        };
    }
}
