//! Seccomp filter of the fetcher, which starts no process, traces and signals none, and changes no
//! namespace, mount, user or privilege. Other calls fail with EPERM.

use nix::libc;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};
use std::collections::BTreeMap;
use std::io;

/// Calls of the allocator, of threads, of the event loop, of files and of sockets.
const ALLOWED: &[libc::c_long] = &[
    libc::SYS_access,
    libc::SYS_bind,
    libc::SYS_brk,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_connect,
    libc::SYS_copy_file_range,
    libc::SYS_dup,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd2,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fallocate,
    libc::SYS_fchmod,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_futex,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getpeername,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_getuid,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_rm_watch,
    libc::SYS_link,
    libc::SYS_linkat,
    libc::SYS_lseek,
    libc::SYS_lstat,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_newfstatat,
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_read,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmmsg,
    libc::SYS_recvmsg,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_restart_syscall,
    libc::SYS_rmdir,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_sendmmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_set_robust_list,
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    libc::SYS_stat,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_statx,
    libc::SYS_sync_file_range,
    libc::SYS_syncfs,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_utimensat,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Kinds of sockets: of the store's server, of VMMs, and of the list of this host's addresses,
/// which the resolver reads.
const FAMILIES: [libc::c_int; 4] = [
    libc::AF_INET,
    libc::AF_INET6,
    libc::AF_UNIX,
    libc::AF_NETLINK,
];

/// Options of sockets that the client of the store sets, by level.
const SOCKET_OPTIONS: &[(libc::c_int, libc::c_int)] = &[
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::SOL_SOCKET, libc::SO_REUSEADDR),
    (libc::SOL_SOCKET, libc::SO_RCVBUF),
    (libc::SOL_SOCKET, libc::SO_SNDBUF),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
    (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
    (libc::IPPROTO_IP, libc::IP_RECVERR),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
    (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
];

/// Commands of fcntl: flags and copies of descriptors, and locks. Those that choose who gets a
/// signal are not among them.
const DESCRIPTOR_COMMANDS: [libc::c_int; 8] = [
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_DUPFD_CLOEXEC,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
    libc::F_OFD_SETLKW,
];

/// Requests of ioctl: whether reads wait, bytes that can be read, sharing of storage, and the
/// question of whether something is a terminal.
const IOCTLS: [u64; 5] = [0x5421, 0x541b, 0x4004_9409, 0x4020_940d, 0x5401];

/// Installs the filter for this thread and those that it starts.
pub(super) fn enter() -> io::Result<()> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    let number = |value: libc::c_int| u64::try_from(value).map_err(io::Error::other);
    let mut families = Vec::new();
    for family in FAMILIES {
        families.push(rule(&[(0, SeccompCmpOp::Eq, number(family)?)])?);
    }
    rules.insert(libc::SYS_socket, families);
    let mut commands = Vec::new();
    for command in DESCRIPTOR_COMMANDS {
        commands.push(rule(&[(1, SeccompCmpOp::Eq, number(command)?)])?);
    }
    rules.insert(libc::SYS_fcntl, commands);
    let pair = rule(&[(0, SeccompCmpOp::Eq, number(libc::AF_UNIX)?)])?;
    rules.insert(libc::SYS_socketpair, vec![pair]);
    let mut options = Vec::new();
    for (level, option) in SOCKET_OPTIONS {
        options.push(rule(&[
            (1, SeccompCmpOp::Eq, number(*level)?),
            (2, SeccompCmpOp::Eq, number(*option)?),
        ])?);
    }
    rules.insert(libc::SYS_setsockopt, options);
    let requests = IOCTLS
        .iter()
        .map(|request| rule(&[(1, SeccompCmpOp::Eq, *request)]));
    rules.insert(libc::SYS_ioctl, requests.collect::<io::Result<_>>()?);
    let thread = number(libc::CLONE_THREAD)?;
    let is_thread = rule(&[(0, SeccompCmpOp::MaskedEq(thread), thread)])?;
    rules.insert(libc::SYS_clone, vec![is_thread]);
    let name = rule(&[(0, SeccompCmpOp::Eq, number(libc::PR_SET_NAME)?)])?;
    rules.insert(libc::SYS_prctl, vec![name]);
    // Of limits, reading those of this process only.
    let own = rule(&[(0, SeccompCmpOp::Eq, 0), (2, SeccompCmpOp::Eq, 0)])?;
    rules.insert(libc::SYS_prlimit64, vec![own]);
    let hidden = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    // The flags of clone3 lie in memory, which a filter cannot read. Without it, libc makes threads
    // by clone. Installed first: the other filter denies further ones.
    let hiding = program(hidden, SeccompAction::Allow, errno(libc::ENOSYS)?)?;
    let mut allowed = rules;
    allowed.insert(libc::SYS_clone3, Vec::new());
    let allowing = program(allowed, errno(libc::EPERM)?, SeccompAction::Allow)?;
    apply_filter(&hiding).map_err(io::Error::other)?;
    apply_filter(&allowing).map_err(io::Error::other)
}

fn errno(number: libc::c_int) -> io::Result<SeccompAction> {
    let number = u32::try_from(number).map_err(io::Error::other)?;
    Ok(SeccompAction::Errno(number))
}

/// Rule that holds if all conditions do.
fn rule(conditions: &[(u8, SeccompCmpOp, u64)]) -> io::Result<SeccompRule> {
    let conditions = conditions.iter().map(|(index, operator, value)| {
        SeccompCondition::new(*index, SeccompCmpArgLen::Dword, operator.clone(), *value)
    });
    let conditions = conditions.collect::<Result<_, _>>();
    SeccompRule::new(conditions.map_err(io::Error::other)?).map_err(io::Error::other)
}

fn program(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    otherwise: SeccompAction,
    matched: SeccompAction,
) -> io::Result<BpfProgram> {
    let filter = SeccompFilter::new(rules, otherwise, matched, TargetArch::x86_64);
    filter
        .map_err(io::Error::other)?
        .try_into()
        .map_err(io::Error::other)
}
