//! State of a transport and its device as a value.

use super::{MmioDevice, QueueSetup};
use crate::virtio::device::RingState;
use crate::virtio::{DeviceError, Interrupt};
use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;
use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_NEEDS_RESET;

/// State of one device, registers and rings included.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportState {
    name: String,
    status: u32,
    feature_page: u32,
    driver_feature_page: u32,
    driver_features: u64,
    queue_select: u32,
    queues: Vec<QueueSetup>,
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
    /// Name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl MmioDevice {
    /// Reads the state; no vCPU may be running.
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

    /// Sets the state of a fresh device. Memory must be restored already.
    pub fn restore(&mut self, state: &TransportState) -> Result<(), DeviceError> {
        let refuse = |what: &str| {
            Err(DeviceError::Host(format!(
                "saved device {:?} does not fit {:?}: {what}",
                state.name,
                self.device.name()
            )))
        };
        if state.name != self.device.name() {
            return refuse("it is another one");
        }
        if state.driver_features & !self.features() != 0 {
            return refuse("its guest uses features that are not offered here");
        }
        let in_service = state.active && state.status & VIRTIO_CONFIG_S_NEEDS_RESET == 0;
        if state.queues.len() != self.queues.len()
            || (in_service && state.rings.len() != state.queues.len())
        {
            return refuse("it has another number of queues");
        }
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

    /// Puts a device in use back to a state: its driver is forgotten first. Memory must be put back
    /// already.
    pub fn revert(&mut self, state: &TransportState) -> Result<(), DeviceError> {
        self.reset();
        self.failure = None;
        self.restore(state)
    }

    /// Interrupts once, if a driver is active.
    pub fn interrupt(&self) {
        if self.active {
            self.irq.queue();
        }
    }

    /// Serves every queue and interrupts once, in case a kick or an interrupt was in flight when
    /// the machine stopped. Both are harmless when there is nothing to do.
    pub fn kick_queues(&mut self) {
        for queue in 0..self.queue_count() {
            self.queue_event(queue);
        }
        self.interrupt();
    }
}
