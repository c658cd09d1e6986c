//! Reaps exited children and records their exits. As process 1, the agent also reaps all orphaned
//! processes.

use super::exit::ProcessExit;
use crate::state::Agent;
use crate::sys;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use tokio::io::Interest;

/// Returns a descriptor that reports exited children. Must be called before any thread is created:
/// the function blocks SIGCHLD in the calling thread, and later threads inherit the block.
pub fn signals() -> io::Result<OwnedFd> {
    // SAFETY: `set` is a valid signal set for each call.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGCHLD);
        sys::check(libc::sigprocmask(
            libc::SIG_BLOCK,
            &set,
            std::ptr::null_mut(),
        ))?;
        sys::owned(libc::signalfd(
            -1,
            &set,
            libc::SFD_NONBLOCK | libc::SFD_CLOEXEC,
        ))
    }
}

/// Reaps children forever.
pub async fn run(agent: Rc<Agent>, signals: OwnedFd) -> io::Result<()> {
    let signals = sys::register(signals, Interest::READABLE)?;
    let mut info = [0; size_of::<libc::signalfd_siginfo>()];
    loop {
        // Check for the directory of hooks before the exit is reported: the process may have
        // created it.
        agent.hooks.check();
        reap(&agent);
        let mut ready = signals.readable().await?;
        // Several exited children may cause only one signal. The signal is therefore read before
        // the children are reaped.
        let _ = ready.try_io(|fd| sys::read(fd.as_raw_fd(), &mut info));
    }
}

/// Collects the exit statuses of all processes that have exited.
fn reap(agent: &Agent) {
    loop {
        let mut status = 0;
        // SAFETY: `status` is a valid int to write to.
        let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
        if pid <= 0 {
            return;
        }
        let exit = if libc::WIFSIGNALED(status) {
            ProcessExit::Signal(libc::WTERMSIG(status))
        } else {
            ProcessExit::Code(libc::WEXITSTATUS(status))
        };
        agent.processes.reaped(pid.unsigned_abs(), exit);
    }
}
