//! The contract between the virtio-mmio transport and a device.

pub mod chain;

use crate::GuestMemory;
use crate::poll::SlotPoller;
use nix::sys::epoll::EpollFlags;
use std::any::Any;
use virtio_queue::{Queue, QueueT};

/// Progress of a device in a queue; the transport stores the queue's addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RingState {
    /// Next entry of the available ring.
    pub next_available: u16,
    /// Next entry of the used ring.
    pub next_used: u16,
}

impl RingState {
    /// Reads the progress from a queue in use.
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

/// Failure of a device. The device is then marked `DEVICE_NEEDS_RESET` and serves no queue until
/// the guest resets it.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The guest broke the virtio contract (virtio 1.2, the section named in the text where one
    /// applies).
    #[error("guest broke the contract: {0}")]
    Guest(String),
    /// The host refused an operation.
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

/// Resources that a device gets when the driver sets `DRIVER_OK`.
pub struct Activation {
    /// Guest memory; cheap to clone.
    pub memory: GuestMemory,
    /// Queues in device order, with addresses from the driver that are not trusted; event-idx is
    /// set on each.
    pub queues: Vec<Queue>,
    /// Interrupt line.
    pub interrupt: std::sync::Arc<dyn Interrupt>,
    /// Feature bits the driver accepted, a subset of [`VirtioDevice::features`].
    pub features: u64,
    /// Event loop for host descriptors of the device (tap, streams).
    pub poller: SlotPoller,
}

/// Virtio device. All calls hold the device's lock, on a vCPU thread (configuration) or in an event
/// loop (everything else); none may block for long.
pub trait VirtioDevice: Any + Send {
    /// Device id (virtio 1.2 section 5).
    fn device_id(&self) -> u32;
    /// Name in logs and failures: `blk0`, `vsock`, `net`, `rng`, `balloon`.
    fn name(&self) -> &str;
    /// Device feature bits, without the transport's own (VERSION_1, EVENT_IDX and INDIRECT_DESC are
    /// added by it).
    fn features(&self) -> u64;
    /// Largest size of each queue, a power of two.
    fn queue_sizes(&self) -> &[u16];
    /// Returns true if queue interrupts need no status register (no configuration changes to
    /// report).
    fn quiet_interrupts(&self) -> bool {
        true
    }
    /// Reads from the configuration space; bytes beyond its end stay zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);
    /// Writes to the configuration space; writes to read-only fields are ignored.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}
    /// The driver is ready. Called at most once between resets.
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError>;
    /// Progress in each queue, in device order; empty while no driver is active.
    fn rings(&self) -> Vec<RingState>;
    /// Further state for a restored device. Empty for most.
    fn save(&self) -> Vec<u8> {
        Vec::new()
    }
    /// Restores the output of `save`; called before `activate`.
    fn restore(&mut self, _saved: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Called when everything is restored and before the guest runs. Ends what cannot continue
    /// (connections).
    fn restored(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Takes a warning to the sandbox's owner about the host's files below the device. The device
    /// continues.
    fn take_warning(&mut self) -> Option<String> {
        None
    }
    /// Forgets the driver: queues, memory, registered descriptors. Host resources given at creation
    /// stay.
    fn reset(&mut self);
    /// The guest kicked queue `index` (below the number of queues). Does a bounded amount of work.
    fn queue_event(&mut self, index: usize) -> Result<(), DeviceError>;
    /// Several events follow each other. The device may put its work off until the end of the
    /// batch, to do it in one go and interrupt the guest once.
    fn begin_batch(&mut self) {}
    /// The last event of the batch has been handled.
    fn end_batch(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
    /// A descriptor that the device registered is ready.
    fn host_event(&mut self, _token: u32, _flags: EpollFlags) -> Result<(), DeviceError> {
        Ok(())
    }
}
