//! Saved state of a transport and its device, and recovery of notifications that were in flight
//! when the machine was saved.
//!
//! A notification is an interrupt from the device, or a kick from the driver. A notification in
//! flight is not a part of the saved state, so it is repeated after a restore.

use super::{MmioDevice, QueueSetup};
use crate::virtio::device::RingState;
use crate::virtio::{DeviceError, Interrupt};
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;
use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_NEEDS_RESET;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::{Address, Bytes, GuestAddress};

/// Layout of rings in bytes (virtio 1.2 sections 2.7.6 and 2.7.8): sizes of the header and of an
/// entry, and offset of the available index. After the last entry, the writer of a ring stores its
/// event index: the position in the other ring at which it requests a notification.
const AVAIL_HEADER_BYTES: u64 = 4;
const AVAIL_BYTES: u64 = 2;
const AVAIL_INDEX: u64 = 2;
const USED_HEADER_BYTES: u64 = 4;
const USED_BYTES: u64 = 8;

/// State of one device, including registers and rings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportState {
    name: String,
    status: u32,
    feature_page: u32,
    driver_feature_page: u32,
    driver_features: u64,
    queue_select: u32,
    queues: Vec<QueueSetup>,
    /// True if the driver had activated the device.
    active: bool,
    irq_status: u32,
    irq_generation: u32,
    rings: Vec<RingState>,
    device: Vec<u8>,
}

crate::frozen_layout!(TransportState, 136);
crate::frozen_layout!(QueueSetup, 32);
crate::frozen_layout!(RingState, 4);

impl TransportState {
    /// Returns the name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl MmioDevice {
    /// Returns the state. No vCPU may be running.
    pub fn save(&self) -> TransportState {
        TransportState {
            name: self.name().to_owned(),
            status: self.status,
            feature_page: self.feature_page,
            driver_feature_page: self.driver_feature_page,
            driver_features: self.driver_features,
            queue_select: self.queue_select,
            queues: self.queues.clone(),
            active: self.active,
            irq_status: self.irq.status.load(Ordering::SeqCst),
            irq_generation: self.irq.generation.load(Ordering::SeqCst),
            rings: self.device.rings(),
            device: self.device.save(),
        }
    }

    /// Sets the state of a new device. Memory must already be restored.
    pub fn restore(&mut self, state: &TransportState) -> Result<(), DeviceError> {
        let reject = |what: &str| {
            Err(DeviceError::Host(format!(
                "saved device {:?} does not fit {:?}: {what}",
                state.name,
                self.device.name()
            )))
        };
        if state.name != self.device.name() {
            return reject("it has another name");
        }
        if state.driver_features & !self.features() != 0 {
            return reject("its guest uses features that are not offered here");
        }
        // A device that failed has no queues until the guest resets it.
        let in_service = state.active && state.status & VIRTIO_CONFIG_S_NEEDS_RESET == 0;
        if state.queues.len() != self.queues.len()
            || (in_service && state.rings.len() != state.queues.len())
        {
            return reject("it has another number of queues");
        }
        // Restore the device before it receives its queues.
        self.device.restore(&state.device)?;
        self.status = state.status;
        self.feature_page = state.feature_page;
        self.driver_feature_page = state.driver_feature_page;
        self.driver_features = state.driver_features;
        self.queue_select = state.queue_select;
        self.queues.clone_from(&state.queues);
        self.active = state.active;
        self.irq.status.store(state.irq_status, Ordering::SeqCst);
        self.irq
            .generation
            .store(state.irq_generation, Ordering::SeqCst);
        if in_service {
            self.activate(&state.rings)?;
            self.device.restored()?;
        }
        Ok(())
    }

    /// Reverts a device in use to a state. The device is reset first. Memory must already be
    /// reverted.
    pub fn revert(&mut self, state: &TransportState) -> Result<(), DeviceError> {
        self.reset();
        self.failure = None;
        self.restore(state)
    }

    /// Interrupts once if a driver is active and may not have received a notification, because the
    /// interrupt may have been in flight when the machine stopped. The notification may concern
    /// returned buffers or a changed configuration. An unnecessary interrupt is harmless, and costs
    /// the guest some exits.
    pub fn interrupt_if_needed(&self) {
        if self.active && self.needs_interrupt() {
            self.irq.queue();
        }
    }

    /// True if an interrupt was pending, or if a queue has buffers whose return the driver may not
    /// know.
    fn needs_interrupt(&self) -> bool {
        // Drivers of devices with quiet interrupts neither read nor acknowledge the status, so a
        // set status does not mean that an interrupt is pending
        // ([`VirtioDevice::quiet_interrupts`]).
        let pending = self.irq.status.load(Ordering::SeqCst) != 0;
        let rings = self.device.rings();
        let mut queues = self.queues.iter().zip(&rings);
        (pending && !self.device.quiet_interrupts())
            || rings.len() != self.queues.len()
            || queues.any(|(queue, ring)| queue.ready && !self.driver_waits(queue, *ring))
    }

    /// Returns whether the driver waits for a buffer that the device has not returned yet: its
    /// event index is not behind the next buffer to return. If it is behind, the driver polls, is
    /// handling an interrupt, or has not received the interrupt for a returned buffer.
    fn driver_waits(&self, queue: &QueueSetup, ring: RingState) -> bool {
        // `used_event`: the driver requests an interrupt when the device uses the buffer with this
        // index.
        let event_index = AVAIL_HEADER_BYTES + AVAIL_BYTES * u64::from(queue.size);
        let event_index = self.ring_word(queue.available, event_index);
        let distance = event_index.map(|event_index| event_index.wrapping_sub(ring.next_used));
        self.has_event_index() && distance.is_some_and(|distance| distance < queue.size)
    }

    /// Returns whether queue `index` must be checked because a kick may have been in flight when
    /// the machine stopped. Then the driver may have made a buffer available unnoticed, or would
    /// not kick for the next buffer.
    pub fn needs_check(&self, index: usize) -> bool {
        let rings = self.device.rings();
        // The progress of the device is unknown, for example after a failure.
        let (Some(queue), Some(ring)) = (self.queues.get(index), rings.get(index)) else {
            return self.active;
        };
        let next = Some(ring.next_available);
        // `avail_event`: the device requests a kick when the driver adds the buffer with this
        // index.
        let event_index = USED_HEADER_BYTES + USED_BYTES * u64::from(queue.size);
        let is_known = self.has_event_index()
            && self.ring_word(queue.available, AVAIL_INDEX) == next
            && self.ring_word(queue.used, event_index) == next;
        queue.ready && !is_known
    }

    /// Returns whether the driver has negotiated `VIRTIO_F_EVENT_IDX`.
    fn has_event_index(&self) -> bool {
        self.driver_features & 1 << VIRTIO_RING_F_EVENT_IDX != 0
    }

    /// Reads a word of a ring. The address comes from the driver.
    fn ring_word(&self, ring: u64, offset: u64) -> Option<u16> {
        let address = GuestAddress(ring).checked_add(offset)?;
        let word = self.memory.load(address, Ordering::SeqCst).ok()?;
        Some(u16::from_le(word))
    }

    /// Serves every queue and interrupts once if necessary, in case a kick or an interrupt was in
    /// flight when the machine stopped.
    pub fn kick_queues(&mut self) {
        for queue in 0..self.queue_count() {
            self.queue_event(queue);
        }
        self.interrupt_if_needed();
    }
}
