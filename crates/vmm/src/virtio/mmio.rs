//! Virtio-mmio transport (virtio 1.2 section 4.2, version 2 only): the register page through which
//! a guest's driver sets up a device ([`VirtioDevice`]) and its queues.

mod state;

pub use state::TransportState;

use super::device::{Activation, DeviceError, Interrupt, RingState, VirtioDevice};
use crate::GuestMemory;
use crate::poll::SlotPoller;
use nix::sys::epoll::EpollFlags;
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK,
    VIRTIO_CONFIG_S_FAILED, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
    VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{Queue, QueueT};
use vmm_sys_util::eventfd::EventFd;

// "virt", as in all virtio-mmio devices.
const MAGIC_VALUE: u32 = 0x7472_6976;
const MMIO_VERSION: u32 = 2;
/// "JIFF": informs Jiffy's guest kernel that a queue interrupt needs neither a read of the status
/// register nor an acknowledgement. Each of these accesses would be an exit from the guest to the
/// VMM.
const VENDOR_QUIET: u32 = 0x4646_494a;
/// Vendor of devices whose interrupts must be acknowledged.
const VENDOR_PLAIN: u32 = 0;

/// Offset of the register to which the guest writes a queue's number to kick the queue. The
/// ioeventfds of all queues are registered at this offset.
pub const QUEUE_NOTIFY: u64 = 0x50;
/// Offset of the configuration space of the device.
const CONFIG_SPACE_OFFSET: u64 = 0x100;
/// Bits of the register InterruptStatus: a used buffer, and a changed configuration.
const INTERRUPT_BIT_QUEUE: u32 = 1;
const INTERRUPT_BIT_CONFIG: u32 = 2;
/// Bits of the register Status that a driver may set.
const STATUS_KNOWN_BITS: u32 = VIRTIO_CONFIG_S_ACKNOWLEDGE
    | VIRTIO_CONFIG_S_DRIVER
    | VIRTIO_CONFIG_S_DRIVER_OK
    | VIRTIO_CONFIG_S_FEATURES_OK
    | VIRTIO_CONFIG_S_FAILED;

/// Interrupt line of one device: status bits, configuration generation and an irqfd.
pub struct IrqLine {
    status: AtomicU32,
    generation: AtomicU32,
    fd: EventFd,
}

impl IrqLine {
    /// Creates a line that signals `fd`.
    pub fn new(fd: EventFd) -> Self {
        Self {
            status: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            fd,
        }
    }

    /// Interrupts the guest, and sets a bit of InterruptStatus.
    fn raise(&self, bit: u32) {
        // Set the bit before the interrupt: the guest reads the status in its interrupt handler.
        self.status.fetch_or(bit, Ordering::SeqCst);
        // Ignore the error: the counter is only full if an interrupt is pending already.
        let _ = self.fd.write(1);
    }
}

impl Interrupt for IrqLine {
    fn queue(&self) {
        self.raise(INTERRUPT_BIT_QUEUE);
    }

    fn config(&self) {
        // The guest reads the generation before and after it reads the configuration, to detect a
        // change between the two reads.
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.raise(INTERRUPT_BIT_CONFIG);
    }
}

/// Queue addresses and size, as set by the driver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct QueueSetup {
    size: u16,
    /// Register `QueueReady`.
    ready: bool,
    descriptors: u64,
    available: u64,
    used: u64,
}

/// Device with its register page.
pub struct MmioDevice {
    device: Box<dyn VirtioDevice>,
    memory: GuestMemory,
    irq: Arc<IrqLine>,
    poller: SlotPoller,
    status: u32,
    feature_page: u32,
    driver_feature_page: u32,
    driver_features: u64,
    queue_select: u32,
    queues: Vec<QueueSetup>,
    /// True after the driver has activated the device.
    active: bool,
    failure: Option<String>,
}

impl MmioDevice {
    /// Creates a device in the reset state.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemory,
        irq: Arc<IrqLine>,
        poller: SlotPoller,
    ) -> Self {
        let queues = vec![QueueSetup::default(); device.queue_sizes().len()];
        Self {
            device,
            memory,
            irq,
            poller,
            status: 0,
            feature_page: 0,
            driver_feature_page: 0,
            driver_features: 0,
            queue_select: 0,
            queues,
            active: false,
            failure: None,
        }
    }

    /// Returns the name of the device.
    pub fn name(&self) -> &str {
        self.device.name()
    }

    /// Returns the number of queues.
    pub fn queue_count(&self) -> usize {
        self.queues.len()
    }

    /// Returns whether a failure is not reported yet.
    pub fn has_failure(&self) -> bool {
        self.failure.is_some()
    }

    /// Returns and clears the reason of an unreported failure.
    pub fn take_failure(&mut self) -> Option<String> {
        self.failure.take()
    }

    /// Returns and clears a warning for the sandbox's owner, about files of the host.
    pub fn take_warning(&mut self) -> Option<String> {
        self.device.take_warning()
    }

    fn features(&self) -> u64 {
        self.device.features()
            | 1 << VIRTIO_F_VERSION_1
            | 1 << VIRTIO_RING_F_EVENT_IDX
            | 1 << VIRTIO_RING_F_INDIRECT_DESC
    }

    /// Handles a read of a register or the configuration space by the guest.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(offset) = offset.checked_sub(CONFIG_SPACE_OFFSET) {
            return self.device.read_config(offset, data);
        }
        // Registers have 32 bits (4.2.2.2). Other accesses read as zero.
        if data.len() == 4 {
            data.copy_from_slice(&self.register(offset).to_le_bytes());
        }
    }

    /// Returns the value of a register.
    fn register(&self, offset: u64) -> u32 {
        match offset {
            // Registers (virtio 1.2 section 4.2.2, table 4.1): MagicValue, Version, DeviceID,
            // VendorID, DeviceFeatures, QueueNumMax, QueueReady, InterruptStatus, Status and
            // ConfigGeneration.
            0x00 => MAGIC_VALUE,
            0x04 => MMIO_VERSION,
            0x08 => self.device.device_id(),
            0x0c if self.device.quiet_interrupts() => VENDOR_QUIET,
            0x0c => VENDOR_PLAIN,
            0x10 => u32_half(self.features(), self.feature_page),
            0x34 => self
                .selected_queue()
                .and_then(|at| self.device.queue_sizes().get(at))
                .map_or(0, |&size| u32::from(size)),
            0x44 => self
                .selected_queue()
                .map_or(0, |at| u32::from(self.queues[at].ready)),
            0x60 => self.irq.status.load(Ordering::SeqCst),
            0x70 => self.status,
            0xfc => self.irq.generation.load(Ordering::SeqCst),
            _ => 0,
        }
    }

    /// Returns the number of the queue that the driver has selected.
    fn selected_queue(&self) -> Option<usize> {
        usize::try_from(self.queue_select)
            .ok()
            .filter(|&at| at < self.queues.len())
    }

    /// Handles a write of a register or the configuration space by the guest.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some(offset) = offset.checked_sub(CONFIG_SPACE_OFFSET) {
            if self.status & VIRTIO_CONFIG_S_DRIVER != 0 {
                self.device.write_config(offset, data);
            }
            return;
        }
        // Accesses of another size are ignored.
        let Ok(bytes) = <[u8; 4]>::try_from(data) else {
            return;
        };
        let value = u32::from_le_bytes(bytes);
        match offset {
            // Registers: DeviceFeaturesSel, DriverFeatures, DriverFeaturesSel, QueueSel,
            // InterruptACK and Status.
            0x14 => self.feature_page = value,
            0x20 => self.set_driver_features(value),
            0x24 => self.driver_feature_page = value,
            0x30 => self.queue_select = value,
            0x64 => {
                self.irq.status.fetch_and(!value, Ordering::SeqCst);
            }
            0x70 => self.set_status(value),
            _ => self.set_up_queue(offset, value),
        }
    }

    /// Handles a write of the half of the features that the driver has selected.
    fn set_driver_features(&mut self, value: u32) {
        // Negotiated features must not change.
        if self.status & VIRTIO_CONFIG_S_FEATURES_OK != 0 {
            return;
        }
        match self.driver_feature_page {
            0 => set_low(&mut self.driver_features, value),
            1 => set_high(&mut self.driver_features, value),
            _ => {}
        }
    }

    /// Handles a write of a register of the selected queue.
    fn set_up_queue(&mut self, offset: u64, value: u32) {
        let Some(at) = self.selected_queue() else {
            return;
        };
        // The device already uses the queues. Only a reset can change them.
        if self.active {
            return;
        }
        let queue = &mut self.queues[at];
        match offset {
            // Registers: QueueNum, QueueReady, and the low and high halves of QueueDesc,
            // QueueDriver and QueueDevice.
            // `build_queue` rejects a size of 0.
            0x38 => queue.size = u16::try_from(value).unwrap_or(0),
            0x44 => queue.ready = value == 1,
            0x80 => set_low(&mut queue.descriptors, value),
            0x84 => set_high(&mut queue.descriptors, value),
            0x90 => set_low(&mut queue.available, value),
            0x94 => set_high(&mut queue.available, value),
            0xa0 => set_low(&mut queue.used, value),
            0xa4 => set_high(&mut queue.used, value),
            _ => {}
        }
    }

    /// Handles a write of the device status. 0 resets the device.
    fn set_status(&mut self, value: u32) {
        if value == 0 {
            return self.reset();
        }
        let needs_reset = self.status & VIRTIO_CONFIG_S_NEEDS_RESET;
        // Bits can only be added between resets. Features that the device did not offer are not
        // accepted.
        let mut status = (self.status | value) & STATUS_KNOWN_BITS;
        if self.driver_features & !self.features() != 0 {
            status &= !VIRTIO_CONFIG_S_FEATURES_OK;
        }
        self.status = status | needs_reset;
        // Start the device only once, when features and driver are accepted.
        let required = VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK;
        if !self.active && self.status & required == required && needs_reset == 0 {
            self.active = true;
            if let Err(e) = self.activate(&[]) {
                self.fail(&e);
            }
        }
    }

    /// Passes the queues to the device, which continues from `rings`, or starts anew if `rings` is
    /// empty.
    fn activate(&mut self, rings: &[RingState]) -> Result<(), DeviceError> {
        let mut queues = Vec::with_capacity(self.queues.len());
        for (setup, &max) in self.queues.iter().zip(self.device.queue_sizes()) {
            queues.push(build_queue(
                *setup,
                max,
                self.driver_features,
                &self.memory,
            )?);
        }
        for (queue, ring) in queues.iter_mut().zip(rings) {
            ring.apply(queue);
        }
        self.device.activate(Activation {
            memory: self.memory.clone(),
            queues,
            interrupt: self.irq.clone(),
            features: self.driver_features,
            poller: self.poller.clone(),
        })
    }

    /// Handles a reset by the driver, which writes 0 to the status register.
    fn reset(&mut self) {
        // The configuration generation is retained, and so is a failure that the VMM has not
        // reported yet.
        self.device.reset();
        self.status = 0;
        self.feature_page = 0;
        self.driver_feature_page = 0;
        self.driver_features = 0;
        self.queue_select = 0;
        self.queues.fill(QueueSetup::default());
        self.active = false;
        self.irq.status.store(0, Ordering::SeqCst);
    }

    /// Marks the device as failed, and notifies the driver.
    fn fail(&mut self, error: &DeviceError) {
        self.status |= VIRTIO_CONFIG_S_NEEDS_RESET;
        self.failure = Some(error.to_string());
        self.irq.config();
    }

    /// Lets the device work if the driver has activated it. A failure sets the status bit
    /// NEEDS_RESET.
    fn serve(&mut self, work: impl FnOnce(&mut dyn VirtioDevice) -> Result<(), DeviceError>) {
        // An inactive device has no queues. A failed device serves nothing until the guest resets
        // it.
        if !self.active || self.status & VIRTIO_CONFIG_S_NEEDS_RESET != 0 {
            return;
        }
        if let Err(e) = work(self.device.as_mut()) {
            self.fail(&e);
        }
    }

    /// Handles a kick of a queue by the guest.
    pub fn queue_event(&mut self, index: usize) {
        self.serve(|device| device.queue_event(index));
    }

    /// Starts a batch of consecutive events.
    pub fn begin_batch(&mut self) {
        self.device.begin_batch();
    }

    /// Ends a batch of events.
    pub fn end_batch(&mut self) {
        self.serve(VirtioDevice::end_batch);
    }

    /// Runs `work` on the device if it is a `T`, is active and has not failed.
    pub fn update<T: VirtioDevice>(
        &mut self,
        work: impl FnOnce(&mut T) -> Result<(), DeviceError>,
    ) {
        // A device of another type is not affected.
        self.serve(|device| {
            let any: &mut dyn Any = device;
            any.downcast_mut().map_or(Ok(()), work)
        });
    }

    /// Runs `work` on the device if it is a `T`, active or not.
    pub fn device_ref<T: VirtioDevice, R>(&self, work: impl FnOnce(&T) -> R) -> Option<R> {
        let any: &dyn Any = self.device.as_ref();
        any.downcast_ref().map(work)
    }

    /// Changes the device if it is a `T`, active or not.
    pub fn device_mut<T: VirtioDevice, R>(
        &mut self,
        change: impl FnOnce(&mut T) -> R,
    ) -> Option<R> {
        let any: &mut dyn Any = self.device.as_mut();
        any.downcast_mut().map(change)
    }

    /// Handles a ready descriptor of the device.
    pub fn host_event(&mut self, token: u32, flags: EpollFlags) {
        self.serve(|device| device.host_event(token, flags));
    }
}

/// Builds a queue from the addresses and the size that the driver wrote to the registers, and
/// checks them.
fn build_queue(
    setup: QueueSetup,
    max: u16,
    features: u64,
    memory: &GuestMemory,
) -> Result<Queue, DeviceError> {
    let mut queue = Queue::new(max).map_err(|e| DeviceError::Host(e.to_string()))?;
    queue.set_event_idx(features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0);
    // A queue that the driver did not set up remains unused.
    if !setup.ready {
        return Ok(queue);
    }
    let halves = |v: u64| (Some(u32_half(v, 0)), Some(u32_half(v, 1)));
    queue.set_size(setup.size);
    let (low, high) = halves(setup.descriptors);
    queue.set_desc_table_address(low, high);
    let (low, high) = halves(setup.available);
    queue.set_avail_ring_address(low, high);
    let (low, high) = halves(setup.used);
    queue.set_used_ring_address(low, high);
    queue.set_ready(true);
    // `set_size` ignores an invalid size.
    if queue.size() != setup.size || !queue.is_valid(memory) {
        return Err(DeviceError::Guest(format!(
            "queue of size {} at {:#x}/{:#x}/{:#x} is not a valid virtqueue",
            setup.size, setup.descriptors, setup.available, setup.used
        )));
    }
    Ok(queue)
}

/// Returns the lower (`page` 0) or upper (1) half of `value`, and 0 for other pages.
fn u32_half(value: u64, page: u32) -> u32 {
    let b = value.to_le_bytes();
    match page {
        0 => u32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        1 => u32::from_le_bytes([b[4], b[5], b[6], b[7]]),
        _ => 0,
    }
}

/// Replaces the low half of `value`.
fn set_low(value: &mut u64, low: u32) {
    *value = (*value & !u64::from(u32::MAX)) | u64::from(low);
}

/// Replaces the high half of `value`.
fn set_high(value: &mut u64, high: u32) {
    *value = (*value & u64::from(u32::MAX)) | u64::from(high) << 32;
}

#[cfg(test)]
mod tests;
