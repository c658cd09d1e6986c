//! Descriptors that connect the agent with a process: pipes or a terminal.
//!
//! The agent starts processes for clients, and transfers their input and output.

use super::input::InputSink;
use super::message::StartRequest;
use super::output_pump::ProcessOutput;
use super::pty;
use crate::sys;
use crate::users::User;
use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use tokio::io::Interest;

/// Standard input, output and error of the process. `None` stands for `/dev/null`.
pub type ChildStdio = [Option<OwnedFd>; 3];

/// Agent's ends of the descriptors.
pub enum AgentEnds {
    /// The agent's side of a terminal.
    Pty(OwnedFd),
    /// Ends of pipes.
    Pipes {
        /// Writing end. `None` if the process has no stdin.
        stdin: Option<OwnedFd>,
        /// Reading end.
        stdout: OwnedFd,
        /// Reading end.
        stderr: OwnedFd,
    },
}

/// Opens the descriptors of a process that runs as `user`. The user owns the descriptors and can
/// therefore open `/dev/stdin`, `/dev/stdout` and `/dev/stderr`.
pub fn open(request: &StartRequest, user: &User) -> io::Result<(ChildStdio, AgentEnds)> {
    if let Some(pty) = request.pty {
        let (master, slave) = pty::open(pty.size, user.uid)?;
        let child = [
            Some(slave.try_clone()?),
            Some(slave.try_clone()?),
            Some(slave),
        ];
        return Ok((child, AgentEnds::Pty(master)));
    }
    let (their_stdin, stdin) = if request.stdin.unwrap_or(true) {
        owned_pipe(user.uid).map(|(theirs, ours)| (Some(theirs), Some(ours)))?
    } else {
        (None, None)
    };
    let (stdout, their_stdout) = owned_pipe(user.uid)?;
    let (stderr, their_stderr) = owned_pipe(user.uid)?;
    let ends = AgentEnds::Pipes {
        stdin,
        stdout,
        stderr,
    };
    Ok(([their_stdin, Some(their_stdout), Some(their_stderr)], ends))
}

/// Opens a pipe that belongs to `uid`.
fn owned_pipe(uid: u32) -> io::Result<(OwnedFd, OwnedFd)> {
    // SAFETY: the call takes no pointers.
    let own_uid = unsafe { libc::geteuid() };
    // Without privileges, every process has the agent's user.
    if own_uid != 0 || uid == 0 {
        return sys::pipe();
    }
    let pipe = sys::pipe()?;
    // Both ends are one file, so one call suffices. `u32::MAX` leaves the group unchanged.
    // SAFETY: the call takes no pointers.
    match sys::check(unsafe { libc::fchown(pipe.0.as_raw_fd(), uid, u32::MAX) }) {
        Ok(_) => Ok(pipe),
        // On gVisor, the owner of a pipe is its creator and cannot be changed.
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => with_effective_user(uid, sys::pipe)?,
        Err(e) => Err(e),
    }
}

/// Calls `work` with another effective user of this thread, and then restores root.
fn with_effective_user<T>(uid: u32, work: impl FnOnce() -> T) -> io::Result<T> {
    // Raw system calls, because libc's wrapper changes all threads.
    let set = |uid: u32| {
        let unchanged = u32::MAX;
        // SAFETY: the call takes no pointers.
        let result = unsafe { libc::syscall(libc::SYS_setresuid, unchanged, uid, unchanged) };
        sys::check(result as libc::c_int).map(drop)
    };
    set(uid)?;
    let result = work();
    // The saved user is still root, which permits this change.
    set(0)?;
    Ok(result)
}

impl AgentEnds {
    /// Registers the descriptors with the event loop.
    pub fn register(self) -> io::Result<(InputSink, Vec<ProcessOutput>)> {
        match self {
            Self::Pty(master) => {
                let master = Rc::new(sys::watch(master)?);
                let output = ProcessOutput {
                    fd: Rc::clone(&master),
                    field: "pty",
                    is_wide: Cell::new(true),
                };
                Ok((InputSink::Pty(master), vec![output]))
            }
            Self::Pipes {
                stdin,
                stdout,
                stderr,
            } => {
                let sink = match stdin {
                    Some(stdin) => InputSink::Pipe(sys::watch(stdin)?),
                    None => InputSink::Closed,
                };
                let outputs = vec![output(stdout, "stdout")?, output(stderr, "stderr")?];
                Ok((sink, outputs))
            }
        }
    }
}

/// Registers the read end of a pipe. `field` is the field of the output in events.
fn output(fd: OwnedFd, field: &'static str) -> io::Result<ProcessOutput> {
    sys::set_nonblocking(fd.as_raw_fd())?;
    Ok(ProcessOutput {
        fd: Rc::new(sys::register(fd, Interest::READABLE)?),
        field,
        is_wide: Cell::new(false),
    })
}
