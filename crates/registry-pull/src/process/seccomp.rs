//! Seccomp filter of a puller. It denies opening files and sockets, starting processes, and
//! signalling other processes.
//!
//! The *puller* is the process that downloads images from registries.

use jiffy_confinement::{AllowedCalls, equals, equals_unsigned};
use std::io;

/// System calls of the event loop, of existing sockets, of the allocator and of exiting.
const ALLOWED: &[libc::c_long] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_close,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpeername,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_gettid,
    libc::SYS_madvise,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_poll,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_yield,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Permitted fcntl commands: flags and copies of descriptors. Commands that choose the receiver of
/// a signal are excluded.
const DESCRIPTOR_COMMANDS: [libc::c_int; 5] = [
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_DUPFD_CLOEXEC,
];

/// Permitted ioctl request: non-blocking mode.
const DESCRIPTOR_REQUESTS: [libc::Ioctl; 1] = [libc::FIONBIO];

/// Permitted socket options by level: keep-alive and no delay.
const SOCKET_OPTIONS: [(libc::c_int, libc::c_int); 5] = [
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
];

/// Installs the filter. Other system calls fail with EPERM.
pub(super) fn enter() -> io::Result<()> {
    let mut calls = AllowedCalls::new(ALLOWED);
    let commands = DESCRIPTOR_COMMANDS.map(|command| vec![equals(1, command)]);
    calls.allow_if(libc::SYS_fcntl, commands)?;
    let requests = DESCRIPTOR_REQUESTS.map(|request| vec![equals_unsigned(1, request)]);
    calls.allow_if(libc::SYS_ioctl, requests)?;
    let options = SOCKET_OPTIONS.map(|(level, option)| vec![equals(1, level), equals(2, option)]);
    calls.allow_if(libc::SYS_setsockopt, options)?;
    // Allows the process to send SIGABRT to itself when it aborts.
    let own_pid = equals_unsigned(0, std::process::id().into());
    calls.allow_if(libc::SYS_tgkill, [vec![own_pid, equals(2, libc::SIGABRT)]])?;
    calls.enforce()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};

    /// Makes `call` in a process under the filter. Returns its error number, or 0 on success.
    fn attempt(call: impl Fn() -> libc::c_long) -> i32 {
        // SAFETY: the child makes system calls and exits.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                // SAFETY: no pointer is passed. A filter cannot be installed without this setting.
                unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
                let code = match enter() {
                    Err(_) => 255,
                    Ok(()) if call() == -1 => std::io::Error::last_os_error()
                        .raw_os_error()
                        .unwrap_or(254),
                    Ok(()) => 0,
                };
                // SAFETY: exits the child without running any code of the test.
                unsafe { libc::_exit(code) }
            }
            ForkResult::Parent { child } => match waitpid(child, None).unwrap() {
                WaitStatus::Exited(_, code) => code,
                other => panic!("{other:?}"),
            },
        }
    }

    #[test]
    fn calls_with_arguments_that_reach_further_are_denied() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (fd, tcp) = (
            std::os::fd::AsRawFd::as_raw_fd(&socket),
            std::os::fd::AsRawFd::as_raw_fd(&tcp),
        );
        let one = 1i32;
        // SAFETY: each call uses open descriptors and arguments of the right kind.
        let set = |level, option| unsafe {
            let value = (&raw const one).cast();
            libc::c_long::from(libc::setsockopt(tcp, level, option, value, 4))
        };
        // SAFETY: as above.
        let ioctl = |request| unsafe { libc::c_long::from(libc::ioctl(fd, request, &one)) };
        // SAFETY: as above.
        let fcntl =
            |command, value: i32| unsafe { libc::c_long::from(libc::fcntl(fd, command, value)) };
        // SAFETY: no pointer is passed. Signal 0 is not delivered, and the filter denies SIGABRT to
        // other processes.
        let signal =
            |pid: i32, signal: i32| unsafe { libc::syscall(libc::SYS_tgkill, pid, pid, signal) };
        let parent = i32::try_from(std::process::id()).unwrap();
        assert_eq!(attempt(|| set(libc::IPPROTO_TCP, libc::TCP_NODELAY)), 0);
        assert_eq!(attempt(|| ioctl(libc::FIONBIO)), 0);
        assert_eq!(attempt(|| fcntl(libc::F_GETFL, 0)), 0);
        for denied in [
            attempt(|| set(libc::SOL_SOCKET, libc::SO_REUSEADDR)),
            attempt(|| set(libc::IPPROTO_TCP, libc::TCP_ULP)),
            attempt(|| ioctl(libc::FIOASYNC)),
            attempt(|| ioctl(libc::TIOCSTI)),
            attempt(|| fcntl(libc::F_SETOWN, parent)),
            attempt(|| signal(parent, 0)),
            attempt(|| signal(parent, libc::SIGABRT)),
            // The process may not send itself other signals than SIGABRT either.
            attempt(|| signal(i32::try_from(std::process::id()).unwrap(), 0)),
        ] {
            assert_eq!(denied, libc::EPERM);
        }
    }
}
