//! The contract between the virtio-mmio transport and a device.

pub mod chain;

use crate::GuestMemory;
use crate::poll::SlotPoller;
use nix::sys::epoll::EpollFlags;
use std::any::Any;
use virtio_queue::{Queue, QueueT};

/// How far a device got in a queue; where the queue lies is the transport's to know.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RingState {
    /// Next entry of the available ring.
    pub next_available: u16,
    /// Next entry of the used ring.
    pub next_used: u16,
}

impl RingState {
    /// Of a queue in use.
    pub fn of(queue: &Queue) -> Self {
        Self {
            next_available: queue.next_avail(),
            next_used: queue.next_used(),
        }
    }

    /// Makes a queue go on from here.
    pub fn apply(self, queue: &mut Queue) {
        queue.set_next_avail(self.next_available);
        queue.set_next_used(self.next_used);
    }
}

/// How a device failed. The device is then marked `DEVICE_NEEDS_RESET` and serves no queue until the guest resets it.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The guest broke the virtio contract (virtio 1.2, the section named in the text where one applies).
    #[error("guest broke the contract: {0}")]
    Guest(String),
    /// Something on the host refused.
    #[error("host: {0}")]
    Host(String),
}

/// Tells the guest that something happened.
pub trait Interrupt: Send + Sync {
    /// Used buffers wait in a queue.
    fn queue(&self);
    /// The configuration space changed.
    fn config(&self);
}

/// Everything a device gets when the driver sets `DRIVER_OK`.
pub struct Activation {
    /// Guest memory; cheap to clone.
    pub memory: GuestMemory,
    /// Queues in device order, addresses already set by the driver but still hostile; event-idx already set on each.
    pub queues: Vec<Queue>,
    /// Way to the guest.
    pub interrupt: std::sync::Arc<dyn Interrupt>,
    /// Feature bits the driver accepted, a subset of [`VirtioDevice::features`].
    pub features: u64,
    /// Where the device registers host descriptors (tap, streams).
    pub poller: SlotPoller,
}

/// One virtio device. All calls come with the device's lock held, from a vCPU thread (configuration) or the event
/// loop (everything else); none may block for long.
pub trait VirtioDevice: Any + Send {
    /// Device id (virtio 1.2 section 5).
    fn device_id(&self) -> u32;
    /// Name in logs and failures: `blk0`, `vsock`, `net`, `rng`, `balloon`.
    fn name(&self) -> &str;
    /// Device feature bits, without the transport's own (VERSION_1, EVENT_IDX and INDIRECT_DESC are added by it).
    fn features(&self) -> u64;
    /// Largest size of each queue, a power of two.
    fn queue_sizes(&self) -> &[u16];
    /// Whether queue interrupts may do without the status register (no configuration changes to report).
    fn quiet_interrupts(&self) -> bool {
        true
    }
    /// Reads from the configuration space; bytes beyond its end stay zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);
    /// Writes to the configuration space; writes to read-only fields are ignored.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}
    /// The driver is ready. Called at most once between resets.
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError>;
    /// How far it got in each queue, in device order; empty while no driver is there.
    fn rings(&self) -> Vec<RingState>;
    /// What else a restored device must know. Empty for most.
    fn save(&self) -> Vec<u8> {
        Vec::new()
    }
    /// Takes what `save` gave; called before `activate`.
    fn restore(&mut self, _saved: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Everything is restored; the guest has not run yet. What cannot go on (connections) is ended here.
    fn restored(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Takes what the sandbox's owner is to be told of the host beneath the device. The device goes on.
    fn take_warning(&mut self) -> Option<String> {
        None
    }
    /// Forgets the driver: queues, memory, registered descriptors. Host resources given at creation stay.
    fn reset(&mut self);
    /// The guest kicked queue `index` (below the number of queues). Does a bounded amount of work.
    fn queue_event(&mut self, index: usize) -> Result<(), DeviceError>;
    /// A descriptor that the device registered is ready.
    fn host_event(&mut self, _token: u32, _flags: EpollFlags) -> Result<(), DeviceError> {
        Ok(())
    }
}
