//! Frames from the tap to the guest.
//!
//! A *chain* is a buffer that the guest has added to the receive queue. A *kick* is the guest's
//! notification that it has added chains. The *budget* is the number of chains that are filled
//! before the device handles other work.
//!
//! The tap is watched edge-triggered, and `readable` remains set until a read finds the tap empty.
//! A guest without buffers therefore causes no wakeups. A frame is only read from the tap if a
//! buffer is available. If the frame is larger than the available buffers, it is retained until the
//! guest adds more.

use super::MAX_FRAME_BYTES;
use super::header::{HEADER_BYTES, set_num_buffers};
use super::tap::Tap;
use crate::GuestMemory;
use crate::virtio::device::chain::{DescriptorChain, next_chain};
use crate::virtio::{DeviceError, Interrupt};
use std::io;
use std::sync::atomic::{Ordering, fence};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Address, Bytes, GuestAddress};

/// Maximum number of frames and chains handled before control returns to the event loop.
const RX_BUDGET: usize = 512;

/// State of the receiving side.
#[derive(Debug)]
pub struct FrameReceiver {
    /// Frame that was read from the tap but not delivered. Valid up to `len`.
    frame: Box<[u8]>,
    /// Length of the frame. 0 without a frame.
    len: usize,
    /// True if the tap may have a frame.
    pub readable: bool,
    /// Number of frames delivered to the guest.
    pub frames: u64,
    /// Number of frames that were too large for the guest's buffers.
    pub dropped: u64,
    /// Number of failed reads.
    pub errors: u64,
}

/// Result of passing a frame to the guest.
enum DeliveryStatus {
    Done,
    Dropped,
    /// The guest has no buffers. Kicks for new buffers are enabled.
    Starved,
}

/// Receive queue with the resources for using it.
pub struct ReceiveQueue<'a> {
    /// Queue of the device.
    pub queue: &'a mut Queue,
    /// Guest memory.
    pub memory: &'a GuestMemory,
    /// Interrupt line.
    pub interrupt: &'a dyn Interrupt,
    /// True if `VIRTIO_NET_F_MRG_RXBUF` was negotiated: a frame may be spread over several chains.
    pub mergeable: bool,
}

fn ring(e: impl std::fmt::Display) -> DeviceError {
    DeviceError::Guest(format!("receive ring: {e}"))
}

impl FrameReceiver {
    pub fn new() -> Self {
        Self {
            frame: vec![0; MAX_FRAME_BYTES].into_boxed_slice(),
            len: 0,
            readable: false,
            frames: 0,
            dropped: 0,
            errors: 0,
        }
    }

    /// Drops the frame that was read but not delivered, if any. `readable` is set again when the
    /// tap is added to the event loop, or by `open_gate`.
    pub fn reset(&mut self) {
        self.len = 0;
        self.readable = false;
    }

    /// Drops the next frame of the tap. Returns `false` if there is no frame.
    pub fn drop_frame(&mut self, tap: &Tap) -> bool {
        self.reset();
        matches!(tap.read(&mut self.frame), Ok(length) if length != 0)
    }

    /// Moves frames until the tap is empty, the guest has no buffers, or the budget is spent.
    /// Returns whether the budget is spent and the tap may have more frames.
    pub fn run(&mut self, tap: &Tap, mut to: ReceiveQueue<'_>) -> Result<bool, DeviceError> {
        if !to.queue.ready() {
            return Ok(false);
        }
        // The guest may need an interrupt if the used index advances.
        let before = to.queue.next_used();
        // `has_buffers` and `deliver` enable kicks again when buffers are missing.
        to.queue.disable_notification(to.memory).map_err(ring)?;
        let outcome = self.move_frames(tap, &mut to);
        // After an error, the driver must still learn of the frames delivered before.
        if to.queue.next_used() != before && to.needs_interrupt(before)? {
            to.interrupt.queue();
        }
        outcome
    }

    /// Moves frames until no frame or buffer is available. Returns true if the budget is spent
    /// first.
    fn move_frames(&mut self, tap: &Tap, to: &mut ReceiveQueue<'_>) -> Result<bool, DeviceError> {
        let mut budget = RX_BUDGET;
        loop {
            if self.len == 0 {
                if !self.readable || !to.has_buffers()? {
                    return Ok(false);
                }
                match tap.read(&mut self.frame) {
                    Ok(len) => {
                        // 0: the end of the tap.
                        self.readable = len != 0;
                        // An empty frame is skipped.
                        self.len = if len > HEADER_BYTES { len } else { 0 };
                    }
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) => {
                        self.errors += u64::from(e.kind() != io::ErrorKind::WouldBlock);
                        self.readable = false;
                    }
                }
            }
            if self.len != 0 {
                match to.deliver(&mut self.frame[..self.len], &mut budget)? {
                    DeliveryStatus::Done => self.frames += 1,
                    DeliveryStatus::Dropped => self.dropped += 1,
                    DeliveryStatus::Starved => return Ok(false),
                }
                self.len = 0;
            }
            // Both frames and chains count: a guest may offer many tiny buffers.
            budget = budget.saturating_sub(1);
            if budget == 0 {
                return Ok(self.readable);
            }
        }
    }
}

impl ReceiveQueue<'_> {
    /// Returns whether a chain is available. If not, enables kicks, and checks again for a chain
    /// added in the meantime.
    fn has_buffers(&mut self) -> Result<bool, DeviceError> {
        let avail = self.queue.avail_idx(self.memory, Ordering::Acquire);
        if avail.map_err(ring)?.0 != self.queue.next_avail() {
            return Ok(true);
        }
        self.queue.enable_notification(self.memory).map_err(ring)
    }

    /// Copies `frame` into available chains, and publishes them. Subtracts the number of chains
    /// taken from `budget`.
    fn deliver(
        &mut self,
        frame: &mut [u8],
        budget: &mut usize,
    ) -> Result<DeliveryStatus, DeviceError> {
        // The position to return to if the frame does not fit.
        let first = self.queue.next_avail();
        let limit = if self.mergeable {
            usize::from(self.queue.size())
        } else {
            1
        };
        let mut chains: Vec<DescriptorChain<'_>> = Vec::new();
        let mut capacity = 0;
        let mut retried = false;
        while capacity < frame.len() {
            if chains.len() == limit {
                // Return the chains to the ring unused.
                self.queue.set_next_avail(first);
                return Ok(DeliveryStatus::Dropped);
            }
            let Some(chain) = next_chain(self.queue, self.memory)? else {
                // Kicks are enabled for chains that follow the last chain seen.
                let more = self.queue.enable_notification(self.memory).map_err(ring)?;
                // A chain was added before kicks were enabled: take it. Retry only once: an index
                // that goes back each time would cause an endless loop.
                if more && !std::mem::replace(&mut retried, true) {
                    continue;
                }
                if more {
                    return Err(ring("available index goes back (2.7.6)"));
                }
                self.queue.set_next_avail(first);
                return Ok(DeliveryStatus::Starved);
            };
            retried = false;
            if !chain.readable.is_empty() || chain.writable.is_empty() {
                return Err(DeviceError::Guest(
                    "receive buffer that is not writable (5.1.6.3)".into(),
                ));
            }
            *budget = budget.saturating_sub(1);
            capacity += chain.writable.len();
            chains.push(chain);
        }
        set_num_buffers(frame, u16::try_from(chains.len()).unwrap_or(u16::MAX));
        let mut rest = &*frame;
        let mut used = Vec::with_capacity(chains.len());
        for chain in &chains {
            let count = chain.writable.copy_from(rest);
            rest = &rest[count..];
            used.push((chain.head, u32::try_from(count).unwrap_or(u32::MAX)));
        }
        self.publish(&used)?;
        Ok(DeliveryStatus::Done)
    }

    /// Adds all chains of a frame to the used ring and advances its index once: a polling driver
    /// must never see an incomplete frame.
    fn publish(&mut self, used: &[(u16, u32)]) -> Result<(), DeviceError> {
        let base = GuestAddress(self.queue.used_ring());
        let at = |offset| {
            base.checked_add(offset)
                .ok_or_else(|| ring("address overflow"))
        };
        let mut next = self.queue.next_used();
        for &(head, len) in used {
            // Layout of the used ring (2.7.8): flags (2 bytes), index (2 bytes), entries of 8
            // bytes.
            let slot = u64::from(next % self.queue.size());
            let entry = u64::from(head) | u64::from(len) << 32;
            self.memory
                .write_obj(entry.to_le(), at(4 + 8 * slot)?)
                .map_err(ring)?;
            next = next.wrapping_add(1);
        }
        // Release: the driver must see all entries before the index.
        self.memory
            .store(next.to_le(), at(2)?, Ordering::Release)
            .map_err(ring)?;
        self.queue.set_next_used(next);
        Ok(())
    }

    /// Returns whether the driver requests an interrupt for the buffers used since index `before`
    /// (2.7.10).
    fn needs_interrupt(&self, before: u16) -> Result<bool, DeviceError> {
        // The driver must see the new index before its event index is read. Otherwise both sides
        // could miss each other's update.
        fence(Ordering::SeqCst);
        if !self.queue.event_idx_enabled() {
            return Ok(true);
        }
        // The event index follows the available ring: a header of 4 bytes and entries of 2 bytes.
        let at = GuestAddress(self.queue.avail_ring())
            .checked_add(4 + 2 * u64::from(self.queue.size()))
            .ok_or_else(|| ring("address overflow"))?;
        let event: u16 = self.memory.load(at, Ordering::Relaxed).map_err(ring)?;
        let now = self.queue.next_used();
        // The driver requests an interrupt if the index passed its event index, modulo 2^16.
        let passed = now.wrapping_sub(u16::from_le(event)).wrapping_sub(1);
        Ok(passed < now.wrapping_sub(before))
    }
}
