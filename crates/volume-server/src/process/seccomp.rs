//! System calls of the process: files, threads, and the accepted streams. Denied calls fail with
//! EPERM.

use jiffy_confinement::{AllowedCalls, equals};
use nix::libc;
use std::io;

/// System calls that are allowed with any arguments.
const ALLOWED: &[libc::c_long] = &[
    libc::SYS_accept4,
    libc::SYS_access,
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_copy_file_range,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fallocate,
    libc::SYS_fchmod,
    libc::SYS_fdatasync,
    libc::SYS_fstat,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_futex,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_geteuid,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_lseek,
    libc::SYS_lstat,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mkdir,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_newfstatat,
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_poll,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_readlink,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_sendto,
    libc::SYS_set_robust_list,
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    libc::SYS_stat,
    libc::SYS_statx,
    libc::SYS_unlink,
    libc::SYS_utimensat,
    libc::SYS_write,
];

/// Permitted fcntl commands: flags and copies of descriptors, and locks of the catalog.
const DESCRIPTOR_COMMANDS: [libc::c_int; 8] = [
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETLK,
    libc::F_SETLK,
    libc::F_SETLKW,
];

/// Installs the filter for this thread and the threads that it starts.
pub(super) fn enter() -> io::Result<()> {
    let mut calls = AllowedCalls::new(ALLOWED);
    calls.allow_threads()?;
    calls.allow_thread_names()?;
    let commands = DESCRIPTOR_COMMANDS.map(|command| vec![equals(1, command)]);
    calls.allow_if(libc::SYS_fcntl, commands)?;
    // FIONBIO.
    calls.allow_if(libc::SYS_ioctl, [vec![equals(1, 0x5421)]])?;
    // Timeouts of the daemon's messages.
    let timeouts = [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO];
    let timeouts = timeouts.map(|option| vec![equals(1, libc::SOL_SOCKET), equals(2, option)]);
    calls.allow_if(libc::SYS_setsockopt, timeouts)?;
    // Allows reading the resource limits of this process.
    calls.allow_if(libc::SYS_prlimit64, [vec![equals(0, 0), equals(2, 0)]])?;
    calls.enforce()
}
