//! Descriptor chains, checked and resolved to host memory, and the loop that serves them.
//!
//! Invariant: a [`Chain`] is whole. `virtio_queue` ends its iteration silently where a chain is broken (loops,
//! nested indirect tables, tables outside memory); here that is told from an honest end by the `NEXT` flag of the
//! last descriptor seen, so no device ever serves half a request.

use super::{DeviceError, Interrupt};
use crate::GuestMemory;
use nix::sys::epoll::EpollFlags;
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::Duration;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{GuestMemoryBackend, VolatileSlice};

/// Guest memory that a chain names, in order, already known to exist.
#[derive(Debug, Default)]
pub struct Buffers<'m> {
    slices: Vec<VolatileSlice<'m>>,
    len: usize,
}

impl<'m> Buffers<'m> {
    fn push(&mut self, slice: VolatileSlice<'m>) {
        self.len += slice.len();
        self.slices.push(slice);
    }

    /// Bytes in all.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is not one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The pieces.
    pub fn slices(&self) -> &[VolatileSlice<'m>] {
        &self.slices
    }

    /// Takes the first `bytes` off; `None`, and nothing taken, if there are fewer.
    pub fn take(&mut self, bytes: usize) -> Option<Buffers<'m>> {
        self.len = self.len.checked_sub(bytes)?;
        let mut front = Buffers::default();
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

    /// Copies bytes from the front into `to`; returns how many there were.
    pub fn copy_to(&self, to: &mut [u8]) -> usize {
        let mut done = 0;
        for slice in &self.slices {
            done += slice.copy_to(&mut to[done..]);
        }
        done
    }

    /// Copies `from` to the front; returns how many bytes found room.
    pub fn copy_from(&self, from: &[u8]) -> usize {
        let mut done = 0;
        for slice in &self.slices {
            let count = slice.len().min(from.len() - done);
            slice.copy_from(&from[done..done + count]);
            done += count;
        }
        done
    }

    /// The pieces for vectored I/O. The pointers stay good for as long as the guest memory `'m`.
    pub fn iovecs(&self) -> impl Iterator<Item = libc::iovec> {
        self.slices.iter().map(|slice| libc::iovec {
            iov_base: slice.ptr_guard_mut().as_ptr().cast(),
            iov_len: slice.len(),
        })
    }
}

/// One request: what the device may read, then what it may write (virtio 1.2 section 2.7.4.2 demands that order).
#[derive(Debug)]
pub struct Chain<'m> {
    /// Its name in the used ring.
    pub head: u16,
    /// From the driver.
    pub readable: Buffers<'m>,
    /// To the driver.
    pub writable: Buffers<'m>,
}

fn guest(what: impl Into<String>) -> DeviceError {
    DeviceError::Guest(what.into())
}

fn broken(error: virtio_queue::Error) -> DeviceError {
    guest(format!("available ring: {error}"))
}

/// Whether a chain waits on the available ring.
fn waits(queue: &Queue, memory: &GuestMemory) -> Result<bool, DeviceError> {
    let available = queue.avail_idx(memory, Ordering::Acquire).map_err(broken)?;
    Ok(available.0 != queue.next_avail())
}

/// Takes the next chain off the available ring, if there is one.
pub fn next_chain<'m>(
    queue: &mut Queue,
    memory: &'m GuestMemory,
) -> Result<Option<Chain<'m>>, DeviceError> {
    if !waits(queue, memory)? {
        return Ok(None);
    }
    let size = queue.size();
    let descriptors = queue
        .iter(memory)
        .map_err(broken)?
        .next()
        .ok_or_else(|| guest("available ring outside memory"))?;
    let mut chain = Chain {
        head: descriptors.head_index(),
        readable: Buffers::default(),
        writable: Buffers::default(),
    };
    let mut count: u16 = 0;
    let mut unfinished = true;
    let mut writing = false;
    for descriptor in descriptors {
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

/// What a round of [`drain_held`] left in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// Nothing; the guest kicks when there is something.
    Nothing,
    /// Work that the budget had no room for: come back soon, without being kicked.
    Work,
    /// Work that must wait for so long: come back then, without being kicked.
    Held(Duration),
}

/// Serves waiting chains: at most as many as the queue is long, and no new one once they named `byte_budget`
/// bytes. `serve` returns how many bytes it wrote. Kicks are off meanwhile and the guest is interrupted once, at the end.
///
/// Returns whether work was left; the caller must then come back without being kicked (see [`Again`]).
pub fn drain<'m>(
    queue: &mut Queue,
    memory: &'m GuestMemory,
    interrupt: &dyn Interrupt,
    byte_budget: usize,
    serve: impl FnMut(Chain<'m>) -> Result<u32, DeviceError>,
) -> Result<bool, DeviceError> {
    let left = drain_held(queue, memory, interrupt, byte_budget, || None, serve)?;
    Ok(left != Left::Nothing)
}

/// The same, asking `hold` before each chain whether it has to wait. One that has to stays where it is, so that whoever looks at
/// the queue next, in this machine or in one restored from it, finds it there.
pub fn drain_held<'m>(
    queue: &mut Queue,
    memory: &'m GuestMemory,
    interrupt: &dyn Interrupt,
    byte_budget: usize,
    mut hold: impl FnMut() -> Option<Duration>,
    mut serve: impl FnMut(Chain<'m>) -> Result<u32, DeviceError>,
) -> Result<Left, DeviceError> {
    if !queue.ready() {
        return Ok(Left::Nothing);
    }
    let ring = |e| guest(format!("ring: {e}"));
    let mut chains = queue.size();
    let mut bytes = byte_budget;
    let mut used = false;
    let mut progress = true;
    let outcome = loop {
        if let Err(e) = queue.disable_notification(memory) {
            break Err(ring(e));
        }
        let served = loop {
            if chains == 0 || bytes == 0 {
                break Ok(Left::Work);
            }
            match waits(queue, memory) {
                Ok(true) => {}
                Ok(false) => break Ok(Left::Nothing),
                Err(e) => break Err(e),
            }
            if let Some(wait) = hold() {
                break Ok(Left::Held(wait));
            }
            let chain = match next_chain(queue, memory) {
                Ok(Some(chain)) => chain,
                Ok(None) => break Ok(Left::Nothing),
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
            Ok(Left::Nothing) => match queue.enable_notification(memory) {
                Ok(false) => break Ok(Left::Nothing),
                // An index that is ahead after asking for kicks and is not when looked at again would hold the event
                // loop for ever: a driver can lay the used ring over it, or write it from another CPU.
                Ok(true) if !progress => break Err(guest("available index goes back (2.7.6)")),
                Ok(true) => progress = false,
                Err(e) => break Err(ring(e)),
            },
            left_or_failed => break left_or_failed,
        }
    };
    if used && queue.needs_notification(memory).map_err(ring)? {
        interrupt.queue();
    }
    outcome
}

/// Checks at activation that a queue the driver enabled lies in memory.
pub fn check_queue(queue: &Queue, memory: &GuestMemory) -> Result<(), DeviceError> {
    if queue.ready() && !queue.is_valid(memory) {
        return Err(guest("queue outside memory"));
    }
    Ok(())
}

/// How a device asks the event loop to call it back for queues that it left unfinished.
#[derive(Debug)]
pub struct Again {
    event: EventFd,
    poller: Option<crate::poll::SlotPoller>,
    queues: u64,
}

impl Again {
    /// Token of the wake-ups in `host_event`.
    pub const TOKEN: u32 = u32::MAX;

    /// Nothing to come back for.
    pub fn new() -> Result<Self, DeviceError> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self {
            event: EventFd::from_flags(flags)
                .map_err(|e| DeviceError::Host(format!("eventfd: {e}")))?,
            poller: None,
            queues: 0,
        })
    }

    /// Registers with the event loop; for `activate`.
    pub fn start(&mut self, poller: crate::poll::SlotPoller) -> Result<(), DeviceError> {
        self.stop();
        poller
            .add(self.event.as_fd(), Self::TOKEN, EpollFlags::EPOLLIN)
            .map_err(|e| DeviceError::Host(format!("epoll: {e}")))?;
        self.poller = Some(poller);
        Ok(())
    }

    /// Leaves the event loop and forgets what was to be done; for `reset`.
    pub fn stop(&mut self) {
        if let Some(poller) = self.poller.take() {
            // It was added by `start` and nobody else removes it, so this cannot fail in a way that matters.
            let _ = poller.remove(self.event.as_fd());
        }
        self.take();
    }

    /// Asks to be woken for queue `index` (below 64).
    pub fn schedule(&mut self, index: usize) -> Result<(), DeviceError> {
        let first = self.queues == 0;
        self.queues |= 1 << index;
        if first {
            self.event
                .write(1)
                .map_err(|e| DeviceError::Host(format!("eventfd: {e}")))?;
        }
        Ok(())
    }

    /// The queues to come back for, as a bit set; they are forgotten.
    pub fn take(&mut self) -> u64 {
        if self.queues != 0 {
            let _ = self.event.read();
        }
        std::mem::take(&mut self.queues)
    }
}

#[cfg(test)]
#[path = "chain_tests.rs"]
mod tests;
