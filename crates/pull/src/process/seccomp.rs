//! Seccomp filter of a puller, which opens no path and no socket, starts no process, and sends no
//! signal to another.

use seccompiler::{
    SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter,
};
use std::collections::BTreeMap;
use std::io;

/// Calls of the event loop, of existing sockets, of the allocator, and of exit.
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

/// Commands of fcntl: flags of descriptors and copies of them. Those that choose who gets a signal
/// are not among them.
const DESCRIPTOR_COMMANDS: [libc::c_int; 5] = [
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_DUPFD_CLOEXEC,
];

/// Requests of ioctl: whether reads wait.
const DESCRIPTOR_REQUESTS: [libc::Ioctl; 1] = [libc::FIONBIO];

/// Options of sockets, by level, that the client of a registry sets.
const SOCKET_OPTIONS: [(libc::c_int, libc::c_int); 5] = [
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
];

/// Installs the filter; other calls fail with EPERM.
pub(super) fn enter() -> io::Result<()> {
    let denied = u32::try_from(libc::EPERM).unwrap_or(1);
    let rules = rules(std::process::id())?;
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Errno(denied),
        SeccompAction::Allow,
        TargetArch::x86_64,
    );
    let filter = filter.map_err(io::Error::other)?;
    let program: seccompiler::BpfProgram = filter.try_into().map_err(io::Error::other)?;
    apply_filter(&program).map_err(io::Error::other)
}

/// Rules for the process `pid`.
fn rules(pid: u32) -> io::Result<BTreeMap<i64, Vec<SeccompRule>>> {
    let mut rules: BTreeMap<i64, Vec<_>> = ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    let number = |value: libc::c_int| u64::try_from(value).map_err(io::Error::other);
    let mut commands = Vec::new();
    for command in DESCRIPTOR_COMMANDS {
        commands.push(rule(&[(1, number(command)?)])?);
    }
    rules.insert(libc::SYS_fcntl, commands);
    let requests = DESCRIPTOR_REQUESTS.map(|request| rule(&[(1, request)]));
    let requests = requests.into_iter().collect::<io::Result<_>>()?;
    rules.insert(libc::SYS_ioctl, requests);
    let mut options = Vec::new();
    for (level, option) in SOCKET_OPTIONS {
        options.push(rule(&[(1, number(level)?), (2, number(option)?)])?);
    }
    rules.insert(libc::SYS_setsockopt, options);
    // A program that aborts signals itself.
    let abort = rule(&[(0, pid.into()), (2, number(libc::SIGABRT)?)])?;
    rules.insert(libc::SYS_tgkill, vec![abort]);
    Ok(rules)
}

/// Rule that holds if all of these arguments have these values.
fn rule(arguments: &[(u8, u64)]) -> io::Result<SeccompRule> {
    let conditions = arguments.iter().map(|(index, value)| {
        let length = SeccompCmpArgLen::Dword;
        SeccompCondition::new(*index, length, SeccompCmpOp::Eq, *value)
    });
    let conditions = conditions.collect::<Result<_, _>>();
    SeccompRule::new(conditions.map_err(io::Error::other)?).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};

    /// Makes `call` in a process under the filter. Returns its error number, 0 if it succeeds.
    fn attempt(call: impl Fn() -> libc::c_long) -> i32 {
        // SAFETY: the child makes system calls and exits.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                // SAFETY: no pointer is passed; a filter without it would not install.
                unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
                let code = match enter() {
                    Err(_) => 255,
                    Ok(()) if call() == -1 => std::io::Error::last_os_error()
                        .raw_os_error()
                        .unwrap_or(254),
                    Ok(()) => 0,
                };
                // SAFETY: ends the child without anything of the test's.
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
        // SAFETY: each call is on open descriptors with arguments of the right kind.
        let set = |level, option| unsafe {
            let value = (&raw const one).cast();
            libc::c_long::from(libc::setsockopt(tcp, level, option, value, 4))
        };
        // SAFETY: as above.
        let ioctl = |request| unsafe { libc::c_long::from(libc::ioctl(fd, request, &one)) };
        // SAFETY: as above.
        let fcntl =
            |command, value: i32| unsafe { libc::c_long::from(libc::fcntl(fd, command, value)) };
        // SAFETY: signal 0 sends nothing.
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
            // Not even itself, with another signal.
            attempt(|| signal(i32::try_from(std::process::id()).unwrap(), 0)),
        ] {
            assert_eq!(denied, libc::EPERM);
        }
    }
}
