//! Process forked from the VMM that writes memory as it was at the time of the fork, while the
//! guest continues to run. Copy-on-write separates both views, so the guest is only paused while
//! page tables are copied.
//!
//! A *helper* is a second process, which this process forks to write a part of the chunks.

use super::failed;
use super::layer_writer::LayerWriter;
use crate::error::VmmError;
use jiffy_proto::kernel;
use nix::errno::Errno;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
use rustix::process::{Signal, pidfd_send_signal};
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Running writer process. Dropping the handle does not terminate the process. It exits with the
/// VMM's main thread.
#[derive(Debug)]
pub struct WriterProcess {
    /// Pidfd, which is readable when the process has exited.
    pub pidfd: OwnedFd,
}

impl WriterProcess {
    /// Forks the writer. No vCPU may be running. Must be called from the main thread, because the
    /// child is killed when the calling thread exits. The child retains only the standard streams
    /// and the descriptors in `keep`.
    pub fn start(writer: &mut LayerWriter<'_>, keep: &[RawFd]) -> Result<Self, VmmError> {
        let mut keep = keep.to_vec();
        // `run_writer` closes all descriptors between those to keep, which requires ascending
        // order.
        keep.sort_unstable();
        // SAFETY: the child continues in `run_writer`.
        match unsafe { fork() } {
            Ok(None) => run_writer(writer, &keep),
            Ok(Some(pidfd)) => Ok(Self { pidfd }),
            Err(e) => Err(failed("forking the process that writes memory")(e)),
        }
    }

    /// Kills the process, whose result is then an error.
    pub fn cancel(&self) {
        // Ignore the error: the process has exited already.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Returns the result of an exited process.
    pub fn finish(self) -> Result<(), VmmError> {
        match wait(&self.pidfd).map_err(failed("waiting for the process that writes memory"))? {
            ProcessEnd::Exited(0) => Ok(()),
            ProcessEnd::Exited(errno) => Err(failed("writing memory")(Errno::from_raw(errno))),
            ProcessEnd::Killed(signal) => Err(VmmError::host(
                "writing memory",
                format!("the process that does it was killed by signal {signal}"),
            )),
        }
    }
}

/// Forks. Returns `None` in the child, which is killed when the thread that forked it exits.
///
/// # Safety
/// The child has a copy of all memory, including locks that other threads hold. It may only make
/// system calls and access existing memory, and must exit with `_exit`.
unsafe fn fork() -> Result<Option<OwnedFd>, Errno> {
    let flags = libc::CLONE_PIDFD | libc::SIGCHLD;
    let mut pidfd: libc::c_int = -1;
    // SAFETY: without CLONE_VM, the child continues here. Otherwise guaranteed by the caller.
    let pid = unsafe {
        // Arguments of clone on x86-64: flags, stack (0: same address), pidfd, child tid, tls.
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
        0 => {
            // SAFETY: the call has no pointer arguments.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            // If the parent exited before the call, no signal is sent. The writer then exits by
            // itself when the layer is written.
            Ok(None)
        }
        // SAFETY: the kernel has just created this descriptor for this process.
        1.. => Ok(Some(unsafe { OwnedFd::from_raw_fd(pidfd) })),
        _ => Err(Errno::last()),
    }
}

/// End of a process.
enum ProcessEnd {
    Exited(i32),
    Killed(i32),
}

/// Waits for a child process. Makes only one system call, so a forked child may call this function
/// too.
fn wait(pidfd: &OwnedFd) -> Result<ProcessEnd, Errno> {
    // SAFETY: an all-zero siginfo_t is valid, and the kernel fills it.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // A descriptor is never negative.
    let id = libc::id_t::try_from(pidfd.as_raw_fd()).unwrap_or(0);
    // SAFETY: waits for a child by an open descriptor. The result is written to a local variable.
    let result = unsafe { libc::waitid(libc::P_PIDFD, id, &raw mut info, libc::WEXITED) };
    if result != 0 {
        return Err(Errno::last());
    }
    // SAFETY: waitid succeeded with WEXITED, so this field is set.
    let status = unsafe { info.si_status() };
    Ok(match info.si_code {
        libc::CLD_EXITED => ProcessEnd::Exited(status),
        _ => ProcessEnd::Killed(status),
    })
}

/// Main function of the writer process.
fn run_writer(writer: &mut LayerWriter<'_>, keep: &[RawFd]) -> ! {
    // SAFETY: system calls without pointer arguments. This process has its own descriptor table,
    // and uses none of the closed descriptors.
    unsafe {
        // Copies of the descriptors of KVM and sockets must not outlive the VMM.
        let mut next = 3;
        for &fd in keep {
            close_range(next, fd - 1);
            next = next.max(fd + 1);
        }
        close_range(next, libc::c_int::MAX);
    }
    writer.enable_bounce_buffer();
    exit_with(match writer.middle_chunk() {
        Some(middle_chunk) => write_in_two_processes(writer, middle_chunk),
        None => writer.write(),
    })
}

/// Forks a helper for the chunks starting at `middle_chunk`: one process compares and copies while
/// the other waits for storage.
fn write_in_two_processes(writer: &mut LayerWriter<'_>, middle_chunk: u64) -> Result<(), Errno> {
    // Both processes write to the same file. The length is set once, before the fork.
    writer.set_len()?;
    // The helper passes its part of the index through shared memory.
    let Some(words) = SharedWords::new(writer.index_words().count()) else {
        return writer.write();
    };
    // SAFETY: the child writes, which allocates no memory, and exits.
    let Ok(helper) = (unsafe { fork() }) else {
        // The limit of processes is reached: one process takes longer.
        return writer.write();
    };
    let Some(helper) = helper else {
        let written = writer.write_range(middle_chunk..u64::MAX);
        words.fill(writer.index_words());
        exit_with(written);
    };
    let written = writer.write_range(0..middle_chunk);
    // Wait for the helper even if this process failed, so that the helper does not write after this
    // process has exited.
    match wait(&helper)? {
        ProcessEnd::Exited(0) => written?,
        ProcessEnd::Exited(errno) => return Err(Errno::from_raw(errno)),
        ProcessEnd::Killed(_) => return Err(Errno::EINTR),
    }
    writer.add_index_words(words.iter());
    writer.write_index()
}

/// Words in memory shared between a process and its child. Mapped until both exit.
struct SharedWords {
    start: NonNull<AtomicU64>,
    count: usize,
}

impl SharedWords {
    fn new(count: usize) -> Option<Self> {
        let bytes = NonZeroUsize::new(count.checked_mul(size_of::<u64>())?)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address chosen by the kernel.
        let start =
            unsafe { mmap_anonymous(None, bytes, protection, MapFlags::MAP_SHARED) }.ok()?;
        let start = start.cast();
        Some(Self { start, count })
    }

    /// Returns the words.
    fn slice(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has this length, is page-aligned and initially zero, and is never
        // unmapped.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }

    /// Stores words from the start on.
    fn fill(&self, words: impl Iterator<Item = u64>) {
        let slots = self.slice().iter();
        slots
            .zip(words)
            .for_each(|(to, word)| to.store(word, Ordering::Release));
    }

    fn iter(&self) -> impl Iterator<Item = u64> {
        self.slice().iter().map(|word| word.load(Ordering::Acquire))
    }
}

/// Ends the writer process. Its exit status is 0 or the error number, which the parent reads.
fn exit_with(written: Result<(), Errno>) -> ! {
    let status = match written {
        Ok(()) => 0,
        // `UnknownErrno` is 0, which would report success.
        Err(Errno::UnknownErrno) => libc::EIO,
        Err(errno) => errno as libc::c_int,
    };
    // SAFETY: exits this process without running any other code.
    unsafe { libc::_exit(status) }
}

/// Closes `first..=last` if the range is not empty.
///
/// # Safety
/// The descriptors must not be used afterwards.
unsafe fn close_range(first: RawFd, last: RawFd) {
    if first <= last {
        // SAFETY: guaranteed by the caller.
        let _ = unsafe { kernel::close_range(first.unsigned_abs(), last.unsigned_abs(), 0) };
    }
}
