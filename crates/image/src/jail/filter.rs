//! Seccomp filters of confined processes.

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};
use std::collections::BTreeMap;
use std::io;

/// System calls that host programs are denied: those that would let capabilities reach beyond the
/// view, and those that reveal kernel state. Their other calls are not known in advance.
const DENIED_TO_PROGRAMS: &[libc::c_long] = &[
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_adjtimex,
    libc::SYS_bpf,
    libc::SYS_chroot,
    libc::SYS_clock_settime,
    libc::SYS_connect,
    libc::SYS_delete_module,
    libc::SYS_fanotify_init,
    libc::SYS_finit_module,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_init_module,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_ioperm,
    libc::SYS_iopl,
    libc::SYS_kcmp,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_lookup_dcookie,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pivot_root,
    libc::SYS_process_madvise,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_setns,
    libc::SYS_settimeofday,
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_syslog,
    libc::SYS_umount2,
    libc::SYS_unshare,
    libc::SYS_userfaultfd,
    libc::SYS_vhangup,
];

/// System calls of the unpacker, with those of other C libraries. All others kill the process.
const UNPACKER_CALLS: &[libc::c_long] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fcntl,
    libc::SYS_fsetxattr,
    libc::SYS_fstat,
    libc::SYS_ftruncate,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_linkat,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_pipe2,
    libc::SYS_poll,
    libc::SYS_pread64,
    libc::SYS_prlimit64,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_statx,
    libc::SYS_symlinkat,
    libc::SYS_syncfs,
    libc::SYS_tgkill,
    libc::SYS_unlinkat,
    libc::SYS_utimensat,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Filter of the unpacker.
pub(crate) fn unpacker() -> io::Result<BpfProgram> {
    build(
        rules(UNPACKER_CALLS),
        SeccompAction::Allow,
        SeccompAction::KillProcess,
    )
}

/// Filter of a host program. It may start threads but no processes, which could outlive it.
pub(crate) fn program() -> io::Result<BpfProgram> {
    let mut refused = rules(DENIED_TO_PROGRAMS);
    // Without `clone3` the C library starts threads by `clone`, whose flags can be filtered.
    let more = [libc::SYS_clone3, libc::SYS_fork, libc::SYS_vfork];
    refused.extend(rules(&more));
    let process = no_thread().map_err(io::Error::other)?;
    refused.insert(libc::SYS_clone, vec![process]);
    let refuse = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    build(refused, refuse, SeccompAction::Allow)
}

type FilterRules = BTreeMap<i64, Vec<SeccompRule>>;

fn rules(calls: &[libc::c_long]) -> FilterRules {
    calls.iter().map(|&call| (call, Vec::new())).collect()
}

/// Matches a `clone` that starts a process.
fn no_thread() -> Result<SeccompRule, BackendError> {
    let flag = u64::from(libc::CLONE_THREAD.cast_unsigned());
    let length = SeccompCmpArgLen::Dword;
    let unset = SeccompCondition::new(0, length, SeccompCmpOp::MaskedEq(flag), 0)?;
    SeccompRule::new(vec![unset])
}

fn build(
    rules: FilterRules,
    listed: SeccompAction,
    others: SeccompAction,
) -> io::Result<BpfProgram> {
    SeccompFilter::new(rules, others, listed, TargetArch::x86_64)
        .and_then(TryInto::try_into)
        .map_err(io::Error::other)
}

/// Installs a filter for the calling thread and its children.
pub(crate) fn apply(program: &BpfProgram) -> io::Result<()> {
    // Allocates only on failure.
    seccompiler::apply_filter(program).map_err(|_| io::Error::last_os_error())
}
