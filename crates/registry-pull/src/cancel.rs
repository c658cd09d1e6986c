//! [`Cancel`]: a handle by which any thread can cancel the import of an image. Kills the puller
//! processes and wakes waiting threads.
//!
//! The *puller* is the confined process that downloads images from registries.

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use parking_lot::{Mutex, MutexGuard};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

/// Cancels an import: kills its pullers and wakes the waiting threads. Clones share their state.
#[derive(Clone)]
pub struct Cancel(Arc<CancelInner>);

/// Shared state of all clones.
struct CancelInner {
    /// Readable after the cancellation. Never read, so it wakes all waiting threads.
    event: EventFd,
    state: Mutex<CancelState>,
}

/// State of a cancellation, shared by its clones.
#[derive(Default)]
struct CancelState {
    cancelled: bool,
    /// Running pullers. They have not been waited for, so their process ids are valid.
    pullers: Vec<Pid>,
}

/// Reason why a wait ended without an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interrupted {
    Cancelled,
    Deadline,
    Failed(Errno),
}

/// Cancels the import when it is dropped.
#[derive(Debug)]
pub struct CancelGuard(Cancel);

impl Drop for CancelGuard {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl Cancel {
    /// Creates a handle. Fails if no descriptor is available.
    pub fn new() -> io::Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let state = Mutex::default();
        Ok(Self(Arc::new(CancelInner { event, state })))
    }

    /// Returns a guard that cancels when it is dropped.
    pub fn guard(&self) -> CancelGuard {
        CancelGuard(self.clone())
    }

    /// Kills the pullers and wakes waiting threads.
    pub fn cancel(&self) {
        let mut state = self.state();
        state.cancelled = true;
        for puller in &state.pullers {
            // A puller is removed from the list before it is waited for, so that its process id
            // cannot refer to another process.
            let _ = kill(*puller, Signal::SIGKILL);
        }
        drop(state);
        // Ignore the error: the write fails only if the counter is full, and then the event is
        // already readable.
        let _ = self.0.event.write(1);
    }

    /// Returns true if the import was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.state().cancelled
    }

    /// Adds a puller that a cancellation kills.
    pub(crate) fn register(&self, puller: Pid) {
        let mut state = self.state();
        state.pullers.push(puller);
        // The cancellation may have happened between the start of the process and this call.
        if state.cancelled {
            let _ = kill(puller, Signal::SIGKILL);
        }
    }

    /// Removes a puller. The caller must call this before it waits for the process.
    pub(crate) fn unregister(&self, puller: Pid) {
        self.state().pullers.retain(|p| *p != puller);
    }

    /// Waits for events of a descriptor, a cancellation or the deadline.
    pub(crate) fn wait(
        &self,
        fd: BorrowedFd<'_>,
        events: PollFlags,
        deadline: Instant,
    ) -> Result<(), Interrupted> {
        loop {
            if self.is_cancelled() {
                return Err(Interrupted::Cancelled);
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return Err(Interrupted::Deadline);
            }
            // Rounded up, so that no wait ends just before the deadline.
            let millis = i32::try_from(remaining.as_millis() + 1).unwrap_or(i32::MAX);
            let timeout = PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX);
            let event = self.0.event.as_fd();
            let mut fds = [
                PollFd::new(fd, events),
                PollFd::new(event, PollFlags::POLLIN),
            ];
            match poll(&mut fds, timeout) {
                // `any` returns `None` for event flags unknown to `nix`, which count as an event.
                Ok(_) if fds[0].any().unwrap_or(true) => return Ok(()),
                Ok(_) | Err(Errno::EINTR) => {}
                Err(e) => return Err(Interrupted::Failed(e)),
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, CancelState> {
        self.0.state.lock()
    }
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cancel({})", self.is_cancelled())
    }
}
