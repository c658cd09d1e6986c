//! What the kernel lets a VMM thread do once the guest runs. Everything else kills the process: a thread that
//! makes an unlisted call is no longer ours.

use crate::error::VmmError;
use seccompiler::{
    SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter,
};
use std::collections::BTreeMap;

/// Memory, locks and the end of a thread: both kinds need them.
const COMMON: &[libc::c_long] = &[
    libc::SYS_brk,
    libc::SYS_close,
    libc::SYS_epoll_ctl,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fcntl,
    libc::SYS_futex,
    libc::SYS_getrandom,
    libc::SYS_ioctl,
    libc::SYS_madvise,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_read,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_yield,
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_write,
];

/// The event loop: devices and the control socket.
const MAIN: &[libc::c_long] = &[
    libc::SYS_accept4,
    libc::SYS_clock_gettime,
    libc::SYS_close_range,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_fallocate,
    libc::SYS_fdatasync,
    libc::SYS_ftruncate,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_lseek,
    // Of pidfds it has only those of the processes it forked, and no way to others.
    libc::SYS_pidfd_send_signal,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_socketpair,
    libc::SYS_waitid,
    libc::SYS_writev,
];

/// A call, one of its arguments, and the one value that may have.
type WithArgument = (libc::c_long, u8, u64);

/// Calls of the event loop that are allowed with one argument only: a process that writes a snapshot is forked (and no
/// thread or process of another kind), it ends with this one, vCPU threads of this process are kicked, and standard error is
/// replaced.
fn main_with_argument() -> [WithArgument; 4] {
    let number = |n: libc::c_int| u64::try_from(n).unwrap_or(u64::MAX);
    let pid = u64::from(std::process::id());
    [
        (
            libc::SYS_clone,
            0,
            number(libc::CLONE_PIDFD | libc::SIGCHLD),
        ),
        (libc::SYS_prctl, 0, number(libc::PR_SET_PDEATHSIG)),
        (libc::SYS_tgkill, 0, pid),
        (libc::SYS_dup3, 1, number(libc::STDERR_FILENO)),
    ]
}

/// Confines the calling vCPU thread.
pub fn confine_vcpu() -> Result<(), VmmError> {
    confine(COMMON, &[])
}

/// Confines the event loop's thread.
pub fn confine_main() -> Result<(), VmmError> {
    confine(&[COMMON, MAIN].concat(), &main_with_argument())
}

fn confine(calls: &[libc::c_long], with_argument: &[WithArgument]) -> Result<(), VmmError> {
    let failed = |e: &dyn std::fmt::Display| VmmError::host("seccomp filter", e);
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        calls.iter().map(|&call| (call, Vec::new())).collect();
    for &(call, argument, value) in with_argument {
        let length = SeccompCmpArgLen::Qword;
        let equal = SeccompCondition::new(argument, length, SeccompCmpOp::Eq, value)
            .map_err(|e| failed(&e))?;
        let rule = SeccompRule::new(vec![equal]).map_err(|e| failed(&e))?;
        rules.insert(call, vec![rule]);
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
