//! Epoll set of an event loop. Each descriptor is registered with the number of its owner (the
//! slot) and a token chosen by the owner.

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Maximum number of ready descriptors per wait.
const MAX_BATCH_EVENTS: usize = 64;

/// Ready descriptor: its slot (a device or the VMM itself) and a token chosen by the slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadyEvent {
    /// Slot that registered the descriptor.
    pub slot: u32,
    /// Token chosen by the slot.
    pub token: u32,
    /// Events for which the descriptor is ready.
    pub flags: EpollFlags,
}

/// Epoll set shared by the event loop and all code that registers descriptors.
#[derive(Debug, Clone)]
pub struct Poller(Arc<Epoll>);

impl Poller {
    /// Creates an empty set.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self(Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?)))
    }

    /// Returns a handle that registers descriptors for one slot.
    pub fn slot(&self, slot: u32) -> SlotPoller {
        SlotPoller {
            poller: self.clone(),
            slot,
        }
    }

    /// Waits up to `timeout` and passes each ready descriptor to `handle`.
    pub fn wait(&self, timeout: EpollTimeout, handle: impl FnMut(ReadyEvent)) -> Result<(), Errno> {
        self.wait_batch(timeout, |batch| batch.copied().for_each(handle))
    }

    /// Waits up to `timeout` and passes all ready descriptors to `handle` at once.
    pub fn wait_batch(
        &self,
        timeout: EpollTimeout,
        handle: impl FnOnce(std::slice::Iter<'_, ReadyEvent>),
    ) -> Result<(), Errno> {
        let mut events = [EpollEvent::empty(); MAX_BATCH_EVENTS];
        let count = match self.0.wait(&mut events, timeout) {
            Ok(n) => n,
            // The caller waits in a loop, so it can treat a signal like a wait without events.
            Err(Errno::EINTR) => 0,
            Err(e) => return Err(e),
        };
        // The upper half of the data is the slot and the lower half the token, as in
        // `SlotPoller::event`.
        let batch = events.map(|event| ReadyEvent {
            slot: u32::try_from(event.data() >> 32).unwrap_or(u32::MAX),
            token: u32::try_from(event.data() & u64::from(u32::MAX)).unwrap_or(u32::MAX),
            flags: event.events(),
        });
        handle(batch[..count].iter());
        Ok(())
    }
}

/// Registers descriptors for one slot of a [`Poller`].
#[derive(Debug, Clone)]
pub struct SlotPoller {
    poller: Poller,
    slot: u32,
}

impl SlotPoller {
    fn event(&self, token: u32, flags: EpollFlags) -> EpollEvent {
        EpollEvent::new(flags, u64::from(self.slot) << 32 | u64::from(token))
    }

    /// Starts to watch `fd`. Readiness is reported with `token`. Closing `fd` also removes it, but
    /// not while a duplicate is open: the caller must then remove `fd` before closing it.
    pub fn add(&self, fd: BorrowedFd<'_>, token: u32, flags: EpollFlags) -> Result<(), Errno> {
        self.poller.0.add(fd, self.event(token, flags))
    }

    /// Changes the watched events of a descriptor.
    pub fn modify(&self, fd: BorrowedFd<'_>, token: u32, flags: EpollFlags) -> Result<(), Errno> {
        self.poller.0.modify(fd, &mut self.event(token, flags))
    }

    /// Stops watching a descriptor.
    pub fn remove(&self, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        self.poller.0.delete(fd)
    }
}
