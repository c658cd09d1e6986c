//! What the kernel lets a VMM thread do once the guest runs. Everything else kills the process: a thread that
//! makes an unlisted call is no longer ours.

pub mod ioctl;

use crate::error::VmmError;
use ioctl::IoctlRequest;
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

/// The thread that serves the disks.
pub const DISKS: &[Call] = calls![
    SYS_brk: ALLOCATOR,
    SYS_clock_gettime: "hosts whose clock cannot be read without the kernel",
    SYS_epoll_wait,
    SYS_exit: THREAD_END,
    SYS_fallocate: "a driver that discards or zeroes blocks: `virtio::blk::tests`",
    SYS_futex: "a snapshot in the middle of a request: `process::disks`",
    SYS_madvise: THREAD_END,
    SYS_mmap: ALLOCATOR,
    SYS_mprotect: ALLOCATOR,
    SYS_mremap: ALLOCATOR,
    SYS_munmap: ALLOCATOR,
    SYS_pread64: "a write that begins or ends inside of a block: `virtio::blk::tests`",
    SYS_preadv,
    SYS_pwritev,
    SYS_read: "a queue with more work than a round has: `virtio::blk::tests`",
    SYS_restart_syscall: HOST_SLEPT,
    SYS_rt_sigprocmask: THREAD_END,
    SYS_sendmsg: "a driver that breaks the contract: `hostile_driver`",
    SYS_sigaltstack: THREAD_END,
    SYS_timerfd_settime,
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
    SYS_pwrite64,
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
    confine(VCPU, ioctl::VCPU)
}

/// Confines the disks' thread.
pub fn confine_disks() -> Result<(), VmmError> {
    confine(DISKS, &[])
}

/// Confines the event loop's thread.
pub fn confine_main() -> Result<(), VmmError> {
    confine(MAIN, ioctl::MAIN)
}

fn failed(e: impl std::fmt::Display) -> VmmError {
    VmmError::host("seccomp filter", e)
}

/// A rule that holds where the argument at `index` is `value`.
fn only(index: u8, length: SeccompCmpArgLen, value: u64) -> Result<SeccompRule, VmmError> {
    let equal = SeccompCondition::new(index, length, SeccompCmpOp::Eq, value).map_err(failed)?;
    SeccompRule::new(vec![equal]).map_err(failed)
}

/// Rules of one call, of which one must hold; none: it is allowed with any arguments.
fn rules(call: libc::c_long, requests: &[IoctlRequest]) -> Result<Vec<SeccompRule>, VmmError> {
    if call == libc::SYS_ioctl {
        // The kernel reads 32 bits of the request, so these are what is compared.
        let of = |r: &IoctlRequest| only(1, SeccompCmpArgLen::Dword, r.number.into());
        return requests.iter().map(of).collect();
    }
    let rule = argument(call).map(|(index, value)| only(index, SeccompCmpArgLen::Qword, value));
    rule.into_iter().collect()
}

fn confine(calls: &[Call], requests: &[IoctlRequest]) -> Result<(), VmmError> {
    let mut allowed: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for call in calls {
        allowed.insert(call.number, rules(call.number, requests)?);
    }
    let filter = SeccompFilter::new(
        allowed,
        SeccompAction::KillProcess,
        SeccompAction::Allow,
        TargetArch::x86_64,
    )
    .map_err(failed)?;
    let program: seccompiler::BpfProgram = filter.try_into().map_err(failed)?;
    apply_filter(&program).map_err(failed)
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
        for confine in [confine_main, confine_vcpu, confine_disks] {
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
    fn a_confined_thread_makes_the_listed_requests_and_dies_of_any_other() {
        /// `KVM_CREATE_VM`, `KVM_CREATE_VCPU`, `KVM_SET_USER_MEMORY_REGION`, `KVM_CREATE_DEVICE`, `KVM_SET_REGS`.
        const KVM: [u64; 5] = [0xae01, 0xae41, 0x4020_ae46, 0xc00c_aee0, 0x4090_ae82];
        /// `UFFDIO_API`, `TUNSETIFF`.
        const OTHERS: [u64; 2] = [0xc018_aa3f, 0x4004_54ca];
        let files = [libc::TIOCSTI, libc::FIONREAD, libc::FIONBIO, libc::FIOCLEX];
        let unlisted: Vec<u64> = [&KVM[..], &OTHERS, &files].concat();
        type Confine = fn() -> Result<(), VmmError>;
        let (main, vcpu) = (ioctl::MAIN, ioctl::VCPU);
        let threads: [(Confine, libc::c_long, _, _); 2] = [
            (confine_main, libc::SYS_exit_group, main, vcpu),
            (confine_vcpu, libc::SYS_exit, vcpu, main),
        ];
        for (confine, exit, listed, of_others) in threads {
            let request = |number: u64| {
                in_child(|| {
                    confine().unwrap();
                    // SAFETY: there is no such descriptor, so nothing is read or written.
                    unsafe { libc::ioctl(-1, number, 0) };
                    // SAFETY: ends the child by the one call that its filter has for that.
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
            let of_others = of_others.iter().map(|r| u64::from(r.number));
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
    fn a_confined_thread_may_still_do_its_work() {
        let status = in_child(|| {
            confine_main().unwrap();
            drop(vec![0u8; 1 << 20]);
        });
        assert!(matches!(status, WaitStatus::Exited(_, 0)), "{status:?}");
    }
}
