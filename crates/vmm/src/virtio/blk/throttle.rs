//! A disk's place at the buckets of its guest, and the timer that wakes it when there is something in them again.

use super::limiter::{BURST, Limiter, Work};
use crate::machine::bus::lock;
use crate::poll::SlotPoller;
use crate::virtio::DeviceError;
use jiffy_proto::vm::DiskLimits;
use nix::sys::epoll::EpollFlags;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use vmm_sys_util::timerfd::TimerFd;

/// The buckets of one guest, which its disks share.
#[derive(Debug, Clone)]
pub struct SharedLimiter {
    limiter: Arc<Mutex<Limiter>>,
    began: Instant,
}

impl SharedLimiter {
    /// Full buckets; none if nothing is limited.
    pub fn new(limits: DiskLimits) -> Option<Self> {
        Some(Self {
            limiter: Arc::new(Mutex::new(Limiter::new(limits)?)),
            began: Instant::now(),
        })
    }

    fn now(&self) -> Duration {
        self.began.elapsed() + BURST
    }
}

/// One disk's place at the buckets.
#[derive(Debug)]
pub struct Throttle {
    shared: SharedLimiter,
    disk: u32,
    timer: TimerFd,
    poller: Option<SlotPoller>,
}

impl Throttle {
    /// Token of the timer in `host_event`.
    pub const TOKEN: u32 = u32::MAX - 1;

    /// The place of disk number `disk` (below 64).
    pub fn new(shared: SharedLimiter, disk: u32) -> Result<Self, DeviceError> {
        Ok(Self {
            shared,
            disk,
            timer: TimerFd::new().map_err(failed)?,
            poller: None,
        })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to `self.timer` and is open as long as that is.
        unsafe { BorrowedFd::borrow_raw(self.timer.as_raw_fd()) }
    }

    /// Registers with the event loop; for `activate`.
    pub fn start(&mut self, poller: SlotPoller) -> Result<(), DeviceError> {
        self.stop();
        // Edge-triggered: the timer never needs to be read, and so nobody can come to wait for it.
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        poller
            .add(self.fd(), Self::TOKEN, flags)
            .map_err(|e| DeviceError::Host(format!("epoll: {e}")))?;
        self.poller = Some(poller);
        Ok(())
    }

    /// Leaves the event loop; for `reset`.
    pub fn stop(&mut self) {
        if let Some(poller) = self.poller.take() {
            // It was added by `start` and nobody else removes it, so this cannot fail in a way that matters.
            let _ = poller.remove(self.fd());
        }
    }

    /// How long the next request has to wait, if it has to.
    pub fn hold(&self) -> Option<Duration> {
        let now = self.shared.now();
        lock(&self.shared.limiter).admit(self.disk, now).err()
    }

    /// Charges for what was done.
    pub fn charge(&self, work: Work) {
        let now = self.shared.now();
        lock(&self.shared.limiter).charge(work, now);
    }

    /// Asks to be woken after `wait`, which is not zero.
    pub fn wake_after(&mut self, wait: Duration) -> Result<(), DeviceError> {
        self.timer.reset(wait, None).map_err(failed)
    }
}

fn failed(error: vmm_sys_util::errno::Error) -> DeviceError {
    DeviceError::Host(format!("timerfd: {error}"))
}
