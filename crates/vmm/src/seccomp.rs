//! System calls that VMM threads may make while the guest runs. Any other call kills the process: a
//! thread that makes an unlisted call is compromised.

pub mod ioctl;

use crate::error::VmmError;
use ioctl::IoctlRequest;
use jiffy_confinement::{AllowedCalls, SyscallFilter, equals_long, equals_unsigned};
use std::io;
use std::sync::OnceLock;

/// System call that the filter of a kind of thread allows.
#[derive(Debug, Clone, Copy)]
pub struct AllowedSyscall {
    constant: &'static str,
    number: libc::c_long,
    /// Reason for allowing a call that no test observes. `crates/jiffy/tests/seccomp.rs` observes
    /// all other calls, and fails if a call is never made.
    pub unobserved_reason: Option<&'static str>,
}

impl AllowedSyscall {
    /// Name without the `SYS_` prefix.
    pub fn name(&self) -> &'static str {
        self.constant.trim_start_matches("SYS_")
    }
}

macro_rules! calls {
    (@reason) => { None };
    (@reason $reason:expr) => { Some($reason) };
    ($($call:ident $(: $reason:expr)?),* $(,)?) => {
        &[$(AllowedSyscall {
            constant: stringify!($call),
            number: libc::$call,
            unobserved_reason: calls!(@reason $($reason)?),
        }),*]
    };
}

// Reasons that several calls share.
const REASON_ALLOCATOR: &str =
    "memory allocator: the calls depend on sizes and on earlier allocations";
const REASON_THREAD_END: &str = "the end of a thread, which the end of the process may overtake";
const REASON_CHANNELS: &str = "std's channels, while another thread is in the middle of sending";
const REASON_LATE_RESET: &str = "a driver resets a device that has work left";
const REASON_RESTARTED_WAIT: &str =
    "a wait with a limit that the kernel's freezer, or a stop, interrupted";

const REASON_LAZY: &str = "memory that has not arrived: `crates/vmm/tests/snapshot/lazy.rs`";

/// System calls of threads that run vCPUs.
pub const VCPU_SYSCALLS: &[AllowedSyscall] = calls![
    SYS_brk: REASON_ALLOCATOR,
    SYS_close,
    SYS_epoll_ctl,
    SYS_exit: REASON_THREAD_END,
    SYS_futex,
    SYS_getrandom,
    SYS_ioctl,
    SYS_madvise: REASON_THREAD_END,
    SYS_mmap: REASON_ALLOCATOR,
    SYS_mprotect: REASON_ALLOCATOR,
    SYS_mremap: REASON_ALLOCATOR,
    SYS_munmap: REASON_ALLOCATOR,
    SYS_read: REASON_LATE_RESET,
    SYS_restart_syscall: REASON_RESTARTED_WAIT,
    SYS_rt_sigprocmask: REASON_THREAD_END,
    SYS_rt_sigreturn,
    SYS_sched_yield: REASON_CHANNELS,
    SYS_shutdown,
    SYS_sigaltstack: REASON_THREAD_END,
    SYS_timerfd_create,
    SYS_write,
];

/// System calls of the thread that serves the disks.
pub const DISK_SYSCALLS: &[AllowedSyscall] = calls![
    SYS_brk: REASON_ALLOCATOR,
    SYS_clock_gettime: "hosts whose clock cannot be read without the kernel",
    SYS_epoll_wait,
    SYS_exit: REASON_THREAD_END,
    SYS_fallocate: "a driver that discards or zeroes blocks: `virtio::blk::tests`",
    SYS_futex: "a snapshot in the middle of a request: `process::disk_thread`",
    SYS_madvise: REASON_THREAD_END,
    SYS_mmap: REASON_ALLOCATOR,
    SYS_mprotect: REASON_ALLOCATOR,
    SYS_mremap: REASON_ALLOCATOR,
    SYS_munmap: REASON_ALLOCATOR,
    SYS_pread64: "a write that begins or ends inside of a block: `virtio::blk::tests`",
    SYS_preadv,
    SYS_pwritev,
    SYS_read: "a queue with more work than a round has: `virtio::blk::tests`",
    SYS_restart_syscall: REASON_RESTARTED_WAIT,
    SYS_rt_sigprocmask: REASON_THREAD_END,
    SYS_sched_yield: REASON_CHANNELS,
    SYS_sendmsg: "a driver that breaks the contract: `hostile_driver`",
    SYS_sigaltstack: REASON_THREAD_END,
    SYS_timerfd_settime,
    SYS_write,
];

/// System calls of the thread that fills missing memory.
pub const FAULT_SYSCALLS: &[AllowedSyscall] = calls![
    SYS_accept4: REASON_LAZY,
    SYS_brk: REASON_ALLOCATOR,
    SYS_clock_gettime: "hosts whose clock cannot be read without the kernel",
    SYS_close: REASON_LAZY,
    SYS_exit: REASON_THREAD_END,
    SYS_exit_group: REASON_LAZY,
    SYS_futex: REASON_LAZY,
    SYS_ioctl: REASON_LAZY,
    SYS_madvise: REASON_THREAD_END,
    SYS_mmap: REASON_ALLOCATOR,
    SYS_mprotect: REASON_ALLOCATOR,
    SYS_mremap: REASON_ALLOCATOR,
    SYS_munmap: REASON_ALLOCATOR,
    SYS_poll: REASON_LAZY,
    SYS_pread64: REASON_LAZY,
    SYS_read: REASON_LAZY,
    SYS_recvfrom: REASON_LAZY,
    SYS_restart_syscall: REASON_RESTARTED_WAIT,
    SYS_rt_sigprocmask: REASON_THREAD_END,
    SYS_sendmsg: REASON_LAZY,
    SYS_sendto: REASON_LAZY,
    SYS_sigaltstack: REASON_THREAD_END,
    SYS_write: REASON_LAZY,
];

/// System calls of the event loop, which serves devices and the control socket, and of the snapshot
/// writer processes that it forks.
pub const MAIN_SYSCALLS: &[AllowedSyscall] = calls![
    SYS_accept4,
    SYS_brk: REASON_ALLOCATOR,
    SYS_clock_gettime: "hosts whose clock cannot be read without the kernel",
    SYS_clone,
    SYS_close,
    SYS_close_range,
    SYS_dup3,
    SYS_epoll_ctl,
    SYS_epoll_wait,
    SYS_exit_group,
    SYS_ftruncate,
    SYS_futex,
    SYS_getpid,
    SYS_getrandom,
    SYS_ioctl,
    SYS_lseek,
    SYS_madvise,
    SYS_mmap: REASON_ALLOCATOR,
    SYS_mprotect: REASON_ALLOCATOR,
    SYS_mremap: REASON_ALLOCATOR,
    SYS_munmap: REASON_ALLOCATOR,
    SYS_pidfd_send_signal,
    SYS_prctl,
    SYS_pread64,
    SYS_pwrite64,
    SYS_read,
    SYS_recvmsg,
    SYS_restart_syscall: REASON_RESTARTED_WAIT,
    SYS_rt_sigprocmask,
    SYS_sched_yield: REASON_CHANNELS,
    SYS_sendmsg,
    SYS_shutdown,
    SYS_sigaltstack,
    SYS_socketpair,
    SYS_statx,
    SYS_tgkill,
    SYS_timerfd_create,
    SYS_timerfd_settime,
    SYS_waitid,
    SYS_write,
    SYS_writev,
];

/// Returns the index of the argument that the filter of a call checks, and its only allowed value.
/// `None` for calls with any arguments.
/// - `clone` only forks snapshot writers.
/// - `prctl` only ties the writers' lifetime to their parent.
/// - `tgkill` only kicks threads of this process.
/// - `dup3` only replaces standard error.
/// - `statx` only queries descriptors.
///
/// `pidfd_send_signal` needs no fixed argument: the event loop has pidfds only of processes that it
/// forked.
fn fixed_argument(call: libc::c_long) -> Option<(u8, u64)> {
    // All constants are positive, so the conversion succeeds.
    let number = |n: libc::c_int| u64::try_from(n).unwrap_or(u64::MAX);
    match call {
        libc::SYS_clone => Some((0, number(libc::CLONE_PIDFD | libc::SIGCHLD))),
        libc::SYS_prctl => Some((0, number(libc::PR_SET_PDEATHSIG))),
        libc::SYS_tgkill => Some((0, u64::from(std::process::id()))),
        libc::SYS_dup3 => Some((1, number(libc::STDERR_FILENO))),
        libc::SYS_statx => Some((2, number(libc::AT_EMPTY_PATH))),
        _ => None,
    }
}

/// Confines the calling vCPU thread.
pub fn confine_vcpu() -> Result<(), VmmError> {
    confine(VCPU_SYSCALLS, ioctl::VCPU_IOCTLS)
}

/// Confines the disk thread.
pub fn confine_disks() -> Result<(), VmmError> {
    confine(DISK_SYSCALLS, &[])
}

/// Confines the thread that fills missing memory.
pub fn confine_faults() -> Result<(), VmmError> {
    confine(FAULT_SYSCALLS, ioctl::FAULT_IOCTLS)
}

/// Filter of the event loop's thread of a VM that tracks writes, if it was compiled in advance.
static MAIN_FILTER: OnceLock<SyscallFilter> = OnceLock::new();

/// Compiles the filter of the event loop's thread in advance, for a VM that tracks writes.
pub fn compile_main() {
    // Ignore errors: without this filter, `confine_main` compiles it and reports the error.
    if let Ok(filter) = compile(MAIN_SYSCALLS, &tracking_ioctls()) {
        let _ = MAIN_FILTER.set(filter);
    }
}

/// Confines the event loop's thread. `tracks_writes` is true if the VM has a
/// [`crate::snapshot::write_tracker::WriteTracker`].
pub fn confine_main(tracks_writes: bool) -> Result<(), VmmError> {
    match MAIN_FILTER.get() {
        _ if !tracks_writes => confine(MAIN_SYSCALLS, ioctl::MAIN_IOCTLS),
        Some(filter) => filter.apply().map_err(failed),
        None => confine(MAIN_SYSCALLS, &tracking_ioctls()),
    }
}

/// Returns the requests of the event loop of a VM that tracks writes.
fn tracking_ioctls() -> Vec<IoctlRequest> {
    [ioctl::MAIN_IOCTLS, ioctl::TRACKING_IOCTLS].concat()
}

fn failed(e: io::Error) -> VmmError {
    VmmError::host("seccomp filter", e)
}

/// Confines the calling thread to these system calls.
fn confine(calls: &[AllowedSyscall], requests: &[IoctlRequest]) -> Result<(), VmmError> {
    compile(calls, requests)?.apply().map_err(failed)
}

/// Compiles the filter of system calls. `ioctl` is only allowed with these requests.
fn compile(calls: &[AllowedSyscall], requests: &[IoctlRequest]) -> Result<SyscallFilter, VmmError> {
    let numbers: Vec<_> = calls.iter().map(|call| call.number).collect();
    let mut allowed = AllowedCalls::or_kill(&numbers);
    for call in numbers {
        let done = match (call, fixed_argument(call)) {
            (libc::SYS_ioctl, _) => {
                // The kernel reads 32 bits of the request number, so the filter compares 32 bits.
                let request = |r: &IoctlRequest| vec![equals_unsigned(1, r.number.into())];
                allowed.allow_if(call, requests.iter().map(request))
            }
            (_, Some((index, value))) => allowed.allow_if(call, [vec![equals_long(index, value)]]),
            // `or_kill` allows the call with any arguments.
            (_, None) => Ok(()),
        };
        done.map_err(failed)?;
    }
    allowed.compile().map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::signal::Signal;
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};

    /// Runs `work` in a child process. Returns how the child exited.
    fn in_child(work: impl FnOnce()) -> WaitStatus {
        // SAFETY: the child only makes system calls and exits with _exit.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                work();
                // SAFETY: exits the child immediately.
                unsafe { libc::_exit(0) }
            }
            ForkResult::Parent { child } => waitpid(child, None).unwrap(),
        }
    }

    #[test]
    fn opening_a_path_kills_a_confined_thread() {
        let confine_main = || confine_main(true);
        for confine in [confine_main, confine_vcpu, confine_disks, confine_faults] {
            let status = in_child(|| {
                confine().unwrap();
                // SAFETY: a valid C string. The call is not expected to return.
                unsafe { libc::open(c"/etc/passwd".as_ptr(), libc::O_RDONLY) };
            });
            assert!(
                matches!(status, WaitStatus::Signaled(_, Signal::SIGSYS, _)),
                "{status:?}"
            );
        }
    }

    #[test]
    fn a_confined_thread_can_replace_only_standard_error() {
        let replace = |which: libc::c_int| {
            in_child(|| {
                confine_main(true).unwrap();
                // SAFETY: the descriptors belong to the child.
                unsafe { libc::dup3(1, which, 0) };
            })
        };
        assert!(matches!(replace(2), WaitStatus::Exited(_, 0)));
        assert!(matches!(
            replace(0),
            WaitStatus::Signaled(_, Signal::SIGSYS, _)
        ));
    }

    #[test]
    fn an_unlisted_ioctl_kills_a_confined_thread() {
        /// `KVM_CREATE_VM`, `KVM_CREATE_VCPU`, `KVM_CREATE_DEVICE`, `KVM_SET_CPUID2`.
        const KVM: [u64; 4] = [0xae01, 0xae41, 0xc00c_aee0, 0x4008_ae90];
        /// `UFFDIO_API`, `TUNSETIFF`.
        const OTHERS: [u64; 2] = [0xc018_aa3f, 0x4004_54ca];
        let files = [libc::TIOCSTI, libc::FIONREAD, libc::FIONBIO, libc::FIOCLEX];
        let unlisted: Vec<u64> = [&KVM[..], &OTHERS, &files].concat();
        type Confine = fn() -> Result<(), VmmError>;
        let (main, vcpu) = (ioctl::MAIN_IOCTLS, ioctl::VCPU_IOCTLS);
        let tracking = tracking_ioctls();
        let tracking = tracking.as_slice();
        let threads: [(Confine, libc::c_long, _, _); 3] = [
            (|| confine_main(false), libc::SYS_exit_group, main, tracking),
            (|| confine_main(true), libc::SYS_exit_group, tracking, vcpu),
            (confine_vcpu, libc::SYS_exit, vcpu, tracking),
        ];
        for (confine, exit, listed, of_others) in threads {
            let request = |number: u64| {
                in_child(|| {
                    confine().unwrap();
                    // SAFETY: the descriptor does not exist, so no memory is accessed.
                    unsafe { libc::ioctl(-1, number, 0) };
                    // SAFETY: exits the child with the only call that its filter allows for this.
                    unsafe { libc::syscall(exit, 0) };
                })
            };
            for allowed in listed {
                let status = request(allowed.number.into());
                assert!(
                    matches!(status, WaitStatus::Exited(_, 0)),
                    "{}: {status:?}",
                    allowed.name
                );
            }
            let is_shared = |r: &&IoctlRequest| listed.iter().any(|own| own.number == r.number);
            let of_others = of_others.iter().filter(|r| !is_shared(r));
            let of_others = of_others.map(|r| u64::from(r.number));
            for number in unlisted.iter().copied().chain(of_others) {
                let status = request(number);
                assert!(
                    matches!(status, WaitStatus::Signaled(_, Signal::SIGSYS, _)),
                    "{number:#x}: {status:?}"
                );
            }
        }
    }

    #[test]
    fn a_confined_thread_can_allocate_memory() {
        let status = in_child(|| {
            confine_main(true).unwrap();
            drop(vec![0u8; 1 << 20]);
        });
        assert!(matches!(status, WaitStatus::Exited(_, 0)), "{status:?}");
    }
}
