//! [`VirtioDevice`]: the contract between the virtio-mmio transport and a device.
//!
//! The driver in the guest adds *chains* of buffers to the *available ring* of a queue, and *kicks*
//! the queue to notify the device. The device returns chains in the *used ring*, and interrupts the
//! guest. With *event-idx* (`VIRTIO_F_EVENT_IDX`), each side states the ring index at which the
//! other side must notify it.

pub mod chain;

use crate::GuestMemory;
use crate::poll::SlotPoller;
use nix::sys::epoll::EpollFlags;
use std::any::Any;
use virtio_queue::{Queue, QueueT};

/// Progress of a device in a queue. The transport stores the queue's addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RingState {
    /// Index of the next entry of the available ring.
    pub next_available: u16,
    /// Index of the next entry of the used ring.
    pub next_used: u16,
}

impl RingState {
    /// Returns the progress of a queue in use.
    pub fn of(queue: &Queue) -> Self {
        Self {
            next_available: queue.next_avail(),
            next_used: queue.next_used(),
        }
    }

    /// Sets the progress of a queue.
    pub fn apply(self, queue: &mut Queue) {
        queue.set_next_avail(self.next_available);
        queue.set_next_used(self.next_used);
    }
}

/// Error of a device. The device is then marked `DEVICE_NEEDS_RESET` and serves no queue until the
/// guest resets it.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The guest violated the virtio contract (virtio 1.2; the text names the section if one
    /// applies).
    #[error("guest broke the contract: {0}")]
    Guest(String),
    /// An operation of the host failed.
    #[error("host: {0}")]
    Host(String),
}

/// Interrupt line to the guest.
pub trait Interrupt: Send + Sync {
    /// Signals used buffers in a queue.
    fn queue(&self);
    /// Signals a change of the configuration space.
    fn config(&self);
}

/// Resources that a device receives when the driver sets `DRIVER_OK`, or when the state of an
/// active device is restored.
pub struct Activation {
    /// Guest memory; cheap to clone.
    pub memory: GuestMemory,
    /// Queues in device order. The addresses come from the driver and are not trusted. event-idx is
    /// enabled on each queue if the driver negotiated it.
    pub queues: Vec<Queue>,
    /// Interrupt line.
    pub interrupt: std::sync::Arc<dyn Interrupt>,
    /// Feature bits that the driver accepted, a subset of [`VirtioDevice::features`] and the
    /// transport's own bits.
    pub features: u64,
    /// Event loop for host descriptors of the device (tap, streams).
    pub poller: SlotPoller,
}

/// Virtio device. The caller holds the device's lock during all calls. Accesses to the
/// configuration are made on a vCPU thread, and all other calls in an event loop. No call may block
/// for long.
pub trait VirtioDevice: Any + Send {
    /// Returns the device id (virtio 1.2 section 5).
    fn device_id(&self) -> u32;
    /// Returns the name for logs and errors: `blk0`, `vsock`, `net`, `rng`, `balloon`.
    fn name(&self) -> &str;
    /// Returns the device's feature bits. The transport adds its own (VERSION_1, EVENT_IDX and
    /// INDIRECT_DESC).
    fn features(&self) -> u64;
    /// Returns the maximum size of each queue, a power of two.
    fn queue_sizes(&self) -> &[u16];
    /// Returns whether the interrupts of the device are quiet: the driver neither reads nor
    /// acknowledges InterruptStatus. True for devices that never report a changed configuration,
    /// since each interrupt then concerns a queue.
    fn quiet_interrupts(&self) -> bool {
        true
    }
    /// Reads from the configuration space. Bytes of `data` beyond its end remain unchanged; the
    /// transport has zeroed them.
    fn read_config(&self, offset: u64, data: &mut [u8]);
    /// Writes to the configuration space. Writes to read-only fields are ignored.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}
    /// Called when the driver is ready or restored, at most once between resets.
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError>;
    /// Returns the progress in each queue, in device order. Empty while no driver is active.
    fn rings(&self) -> Vec<RingState>;
    /// Returns further state for a restored device. Empty for most devices.
    fn save(&self) -> Vec<u8> {
        Vec::new()
    }
    /// Restores the output of `save`. Called before `activate`.
    fn restore(&mut self, _saved: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Called when all state is restored, before the guest runs. Closes connections that cannot
    /// continue.
    fn restored(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Returns and clears a warning for the sandbox's owner, about files of the host. The device
    /// continues to work.
    fn take_warning(&mut self) -> Option<String> {
        None
    }
    /// Drops all state of the driver: queues, memory, registered descriptors. Host resources given
    /// at the creation of the device remain.
    fn reset(&mut self);
    /// Called when the guest kicked queue `index` (below the number of queues). Must do a bounded
    /// amount of work.
    fn queue_event(&mut self, index: usize) -> Result<(), DeviceError>;
    /// Called before several consecutive events. The device may defer its work to the end of the
    /// batch, to do it at once and interrupt the guest once.
    fn begin_batch(&mut self) {}
    /// Called when the last event of the batch was handled.
    fn end_batch(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Called when a descriptor that the device registered is ready.
    fn host_event(&mut self, _token: u32, _flags: EpollFlags) -> Result<(), DeviceError> {
        Ok(())
    }
}
