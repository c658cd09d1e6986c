//! Descriptor chains of a virtqueue: checks them, resolves them to host memory, and serves all
//! available chains of a queue ([`drain`]).
//!
//! A *kick* is the driver's notification that it has added chains to the available ring. While a
//! device serves a queue, it disables kicks, because it checks for further chains itself. The
//! *budgets* of a device are the numbers of chains and bytes that it serves before other devices
//! are served.
//!
//! Invariant: a [`DescriptorChain`] is complete. `virtio_queue` ends its iteration silently if a
//! chain is broken (loops, nested indirect tables, tables outside memory). This module therefore
//! checks the `NEXT` flag of the last descriptor, so that no device serves an incomplete request.

use super::{DeviceError, Interrupt};
use crate::GuestMemory;
use nix::sys::epoll::EpollFlags;
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::Duration;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{GuestMemoryBackend, VolatileSlice};

/// Guest memory of a chain, in order, checked to exist.
#[derive(Debug, Default)]
pub struct GuestBuffers<'m> {
    slices: Vec<VolatileSlice<'m>>,
    len: usize,
}

impl<'m> GuestBuffers<'m> {
    fn push(&mut self, slice: VolatileSlice<'m>) {
        self.len += slice.len();
        self.slices.push(slice);
    }

    /// Returns the total number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the buffers contain no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the slices of guest memory.
    pub fn slices(&self) -> &[VolatileSlice<'m>] {
        &self.slices
    }

    /// Splits off the first `bytes` bytes. Returns `None` and splits nothing if there are fewer.
    pub fn take(&mut self, bytes: usize) -> Option<GuestBuffers<'m>> {
        self.len = self.len.checked_sub(bytes)?;
        let mut front = GuestBuffers::default();
        let mut whole = 0;
        for slice in &mut self.slices {
            let missing = bytes - front.len;
            if slice.len() > missing {
                if missing > 0 {
                    let (left, right) = slice.split_at(missing).ok()?;
                    front.push(left);
                    *slice = right;
                }
                break;
            }
            front.push(*slice);
            whole += 1;
        }
        self.slices.drain(..whole);
        Some(front)
    }

    /// Copies bytes from the front to `to`. Returns their number.
    pub fn copy_to(&self, to: &mut [u8]) -> usize {
        let mut done = 0;
        // `copy_to` and `copy_from` are volatile: the guest may change the bytes at the same time.
        for slice in &self.slices {
            done += slice.copy_to(&mut to[done..]);
        }
        done
    }

    /// Copies `from` to the front. Returns the number of bytes that fit.
    pub fn copy_from(&self, from: &[u8]) -> usize {
        let mut done = 0;
        for slice in &self.slices {
            let count = slice.len().min(from.len() - done);
            slice.copy_from(&from[done..done + count]);
            done += count;
        }
        done
    }

    /// Returns the slices for vectored I/O. The pointers are valid as long as the guest memory
    /// `'m`.
    pub fn iovecs(&self) -> impl Iterator<Item = libc::iovec> {
        self.slices.iter().map(|slice| libc::iovec {
            iov_base: slice.ptr_guard_mut().as_ptr().cast(),
            iov_len: slice.len(),
        })
    }
}

/// One request: buffers that the device reads, followed by buffers that it writes (virtio 1.2
/// section 2.7.4.2).
#[derive(Debug)]
pub struct DescriptorChain<'m> {
    /// Index of the first descriptor, which identifies the chain in the used ring.
    pub head: u16,
    /// Buffers from the driver to the device.
    pub readable: GuestBuffers<'m>,
    /// Buffers from the device to the driver.
    pub writable: GuestBuffers<'m>,
}

/// Returns the error of a guest that violates the contract.
fn guest(what: impl Into<String>) -> DeviceError {
    DeviceError::Guest(what.into())
}

fn ring_error(error: virtio_queue::Error) -> DeviceError {
    guest(format!("available ring: {error}"))
}

/// Returns whether the available ring contains a chain.
fn has_chain(queue: &Queue, memory: &GuestMemory) -> Result<bool, DeviceError> {
    // Acquire: the descriptors must be read after the index that makes them available.
    let available = queue
        .avail_idx(memory, Ordering::Acquire)
        .map_err(ring_error)?;
    Ok(available.0 != queue.next_avail())
}

/// Takes the next chain from the available ring. `None` if it is empty.
pub fn next_chain<'m>(
    queue: &mut Queue,
    memory: &'m GuestMemory,
) -> Result<Option<DescriptorChain<'m>>, DeviceError> {
    if !has_chain(queue, memory)? {
        return Ok(None);
    }
    let size = queue.size();
    let descriptors = queue
        .iter(memory)
        .map_err(ring_error)?
        .next()
        .ok_or_else(|| guest("available ring outside memory"))?;
    let mut chain = DescriptorChain {
        head: descriptors.head_index(),
        readable: GuestBuffers::default(),
        writable: GuestBuffers::default(),
    };
    let mut count: u16 = 0;
    let mut unfinished = true;
    let mut writing = false;
    for descriptor in descriptors {
        // The iterator of `virtio_queue` also stops at this limit, but without an error.
        count += 1;
        if count > size {
            return Err(guest("chain longer than the queue (2.7.5.3.1)"));
        }
        unfinished = descriptor.has_next();
        let write = descriptor.is_write_only();
        if writing && !write {
            return Err(guest("readable buffer after a writable one (2.7.4.2)"));
        }
        writing = write;
        let buffers = if write {
            &mut chain.writable
        } else {
            &mut chain.readable
        };
        // Conversion cannot fail on 64-bit hosts.
        let bytes = usize::try_from(descriptor.len()).unwrap_or(usize::MAX);
        for slice in memory.get_slices(descriptor.addr(), bytes) {
            buffers.push(slice.map_err(|e| guest(format!("buffer outside memory: {e}")))?);
        }
    }
    if unfinished {
        return Err(guest("chain without an end"));
    }
    Ok(Some(chain))
}

/// State of a queue after [`drain_throttled`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainStatus {
    /// The queue is empty. The guest kicks when it adds chains.
    Drained,
    /// Chains remain because the budget is spent. The caller must continue soon, without a kick.
    BudgetSpent,
    /// Chains remain that must wait this long. The caller must continue then, without a kick.
    Throttled(Duration),
}

/// Serves available chains, at most as many as the queue's size. Stops when the served chains have
/// `byte_budget` bytes. `serve` returns the number of bytes that it wrote. Kicks are disabled
/// meanwhile, and the guest is interrupted once, at the end.
///
/// Returns whether chains remain. The caller must then continue without a kick (see
/// [`DeferredKick`]).
pub fn drain<'m>(
    queue: &mut Queue,
    memory: &'m GuestMemory,
    interrupt: &dyn Interrupt,
    byte_budget: usize,
    serve: impl FnMut(DescriptorChain<'m>) -> Result<u32, DeviceError>,
) -> Result<bool, DeviceError> {
    let status = drain_throttled(queue, memory, interrupt, byte_budget, || None, serve)?;
    Ok(status != DrainStatus::Drained)
}

/// Same as [`drain`]. `wait_time` returns the time for which the next chain has to wait, if any.
/// Such a chain stays on the ring, so that the next drain handles it, on this machine or on a
/// machine restored from it.
pub fn drain_throttled<'m>(
    queue: &mut Queue,
    memory: &'m GuestMemory,
    interrupt: &dyn Interrupt,
    byte_budget: usize,
    mut wait_time: impl FnMut() -> Option<Duration>,
    mut serve: impl FnMut(DescriptorChain<'m>) -> Result<u32, DeviceError>,
) -> Result<DrainStatus, DeviceError> {
    if !queue.ready() {
        return Ok(DrainStatus::Drained);
    }
    let ring = |e| guest(format!("ring: {e}"));
    // Both budgets bound the time in which other devices are not served.
    let mut chains = queue.size();
    let mut bytes = byte_budget;
    let mut used = false;
    let mut progress = true;
    let outcome = loop {
        // Without this call, the guest would kick for each chain that it adds meanwhile.
        if let Err(e) = queue.disable_notification(memory) {
            break Err(ring(e));
        }
        let served = loop {
            if chains == 0 || bytes == 0 {
                break Ok(DrainStatus::BudgetSpent);
            }
            match has_chain(queue, memory) {
                Ok(true) => {}
                Ok(false) => break Ok(DrainStatus::Drained),
                Err(e) => break Err(e),
            }
            if let Some(wait) = wait_time() {
                break Ok(DrainStatus::Throttled(wait));
            }
            let chain = match next_chain(queue, memory) {
                Ok(Some(chain)) => chain,
                // The guest has withdrawn the chain after `has_chain`.
                Ok(None) => break Ok(DrainStatus::Drained),
                Err(e) => break Err(e),
            };
            chains -= 1;
            progress = true;
            bytes = bytes.saturating_sub(chain.readable.len() + chain.writable.len());
            let head = chain.head;
            match serve(chain) {
                Ok(written) => {
                    if let Err(e) = queue.add_used(memory, head, written) {
                        break Err(ring(e));
                    }
                    used = true;
                }
                Err(e) => break Err(e),
            }
        };
        match served {
            Ok(DrainStatus::Drained) => match queue.enable_notification(memory) {
                Ok(false) => break Ok(DrainStatus::Drained),
                // The index was ahead after kicks were enabled, but not when it was read again.
                // Such an index would block the event loop forever. A driver can cause it by
                // placing the used ring over the index, or by writing the index from another CPU.
                Ok(true) if !progress => break Err(guest("available index goes back (2.7.6)")),
                // A chain was added before kicks were enabled: serve it.
                Ok(true) => progress = false,
                Err(e) => break Err(ring(e)),
            },
            other => break other,
        }
    };
    // Interrupt even after an error: the driver must learn of the chains that were served.
    if used && queue.needs_notification(memory).map_err(ring)? {
        interrupt.queue();
    }
    outcome
}

/// Checks at activation that a queue enabled by the driver is inside memory.
pub fn check_queue(queue: &Queue, memory: &GuestMemory) -> Result<(), DeviceError> {
    if queue.ready() && !queue.is_valid(memory) {
        return Err(guest("queue outside memory"));
    }
    Ok(())
}

/// Callback from the event loop for queues in which a device has left chains. The callback replaces
/// the kick that the guest does not send for these chains.
#[derive(Debug)]
pub struct DeferredKick {
    event: EventFd,
    poller: Option<crate::poll::SlotPoller>,
    queues: u64,
}

impl DeferredKick {
    /// Token of the callback in `host_event`.
    pub const TOKEN: u32 = u32::MAX;

    /// Creates the callback without pending queues.
    pub fn new() -> Result<Self, DeviceError> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self {
            event: EventFd::from_flags(flags)
                .map_err(|e| DeviceError::Host(format!("eventfd: {e}")))?,
            poller: None,
            queues: 0,
        })
    }

    /// Registers the callback with the event loop. Called by `activate`.
    pub fn start(&mut self, poller: crate::poll::SlotPoller) -> Result<(), DeviceError> {
        self.stop();
        poller
            .add(self.event.as_fd(), Self::TOKEN, EpollFlags::EPOLLIN)
            .map_err(|e| DeviceError::Host(format!("epoll: {e}")))?;
        self.poller = Some(poller);
        Ok(())
    }

    /// Removes the callback from the event loop and forgets pending queues. Called by `reset`.
    pub fn stop(&mut self) {
        if let Some(poller) = self.poller.take() {
            // Ignore the error: the descriptor is added by `start` and only removed here.
            let _ = poller.remove(self.event.as_fd());
        }
        self.take();
    }

    /// Schedules a callback for queue `index` (below 64).
    pub fn schedule(&mut self, index: usize) -> Result<(), DeviceError> {
        // The eventfd is already readable if another queue is pending.
        let first = self.queues == 0;
        self.queues |= 1 << index;
        if first {
            self.event
                .write(1)
                .map_err(|e| DeviceError::Host(format!("eventfd: {e}")))?;
        }
        Ok(())
    }

    /// Returns and clears the pending queues, as a bit set.
    pub fn take(&mut self) -> u64 {
        // Reset the counter, which makes the eventfd unreadable. Errors only cause an extra
        // callback.
        if self.queues != 0 {
            let _ = self.event.read();
        }
        std::mem::take(&mut self.queues)
    }
}

#[cfg(test)]
mod tests;
