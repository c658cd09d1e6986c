//! Tests of the MMIO transport: notifications and the state of the queues.

use super::*;
use crate::poll::Poller;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EFD_NONBLOCK;

// Offsets of registers (virtio 1.2 section 4.2.2, table 4.1).
const MAGIC: u64 = 0;
const VENDOR_ID: u64 = 0x0c;
const DRIVER_FEATURES: u64 = 0x20;
const DRIVER_FEATURES_SELECT: u64 = 0x24;
const QUEUE_SELECT: u64 = 0x30;
const QUEUE_SIZE: u64 = 0x38;
const QUEUE_READY: u64 = 0x44;
const STATUS: u64 = 0x70;
/// Lower halves of the addresses of the descriptors and of the available and used ring.
const QUEUE_DESCRIPTORS: u64 = 0x80;
const QUEUE_DRIVER: u64 = 0x90;
const QUEUE_DEVICE: u64 = 0xa0;

/// Status of a device at the steps of its start.
const STARTED: u32 = VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER;
const NEGOTIATED: u32 = STARTED | VIRTIO_CONFIG_S_FEATURES_OK;
const ACTIVE: u32 = NEGOTIATED | VIRTIO_CONFIG_S_DRIVER_OK;

#[derive(Default)]
struct TestDevice {
    active: bool,
    fail: bool,
    ring: RingState,
}

impl VirtioDevice for TestDevice {
    fn device_id(&self) -> u32 {
        4
    }
    fn name(&self) -> &str {
        "dummy"
    }
    fn features(&self) -> u64 {
        1 << 40
    }
    fn queue_sizes(&self) -> &[u16] {
        &[16]
    }
    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0xab);
    }
    fn activate(&mut self, _activation: Activation) -> Result<(), DeviceError> {
        self.active = true;
        Ok(())
    }
    fn rings(&self) -> Vec<RingState> {
        vec![self.ring; usize::from(self.active)]
    }
    fn reset(&mut self) {
        self.active = false;
    }
    fn queue_event(&mut self, _index: usize) -> Result<(), DeviceError> {
        if self.fail {
            return Err(DeviceError::Guest("broken ring".into()));
        }
        Ok(())
    }
}

/// Returns the transport of a device.
fn transport(device: TestDevice) -> MmioDevice {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
    let irq = Arc::new(IrqLine::new(EventFd::new(EFD_NONBLOCK).unwrap()));
    MmioDevice::new(
        Box::new(device),
        memory,
        irq,
        Poller::new().unwrap().slot(0),
    )
}

/// Reads a register.
fn get(device: &MmioDevice, offset: u64) -> u32 {
    let mut data = [0; 4];
    device.read(offset, &mut data);
    u32::from_le_bytes(data)
}

/// Writes a register.
fn set(device: &mut MmioDevice, offset: u64, value: u32) {
    device.write(offset, &value.to_le_bytes());
}

/// Starts the device like a driver. Queue 0 has 16 entries, and its used ring is at `used`.
fn bring_up(device: &mut MmioDevice, used: u32) {
    bring_up_with(device, used, 0);
}

/// Same as [`bring_up`] with these features of the lower half. Of the upper half, it accepts
/// `VIRTIO_F_VERSION_1`.
fn bring_up_with(device: &mut MmioDevice, used: u32, features: u32) {
    set(device, STATUS, VIRTIO_CONFIG_S_ACKNOWLEDGE);
    set(device, STATUS, STARTED);
    set(device, DRIVER_FEATURES, features);
    set(device, DRIVER_FEATURES_SELECT, 1);
    set(device, DRIVER_FEATURES, 1);
    set(device, STATUS, NEGOTIATED);
    set(device, QUEUE_SIZE, 16);
    set(device, QUEUE_DESCRIPTORS, 0x1000);
    set(device, QUEUE_DRIVER, 0x2000);
    set(device, QUEUE_DEVICE, used);
    set(device, QUEUE_READY, 1);
    set(device, STATUS, ACTIVE);
}

#[test]
fn a_well_behaved_driver_activates_and_resets_the_device() {
    let mut device = transport(TestDevice::default());
    assert_eq!(get(&device, MAGIC), MAGIC_VALUE);
    assert_eq!(get(&device, VENDOR_ID), VENDOR_QUIET);
    bring_up(&mut device, 0x3000);
    assert_eq!(get(&device, STATUS), ACTIVE);
    device.queue_event(0);
    assert_eq!(device.take_failure(), None);
    set(&mut device, STATUS, 0);
    assert_eq!(get(&device, STATUS), 0);
    assert_eq!(get(&device, QUEUE_READY), 0);
}

#[test]
fn features_that_were_not_offered_are_not_accepted() {
    let mut device = transport(TestDevice::default());
    set(&mut device, STATUS, STARTED);
    set(&mut device, DRIVER_FEATURES, u32::MAX);
    set(&mut device, STATUS, NEGOTIATED);
    assert_eq!(get(&device, STATUS) & VIRTIO_CONFIG_S_FEATURES_OK, 0);
}

#[test]
fn a_ring_outside_memory_fails_the_device_and_not_the_process() {
    let mut device = transport(TestDevice::default());
    bring_up(&mut device, 0xffff_f000);
    assert_ne!(get(&device, STATUS) & VIRTIO_CONFIG_S_NEEDS_RESET, 0);
    assert!(
        device
            .take_failure()
            .unwrap()
            .contains("not a valid virtqueue")
    );
}

#[test]
fn a_failed_device_serves_nothing_until_it_is_reset() {
    let mut device = transport(TestDevice {
        fail: true,
        ..TestDevice::default()
    });
    bring_up(&mut device, 0x3000);
    device.queue_event(0);
    assert!(device.take_failure().unwrap().contains("broken ring"));
    device.queue_event(0);
    assert_eq!(device.take_failure(), None);
    set(&mut device, STATUS, 0);
    bring_up(&mut device, 0x3000);
    assert_eq!(get(&device, STATUS), ACTIVE);
}

#[test]
fn every_register_tolerates_every_access() {
    let mut device = transport(TestDevice::default());
    for offset in (0..0x200).chain([u64::MAX >> 12]) {
        for length in [1, 2, 4, 8] {
            let mut data = [0xff; 8];
            device.write(offset, &data[..length]);
            device.read(offset, &mut data[..length]);
        }
        for queue in [0, 1, u32::MAX] {
            set(&mut device, QUEUE_SELECT, queue);
            set(&mut device, offset, u32::MAX);
        }
    }
}

const EVENT_IDX: u32 = 1 << VIRTIO_RING_F_EVENT_IDX;
/// Addresses in the rings of [`bring_up`]: the index of the available ring, the driver's event
/// index after its 16 entries, and the device's event index in the used ring.
const AVAIL_INDEX: u64 = 0x2002;
const USED_EVENT: u64 = 0x2000 + 4 + 2 * 16;
const AVAIL_EVENT: u64 = 0x3000 + 4 + 8 * 16;

/// Returns a device that has taken and returned `next` buffers, and whose driver has set `words`.
fn with_rings(features: u32, next: u16, words: &[(u64, u16)]) -> MmioDevice {
    let mut device = transport(TestDevice {
        ring: RingState {
            next_available: next,
            next_used: next,
        },
        ..TestDevice::default()
    });
    bring_up_with(&mut device, 0x3000, features);
    assert_eq!(get(&device, STATUS), ACTIVE);
    for &(address, word) in words {
        let place = GuestAddress(address);
        device.memory.write_obj(word.to_le(), place).unwrap();
    }
    device
}

#[test]
fn a_driver_is_interrupted_unless_it_waits_for_an_unused_buffer() {
    let interrupted = |device: MmioDevice| {
        device.interrupt_if_needed();
        device.irq.fd.read().is_ok()
    };
    assert!(!interrupted(with_rings(EVENT_IDX, 7, &[(USED_EVENT, 7)])));
    assert!(interrupted(with_rings(EVENT_IDX, 7, &[(USED_EVENT, 6)])));
    // The driver requests a notification only after some more buffers.
    assert!(!interrupted(with_rings(EVENT_IDX, 7, &[(USED_EVENT, 9)])));
    // The distance to the event index must be less than the size of the queue, 16.
    assert!(interrupted(with_rings(EVENT_IDX, 7, &[(USED_EVENT, 23)])));
    // Without event indexes, the state of the driver is unknown.
    assert!(interrupted(with_rings(0, 7, &[(USED_EVENT, 7)])));
    let idle = transport(TestDevice::default());
    assert!(!interrupted(idle));
}

#[test]
fn a_queue_is_checked_unless_its_driver_will_kick_for_the_next_buffer() {
    let needs_check =
        |features, next, words: &[_]| with_rings(features, next, words).needs_check(0);
    let seen = [(AVAIL_INDEX, 7), (AVAIL_EVENT, 7)];
    assert!(!needs_check(EVENT_IDX, 7, &seen));
    assert!(needs_check(EVENT_IDX, 6, &seen));
    // The device is idle, and has disabled kicks.
    assert!(needs_check(
        EVENT_IDX,
        7,
        &[(AVAIL_INDEX, 7), (AVAIL_EVENT, 6)]
    ));
    assert!(needs_check(0, 7, &seen));
    assert!(!transport(TestDevice::default()).needs_check(0));
}
