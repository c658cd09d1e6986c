//! Seccomp filter of the fetcher. It denies starting, tracing and signalling processes and changing
//! namespaces, mounts, users and privileges. Denied calls fail with EPERM.
//!
//! The fetcher downloads chunks of snapshots. It reads data that other hosts have written, so an
//! error in its parsers must not give access to this host.

use jiffy_confinement::{AllowedCalls, equals, equals_unsigned};
use nix::libc;
use std::io;

/// System calls of the allocator, threads, the event loop, files and sockets.
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

/// Socket families: for the store's server, for VMMs, and netlink for the list of this host's
/// addresses, which the resolver reads.
const FAMILIES: [libc::c_int; 4] = [
    libc::AF_INET,
    libc::AF_INET6,
    libc::AF_UNIX,
    libc::AF_NETLINK,
];

/// Socket options that the store's client and the resolver set, by level.
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

/// Permitted fcntl commands: flags, copies and locks of descriptors. Commands that choose the
/// receiver of a signal are excluded.
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

/// Permitted ioctl requests: FIONBIO, FIONREAD, FICLONE, FICLONERANGE and TCGETS.
const IOCTLS: [u64; 5] = [0x5421, 0x541b, 0x4004_9409, 0x4020_940d, 0x5401];

/// Installs the filter for this thread and the threads that it starts.
pub(super) fn enter() -> io::Result<()> {
    let mut calls = AllowedCalls::new(ALLOWED);
    calls.allow_threads()?;
    calls.allow_thread_names()?;
    let families = FAMILIES.map(|family| vec![equals(0, family)]);
    calls.allow_if(libc::SYS_socket, families)?;
    calls.allow_if(libc::SYS_socketpair, [vec![equals(0, libc::AF_UNIX)]])?;
    let options = SOCKET_OPTIONS.iter();
    let options = options.map(|(level, option)| vec![equals(1, *level), equals(2, *option)]);
    calls.allow_if(libc::SYS_setsockopt, options)?;
    let commands = DESCRIPTOR_COMMANDS.map(|command| vec![equals(1, command)]);
    calls.allow_if(libc::SYS_fcntl, commands)?;
    let requests = IOCTLS.map(|request| vec![equals_unsigned(1, request)]);
    calls.allow_if(libc::SYS_ioctl, requests)?;
    // Allows reading the resource limits of this process: process 0 is the caller, and a null
    // pointer sets no new limits.
    calls.allow_if(libc::SYS_prlimit64, [vec![equals(0, 0), equals(2, 0)]])?;
    calls.enforce()
}
