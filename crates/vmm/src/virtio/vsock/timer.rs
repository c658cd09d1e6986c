//! Timer of the vsock device, for all deadlines of its connections.
//!
//! The timer is a descriptor in the event loop (timerfd).

use crate::poll::SlotPoller;
use crate::virtio::DeviceError;
use nix::sys::epoll::EpollFlags;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};
use vmm_sys_util::timerfd::TimerFd;

/// Token of the timer.
pub const TIMER_TOKEN: u32 = 0;

/// Timer of the device in the event loop.
pub struct VsockTimer {
    timer: TimerFd,
    poller: SlotPoller,
    /// Time at which the timer fires. `None` if the timer is not set.
    set_for: Option<Instant>,
}

impl VsockTimer {
    /// Creates a timer that is not set.
    pub fn new(poller: SlotPoller) -> Result<Self, DeviceError> {
        let timer = TimerFd::new().map_err(|e| DeviceError::Host(format!("timerfd: {e}")))?;
        let this = Self {
            timer,
            poller,
            set_for: None,
        };
        this.poller
            .add(this.fd(), TIMER_TOKEN, EpollFlags::EPOLLIN)
            .map_err(|e| DeviceError::Host(format!("epoll: {e}")))?;
        Ok(this)
    }

    /// Returns the descriptor of the timer.
    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to `self.timer` and is open while `self.timer` exists.
        unsafe { BorrowedFd::borrow_raw(self.timer.as_raw_fd()) }
    }

    /// Makes sure that the timer fires at `at` or earlier. Does nothing if `at` is `None`.
    pub fn fire_by(&mut self, at: Option<Instant>) -> Result<(), DeviceError> {
        let Some(at) = at.filter(|at| self.set_for.is_none_or(|set| *at < set)) else {
            return Ok(());
        };
        let wait = at.saturating_duration_since(Instant::now());
        // A value of zero would stop the timer.
        self.timer
            .reset(wait.max(Duration::from_nanos(1)), None)
            .map_err(|e| DeviceError::Host(format!("timerfd: {e}")))?;
        self.set_for = Some(at);
        Ok(())
    }

    /// Clears the fired timer and its readiness.
    pub fn clear(&mut self) -> Result<(), DeviceError> {
        self.set_for = None;
        self.timer
            .clear()
            .map_err(|e| DeviceError::Host(format!("timerfd: {e}")))
    }
}

impl Drop for VsockTimer {
    fn drop(&mut self) {
        // Ignore the error: the descriptor is added in `new` and only removed here.
        let _ = self.poller.remove(self.fd());
    }
}
