//! Epoll set of an event loop, with the owner of each descriptor.

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Most descriptors that are reported ready at once.
const MAX_BATCH_EVENTS: usize = 64;

/// Ready descriptor: its slot (a device or the VMM itself) and a token that the slot chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadyEvent {
    /// Slot that registered the descriptor.
    pub slot: u32,
    /// Token that the slot gave it.
    pub token: u32,
    /// Events that it is ready for.
    pub flags: EpollFlags,
}

/// Epoll set shared by the event loop and everything that registers descriptors with it.
#[derive(Debug, Clone)]
pub struct Poller(Arc<Epoll>);

impl Poller {
    /// An empty set.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self(Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?)))
    }

    /// A view that registers descriptors for one slot.
    pub fn slot(&self, slot: u32) -> SlotPoller {
        SlotPoller {
            poller: self.clone(),
            slot,
        }
    }

    /// Waits up to `timeout` for descriptors and hands each to `handle`.
    pub fn wait(&self, timeout: EpollTimeout, handle: impl FnMut(ReadyEvent)) -> Result<(), Errno> {
        self.wait_batch(timeout, |batch| batch.copied().for_each(handle))
    }

    /// Waits up to `timeout` for descriptors and hands those that are ready at once to `handle`.
    pub fn wait_batch(
        &self,
        timeout: EpollTimeout,
        handle: impl FnOnce(std::slice::Iter<'_, ReadyEvent>),
    ) -> Result<(), Errno> {
        let mut events = [EpollEvent::empty(); MAX_BATCH_EVENTS];
        let count = match self.0.wait(&mut events, timeout) {
            Ok(n) => n,
            Err(Errno::EINTR) => 0,
            Err(e) => return Err(e),
        };
        let batch = events.map(|event| ReadyEvent {
            slot: u32::try_from(event.data() >> 32).unwrap_or(u32::MAX),
            token: u32::try_from(event.data() & u64::from(u32::MAX)).unwrap_or(u32::MAX),
            flags: event.events(),
        });
        handle(batch[..count].iter());
        Ok(())
    }
}

/// Registers descriptors under one slot of a [`Poller`].
#[derive(Debug, Clone)]
pub struct SlotPoller {
    poller: Poller,
    slot: u32,
}

impl SlotPoller {
    fn event(&self, token: u32, flags: EpollFlags) -> EpollEvent {
        EpollEvent::new(flags, u64::from(self.slot) << 32 | u64::from(token))
    }

    /// Starts watching `fd`; readiness is reported with `token`. The caller removes it before
    /// closing it.
    pub fn add(&self, fd: BorrowedFd<'_>, token: u32, flags: EpollFlags) -> Result<(), Errno> {
        self.poller.0.add(fd, self.event(token, flags))
    }

    /// Changes the events that a descriptor is watched for.
    pub fn modify(&self, fd: BorrowedFd<'_>, token: u32, flags: EpollFlags) -> Result<(), Errno> {
        self.poller.0.modify(fd, &mut self.event(token, flags))
    }

    /// Stops watching.
    pub fn remove(&self, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        self.poller.0.delete(fd)
    }
}
