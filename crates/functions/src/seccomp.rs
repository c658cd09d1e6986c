//! Seccomp filters of a tenant's process and of compilers, which open no path and no socket, start
//! no process, and send no signal. Other calls fail with EPERM.

use crate::page_scan;
use jiffy_proto::function::SlotReset;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter, apply_filter_all_threads,
};
use std::collections::BTreeMap;
use std::io;

/// Calls of the allocator, of locks and clocks, of existing descriptors, of exit.
const COMMON: &[libc::c_long] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_read,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_write,
];

/// Further calls of a server: its event loop, connections, images of memories.
const SERVER: &[libc::c_long] = &[
    libc::SYS_accept4,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_fcntl,
    libc::SYS_ftruncate,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_memfd_create,
    libc::SYS_poll,
    libc::SYS_pread64,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_writev,
];

/// Confines all threads of a server. Further ones cannot start.
pub(crate) fn confine_server(reset: SlotReset) -> io::Result<()> {
    let mut rules = allowed(&[COMMON, SERVER]);
    name_own_threads(&mut rules)?;
    if reset == SlotReset::Fast {
        scan_pages(&mut rules)?;
    }
    let program = program(rules, libc::EPERM, SeccompAction::Allow)?;
    apply_filter_all_threads(&program).map_err(io::Error::other)
}

/// Confines a compiler, which must have one thread only. It may start threads.
pub(crate) fn confine_compiler() -> io::Result<()> {
    let mut rules = allowed(&[COMMON, &[libc::SYS_clone3, libc::SYS_pread64]]);
    name_own_threads(&mut rules)?;
    let thread = u64::try_from(libc::CLONE_THREAD).map_err(io::Error::other)?;
    let is_thread = condition(0, SeccompCmpOp::MaskedEq(thread), thread)?;
    rules.insert(libc::SYS_clone, vec![is_thread]);
    let allowing = program(rules, libc::EPERM, SeccompAction::Allow)?;
    // Its flags lie in memory, which a filter cannot read. Without it, libc makes threads by clone.
    let hidden = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let absent = SeccompAction::Errno(u32::try_from(libc::ENOSYS).unwrap_or(1));
    let hiding = SeccompFilter::new(hidden, SeccompAction::Allow, absent, TargetArch::x86_64);
    let hiding: BpfProgram = hiding
        .map_err(io::Error::other)?
        .try_into()
        .map_err(io::Error::other)?;
    // First, as the other filter refuses further ones. The kernel takes the stricter answer.
    apply_filter(&hiding).map_err(io::Error::other)?;
    apply_filter(&allowing).map_err(io::Error::other)
}

fn allowed(lists: &[&[libc::c_long]]) -> BTreeMap<i64, Vec<SeccompRule>> {
    let calls = lists.iter().flat_map(|list| list.iter());
    calls.map(|call| (*call, Vec::new())).collect()
}

fn condition(index: u8, operator: SeccompCmpOp, value: u64) -> io::Result<SeccompRule> {
    conditions(&[(index, operator, value)])
}

/// Rule that holds if all conditions do.
fn conditions(all: &[(u8, SeccompCmpOp, u64)]) -> io::Result<SeccompRule> {
    let conditions = all.iter().map(|(index, operator, value)| {
        SeccompCondition::new(*index, SeccompCmpArgLen::Dword, operator.clone(), *value)
    });
    let conditions = conditions.collect::<Result<_, _>>();
    SeccompRule::new(conditions.map_err(io::Error::other)?).map_err(io::Error::other)
}

/// Of ioctl, only corrected page scans, and page faults of the calling thread.
fn scan_pages(rules: &mut BTreeMap<i64, Vec<SeccompRule>>) -> io::Result<()> {
    let scan = conditions(&[
        (1, SeccompCmpOp::Eq, page_scan::PAGEMAP_SCAN),
        (3, SeccompCmpOp::Eq, page_scan::MARKER.into()),
    ])?;
    rules.insert(libc::SYS_ioctl, vec![scan]);
    let thread = u64::try_from(libc::RUSAGE_THREAD).map_err(io::Error::other)?;
    rules.insert(
        libc::SYS_getrusage,
        vec![condition(0, SeccompCmpOp::Eq, thread)?],
    );
    Ok(())
}

/// Of prctl, only the name of a thread.
fn name_own_threads(rules: &mut BTreeMap<i64, Vec<SeccompRule>>) -> io::Result<()> {
    let name = u64::try_from(libc::PR_SET_NAME).map_err(io::Error::other)?;
    rules.insert(libc::SYS_prctl, vec![condition(0, SeccompCmpOp::Eq, name)?]);
    Ok(())
}

fn program(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    errno: i32,
    matched: SeccompAction,
) -> io::Result<BpfProgram> {
    let denied = SeccompAction::Errno(u32::try_from(errno).unwrap_or(1));
    let filter = SeccompFilter::new(rules, denied, matched, TargetArch::x86_64);
    filter
        .map_err(io::Error::other)?
        .try_into()
        .map_err(io::Error::other)
}
