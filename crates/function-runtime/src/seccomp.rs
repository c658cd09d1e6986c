//! Seccomp filters of a tenant's process and of compilers. These processes cannot open paths or
//! sockets, start processes or send signals. Denied calls fail with EPERM.
//!
//! A *reset* is a method of cleaning the memory of an instance after a request.

#[cfg(feature = "fast-reset")]
use crate::fast_reset;
use jiffy_confinement::AllowedCalls;
use jiffy_proto::function::SlotReset;
use std::io;

/// System calls for the allocator, locks, clocks, existing descriptors and exit.
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

/// Additional system calls of a server: event loop, connections, memory images.
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

/// Confines all threads of a server. The server cannot start further threads afterwards.
pub(crate) fn confine_server(reset: SlotReset) -> io::Result<()> {
    let mut calls = AllowedCalls::new(&[COMMON, SERVER].concat());
    // Each new thread sets its own name, possibly after the filter has taken effect.
    calls.allow_thread_names()?;
    match reset {
        SlotReset::Strict => {}
        #[cfg(feature = "fast-reset")]
        SlotReset::Fast => fast_reset::allow_calls(&mut calls)?,
        // No engine with this reset exists (`crate::engine::running`).
        #[cfg(not(feature = "fast-reset"))]
        SlotReset::Fast => {}
    }
    calls.enforce_on_all_threads()
}

/// Confines a compiler, which must have one thread only at this point. The compiler may start
/// threads afterwards.
pub(crate) fn confine_compiler() -> io::Result<()> {
    let mut calls = AllowedCalls::new(&[COMMON, &[libc::SYS_pread64]].concat());
    calls.allow_thread_names()?;
    // Wasmtime compiles functions in parallel.
    calls.allow_threads()?;
    calls.enforce()
}
