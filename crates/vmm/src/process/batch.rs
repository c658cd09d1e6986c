//! The event loop of the VMM, and batches of events that are ready at the same time.

use super::Vm;
use crate::error::VmmError;
use crate::machine::EventSlot;
use crate::machine::bus::lock;
use crate::poll::ReadyEvent;
use jiffy_proto::vm::StopCause;
use nix::sys::epoll::EpollTimeout;

impl Vm {
    /// Serves the machine until the VM ends. Returns the cause.
    pub(super) fn serve(&mut self) -> StopCause {
        let poller = self.machine.poller.clone();
        loop {
            let timeout = if self.copies_are_due() {
                // Copies of pages (`first_use.rs`) are due: handle ready events, but do not wait
                // for more events.
                EpollTimeout::ZERO
            } else {
                EpollTimeout::NONE
            };
            if let Err(e) = poller.wait_batch(timeout, |batch| self.dispatch_batch(batch)) {
                return VmmError::host("epoll", e).into();
            }
            // Check for the end before the copies: a VM that ends needs no further copies.
            if let Some(cause) = self.ending() {
                return cause;
            }
            self.make_due_copies();
        }
    }

    /// Dispatches events in order. A device may defer the effects of consecutive events (its work
    /// and the interrupt of the guest) to the end of the batch. An event of the VM itself ends the
    /// batch, and later events start a new batch. A request of the controller must find each device
    /// as if its events had been handled one by one.
    pub(super) fn dispatch_batch<'a>(
        &mut self,
        batch: impl ExactSizeIterator<Item = &'a ReadyEvent>,
    ) {
        let single = batch.len() == 1;
        // Bit set of devices with deferred effects.
        let mut batched = 0;
        for ready in batch {
            match EventSlot::decode(ready.slot) {
                EventSlot::Queue(device) | EventSlot::Host(device) if !single => {
                    self.begin_batch(device, &mut batched);
                }
                // Apply deferred effects before the request is handled.
                EventSlot::Other(_) => self.end_batches(&mut batched),
                _ => {}
            }
            self.dispatch(*ready);
        }
        self.end_batches(&mut batched);
    }

    /// Lets a device defer the effects of its events until [`Self::end_batches`], and sets its bit
    /// in `batched`. Does nothing if the bit is set, because the device defers them already.
    fn begin_batch(&self, index: usize, batched: &mut u64) {
        // A device number of 64 or more does not fit the bit set: such a device handles each event
        // at once.
        let bit = u32::try_from(index)
            .ok()
            .and_then(|index| 1u64.checked_shl(index))
            .filter(|bit| *batched & bit == 0);
        if let (Some(bit), Some(device)) = (bit, self.machine.devices.get(index)) {
            lock(device).begin_batch();
            *batched |= bit;
        }
    }

    /// Ends the batches of all devices whose bits are set in `batched`, and clears the bits.
    fn end_batches(&mut self, batched: &mut u64) {
        while *batched != 0 {
            let index = usize::try_from(batched.trailing_zeros()).unwrap_or(usize::MAX);
            // Clear the lowest bit, which is the bit of `index`.
            *batched &= *batched - 1;
            self.on_device(index, |device| lock(device).end_batch());
        }
    }
}
