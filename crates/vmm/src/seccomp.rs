//! What the kernel lets a VMM thread do once the guest runs. Everything else kills the process: a thread that
//! makes an unlisted call is no longer ours.

use crate::error::VmmError;
use seccompiler::{
    SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter,
};
use std::collections::BTreeMap;

/// A system call that threads of one kind may make.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    constant: &'static str,
    number: libc::c_long,
    /// Why it is allowed although nobody sees a VMM make it: all others are made by `crates/jiffy/tests/seccomp.rs`, which fails
    /// where one is not.
    pub unseen: Option<&'static str>,
}

impl Call {
    /// Its name.
    pub fn name(&self) -> &'static str {
        self.constant.trim_start_matches("SYS_")
    }
}

macro_rules! calls {
    (@reason) => { None };
    (@reason $reason:expr) => { Some($reason) };
    ($($call:ident $(: $reason:expr)?),* $(,)?) => {
        &[$(Call {
            constant: stringify!($call),
            number: libc::$call,
            unseen: calls!(@reason $($reason)?),
        }),*]
    };
}

const ALLOCATOR: &str =
    "the allocator's: which of them it makes depends on sizes, and on what was allocated before";
const THREAD_END: &str = "the end of a thread, which the end of the process may overtake";
const CHANNELS: &str = "std's channels, while another thread is in the middle of sending";
const LATE_RESET: &str = "a driver resets a device that has work left";
const HOST_SLEPT: &str = "a wait with a limit that the kernel's freezer, or a stop, interrupted";

/// The threads that run vCPUs.
pub const VCPU: &[Call] = calls![
    SYS_brk: ALLOCATOR,
    SYS_close,
    SYS_epoll_ctl,
    SYS_exit: THREAD_END,
    SYS_futex,
    SYS_getrandom,
    SYS_ioctl,
    SYS_madvise: THREAD_END,
    SYS_mmap: ALLOCATOR,
    SYS_mprotect: ALLOCATOR,
    SYS_mremap: ALLOCATOR,
    SYS_munmap: ALLOCATOR,
    SYS_read: LATE_RESET,
    SYS_restart_syscall: HOST_SLEPT,
    SYS_rt_sigprocmask: THREAD_END,
    SYS_rt_sigreturn,
    SYS_sched_yield: CHANNELS,
    SYS_shutdown,
    SYS_sigaltstack: THREAD_END,
    SYS_timerfd_create,
    SYS_write,
];

/// The event loop: devices and the control socket; and the processes that it forks to write snapshots.
pub const MAIN: &[Call] = calls![
    SYS_accept4,
    SYS_brk: ALLOCATOR,
    SYS_clock_gettime: "hosts whose clock cannot be read without the kernel",
    SYS_clone,
    SYS_close,
    SYS_close_range,
    SYS_dup3,
    SYS_epoll_ctl,
    SYS_epoll_wait,
    SYS_exit_group,
    SYS_fallocate: "a driver that discards or zeroes blocks: `virtio::blk::tests`",
    SYS_fcntl,
    SYS_ftruncate,
    SYS_futex,
    SYS_getpid,
    SYS_getrandom,
    SYS_ioctl,
    SYS_madvise,
    SYS_mmap: ALLOCATOR,
    SYS_mprotect: ALLOCATOR,
    SYS_mremap: ALLOCATOR,
    SYS_munmap: ALLOCATOR,
    SYS_pidfd_send_signal,
    SYS_prctl,
    SYS_pread64,
    SYS_preadv,
    SYS_pwrite64,
    SYS_pwritev,
    SYS_read,
    SYS_recvmsg,
    SYS_restart_syscall: HOST_SLEPT,
    SYS_rt_sigprocmask,
    SYS_sched_yield: CHANNELS,
    SYS_sendmsg,
    SYS_shutdown,
    SYS_sigaltstack,
    SYS_socketpair,
    SYS_tgkill,
    SYS_timerfd_settime,
    SYS_waitid,
    SYS_write,
    SYS_writev,
];

/// Which argument of a call has one value only, and which: a process that writes a snapshot is forked (and no thread or process of
/// another kind), it ends with this one, vCPU threads of this process are kicked, and standard error is replaced.
///
/// Of pidfds the event loop has only those of the processes it forked, and no way to others.
fn argument(call: libc::c_long) -> Option<(u8, u64)> {
    let number = |n: libc::c_int| u64::try_from(n).unwrap_or(u64::MAX);
    match call {
        libc::SYS_clone => Some((0, number(libc::CLONE_PIDFD | libc::SIGCHLD))),
        libc::SYS_prctl => Some((0, number(libc::PR_SET_PDEATHSIG))),
        libc::SYS_tgkill => Some((0, u64::from(std::process::id()))),
        libc::SYS_dup3 => Some((1, number(libc::STDERR_FILENO))),
        _ => None,
    }
}

/// Confines the calling vCPU thread.
pub fn confine_vcpu() -> Result<(), VmmError> {
    confine(VCPU)
}

/// Confines the event loop's thread.
pub fn confine_main() -> Result<(), VmmError> {
    confine(MAIN)
}

fn confine(calls: &[Call]) -> Result<(), VmmError> {
    let failed = |e: &dyn std::fmt::Display| VmmError::host("seccomp filter", e);
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for call in calls {
        let only = match argument(call.number) {
            None => Vec::new(),
            Some((argument, value)) => {
                let length = SeccompCmpArgLen::Qword;
                let equal = SeccompCondition::new(argument, length, SeccompCmpOp::Eq, value)
                    .map_err(|e| failed(&e))?;
                vec![SeccompRule::new(vec![equal]).map_err(|e| failed(&e))?]
            }
        };
        rules.insert(call.number, only);
    }
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::KillProcess,
        SeccompAction::Allow,
        TargetArch::x86_64,
    )
    .map_err(|e| failed(&e))?;
    let program: seccompiler::BpfProgram = filter.try_into().map_err(|e| failed(&e))?;
    apply_filter(&program).map_err(|e| failed(&e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::signal::Signal;
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};

    fn in_child(work: impl FnOnce()) -> WaitStatus {
        // SAFETY: the child only makes system calls and leaves by _exit.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                work();
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(0) }
            }
            ForkResult::Parent { child } => waitpid(child, None).unwrap(),
        }
    }

    #[test]
    fn a_confined_thread_dies_when_it_opens_a_path() {
        for confine in [confine_main, confine_vcpu] {
            let status = in_child(|| {
                confine().unwrap();
                // SAFETY: a valid C string; the call is not expected to return.
                unsafe { libc::open(c"/etc/passwd".as_ptr(), libc::O_RDONLY) };
            });
            assert!(
                matches!(status, WaitStatus::Signaled(_, Signal::SIGSYS, _)),
                "{status:?}"
            );
        }
    }

    #[test]
    fn a_confined_thread_replaces_standard_error_and_nothing_else() {
        let replace = |which: libc::c_int| {
            in_child(|| {
                confine_main().unwrap();
                // SAFETY: the child's own descriptors.
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
    fn a_confined_thread_may_still_do_its_work() {
        let status = in_child(|| {
            confine_main().unwrap();
            drop(vec![0u8; 1 << 20]);
        });
        assert!(matches!(status, WaitStatus::Exited(_, 0)), "{status:?}");
    }
}
