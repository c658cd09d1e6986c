//! Rate limit of one disk: the token buckets shared by the guest's disks, and the timer that wakes
//! the disk when tokens are available.

use super::disk_limiter::{DiskLimiter, DiskWork};
use crate::machine::bus::lock;
use crate::poll::SlotPoller;
use crate::virtio::DeviceError;
use crate::virtio::token_bucket::BURST_WINDOW;
use jiffy_proto::vm::DiskLimits;
use nix::sys::epoll::EpollFlags;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use vmm_sys_util::timerfd::TimerFd;

/// Token buckets of one guest, shared by its disks.
#[derive(Debug, Clone)]
pub struct SharedDiskLimiter {
    limiter: Arc<Mutex<DiskLimiter>>,
    began: Instant,
}

impl SharedDiskLimiter {
    /// Creates full buckets. `None` if nothing is limited.
    pub fn new(limits: DiskLimits) -> Option<Self> {
        Some(Self {
            limiter: Arc::new(Mutex::new(DiskLimiter::new(limits)?)),
            began: Instant::now(),
        })
    }

    /// Returns the time since the origin of the buckets.
    fn now(&self) -> Duration {
        // A `TokenBucket` requires that its origin is at least one window in the past.
        self.began.elapsed() + BURST_WINDOW
    }
}

/// Rate limit of one disk.
#[derive(Debug)]
pub struct DiskThrottle {
    shared: SharedDiskLimiter,
    disk: u32,
    timer: TimerFd,
    poller: Option<SlotPoller>,
}

impl DiskThrottle {
    /// Token of the timer in `host_event`.
    pub const TOKEN: u32 = u32::MAX - 1;

    /// Creates the rate limit of disk number `disk` (below 64).
    pub fn new(shared: SharedDiskLimiter, disk: u32) -> Result<Self, DeviceError> {
        Ok(Self {
            shared,
            disk,
            timer: TimerFd::new().map_err(failed)?,
            poller: None,
        })
    }

    /// Returns the descriptor of the timer.
    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to `self.timer` and is open while `self.timer` exists.
        unsafe { BorrowedFd::borrow_raw(self.timer.as_raw_fd()) }
    }

    /// Registers the timer with the event loop. Called by `activate`.
    pub fn start(&mut self, poller: SlotPoller) -> Result<(), DeviceError> {
        self.stop();
        // Edge-triggered, so that the timer need not be read and no thread can block on it.
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        poller
            .add(self.fd(), Self::TOKEN, flags)
            .map_err(|e| DeviceError::Host(format!("epoll: {e}")))?;
        self.poller = Some(poller);
        Ok(())
    }

    /// Removes the timer from the event loop. Called by `reset`.
    pub fn stop(&mut self) {
        if let Some(poller) = self.poller.take() {
            // Ignore the error: the timer is added by `start` and only removed here.
            let _ = poller.remove(self.fd());
        }
    }

    /// Returns the time until the next request may start, and records that the disk waits. `None`
    /// if the request may start now: the disk then takes its turn.
    pub fn wait_for_tokens(&self) -> Option<Duration> {
        let now = self.shared.now();
        // The lock is held for a short calculation only, so the disks do not delay each other.
        lock(&self.shared.limiter).admit(self.disk, now).err()
    }

    /// Charges the buckets for a request.
    pub fn charge(&self, work: DiskWork) {
        let now = self.shared.now();
        lock(&self.shared.limiter).charge(work, now);
    }

    /// Sets the timer to fire after `wait`, which must not be zero.
    pub fn wake_after(&mut self, wait: Duration) -> Result<(), DeviceError> {
        self.timer.reset(wait, None).map_err(failed)
    }
}

fn failed(error: vmm_sys_util::errno::Error) -> DeviceError {
    DeviceError::Host(format!("timerfd: {error}"))
}
