//! Virtio devices of a machine: creation, interrupts, kicks and event loop slots. A *slot* is the
//! number with which a device registers its descriptors in the event loop ([`crate::poll`]).
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. The *index* of a layer lists the units that it stores: blocks of a disk, or
//! chunks of memory.

use super::bus::{Bus, SharedDevice};
use super::received_fds::ReceivedFds;
use crate::GuestMemory;
use crate::error::VmmError;
use crate::memory::{MMIO_START, MMIO_STRIDE};
use crate::poll::Poller;
use crate::snapshot::lazy_memory::LazyMemory;
use crate::virtio::VirtioDevice;
use crate::virtio::balloon::Balloon;
use crate::virtio::blk::{Block, DiskBackend, SharedDiskLimiter};
use crate::virtio::mmio::{IrqLine, MmioDevice, QUEUE_NOTIFY};
use crate::virtio::net::Net;
use crate::virtio::rng::Rng;
use crate::virtio::vsock::{GuestConnect, Vsock};
use jiffy_proto::layer::{DISK_BLOCK, IndexFileError, LayerIndex};
use jiffy_proto::snapshot::{LayerFiles, MAX_LAYERS};
use jiffy_proto::vm::{DiskConfig, DiskLimits, Event, FdIndex, NetConfig, VsockConfig};
use kvm_ioctls::{IoEventAddress, VmFd};
use nix::sys::epoll::EpollFlags;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// First interrupt pin of a virtio device. Lower pins belong to the PC.
const FIRST_VIRTIO_PIN: u32 = 5;
/// Number of event loop slots per device: one for its queues, one for its host descriptors.
pub const SLOT_STRIDE: u32 = 2;
/// First event loop slot of a device. Lower slots belong to the VMM itself.
const FIRST_SLOT: u32 = 16;
/// Maximum size of an index file in bytes, sufficient for a disk of 1 TiB: its 2^28 blocks need two
/// bitmaps of 32 MiB each, after a short header.
const MAX_INDEX_BYTES: u64 = 65 << 20;

/// Owner of an event loop slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventSlot {
    /// The VMM itself.
    Other(u32),
    /// A queue of this device was kicked by the guest. The event's token is the queue's number.
    Queue(usize),
    /// A host descriptor of this device is ready.
    Host(usize),
}

impl EventSlot {
    /// Decodes a slot number.
    pub fn decode(slot: u32) -> Self {
        match slot.checked_sub(FIRST_SLOT) {
            None => Self::Other(slot),
            Some(at) => {
                let device = usize::try_from(at / SLOT_STRIDE).unwrap_or(usize::MAX);
                if at % SLOT_STRIDE == 0 {
                    Self::Queue(device)
                } else {
                    Self::Host(device)
                }
            }
        }
    }
}

/// Devices of a machine.
pub(super) struct DeviceSet<'a> {
    pub disks: &'a [DiskConfig],
    pub disk_limits: DiskLimits,
    pub vsock: Option<&'a VsockConfig>,
    pub net: Option<&'a NetConfig>,
    pub rng: bool,
    pub balloon: bool,
    /// Lazily fetched guest memory. `None` if all memory is stored on this host.
    pub lazy: Option<Arc<LazyMemory>>,
}

/// Creates all devices of `config` in guest order.
pub(super) fn create_devices(
    config: &DeviceSet<'_>,
    fds: &mut ReceivedFds,
    guest_connect: Box<dyn GuestConnect>,
) -> Result<Vec<Box<dyn VirtioDevice>>, VmmError> {
    let mut devices: Vec<Box<dyn VirtioDevice>> = Vec::new();
    let limiter = SharedDiskLimiter::new(config.disk_limits);
    for (number, disk) in (0..).zip(config.disks) {
        devices.push(Box::new(create_block(number, disk, limiter.clone(), fds)?));
    }
    if let Some(vsock) = config.vsock {
        devices.push(Box::new(Vsock::new(vsock.clone(), guest_connect)));
    }
    if let Some(net) = config.net {
        let tap = File::from(fds.take(net.tap, "tap")?);
        let device =
            Net::new(tap, net.mac, net.mtu).map_err(|e| VmmError::host("tap device", e))?;
        devices.push(Box::new(device));
    }
    if config.rng {
        let device = Rng::new().map_err(|e| VmmError::host("rng device", e))?;
        devices.push(Box::new(device));
    }
    if config.balloon {
        let device = Balloon::new().map_err(|e| VmmError::host("balloon device", e))?;
        devices.push(Box::new(device.with_lazy_memory(config.lazy.clone())));
    }
    Ok(devices)
}

/// Creates the block device number `number` from the received descriptors.
fn create_block(
    number: u32,
    disk: &DiskConfig,
    limiter: Option<SharedDiskLimiter>,
    fds: &mut ReceivedFds,
) -> Result<Block, VmmError> {
    let backend = match disk {
        DiskConfig::ReadOnly { image } => {
            DiskBackend::ReadOnly(File::from(fds.take(*image, "disk image")?))
        }
        DiskConfig::Overlay { base, overlay } => DiskBackend::Overlay {
            base: File::from(fds.take(*base, "base disk")?),
            overlay: File::from(fds.take(*overlay, "overlay disk")?),
        },
        DiskConfig::Layered {
            base,
            layers,
            overlay,
        } => {
            let layers = take_disk_layers(layers, fds)?;
            DiskBackend::Layered {
                base: File::from(fds.take(*base, "base disk")?),
                layers,
                overlay: File::from(fds.take(*overlay, "overlay disk")?),
            }
        }
    };
    // The name is part of the snapshot, so the numbering of disks must not change.
    Block::new(format!("blk{number}"), backend)
        .and_then(|block| match limiter {
            Some(limiter) => block.limited(limiter, number),
            None => Ok(block),
        })
        .map_err(|e| VmmError::Config(format!("disk {number}: {e}")))
}

/// Takes the descriptors of a disk's layers.
pub(super) fn take_disk_layers(
    layers: &[LayerFiles],
    fds: &mut ReceivedFds,
) -> Result<Vec<(File, LayerIndex)>, VmmError> {
    if layers.len() > MAX_LAYERS {
        return Err(VmmError::Config(format!(
            "{} disk layers: at most {MAX_LAYERS}",
            layers.len()
        )));
    }
    let layers = layers.iter().map(|layer| {
        let file = File::from(fds.take(layer.file, "disk layer")?);
        let index = read_layer_index(fds, layer.index, "disk layer index", DISK_BLOCK)?;
        Ok((file, index))
    });
    layers.collect()
}

/// Reads the index of a layer from its file.
pub(super) fn read_layer_index(
    fds: &mut ReceivedFds,
    file: FdIndex,
    what: &'static str,
    unit: u32,
) -> Result<LayerIndex, VmmError> {
    let file = File::from(fds.take(file, what)?);
    let reject = |e: &dyn std::fmt::Display| VmmError::Config(format!("{what}: {e}"));
    let index = LayerIndex::read(&file, MAX_INDEX_BYTES).map_err(|e| match e {
        IndexFileError::Io(e) => VmmError::host(what, e),
        IndexFileError::Index(e) => reject(&e),
    })?;
    if index.unit != unit {
        return Err(reject(&"its unit is of another size"));
    }
    Ok(index)
}

/// Reads a small file completely. Does not use the file offset, which is shared with the sender of
/// the descriptor.
pub(super) fn read_all(file: &File, limit: u64) -> io::Result<Vec<u8>> {
    let length = file.metadata()?.len();
    if length > limit {
        return Err(io::Error::other(format!(
            "{length} bytes are more than {limit}"
        )));
    }
    let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Connects device number `index` to its register page, interrupt and kick eventfds.
pub(super) fn attach(
    vm: &VmFd,
    index: usize,
    device: Box<dyn VirtioDevice>,
    memory: &GuestMemory,
    poller: &Poller,
    kicks: &mut Vec<EventFd>,
) -> Result<SharedDevice, VmmError> {
    let number = u32::try_from(index).map_err(|e| VmmError::host("device number", e))?;
    let irq = new_eventfd()?;
    // KVM injects the interrupt when the VMM writes to the eventfd.
    vm.register_irqfd(&irq, FIRST_VIRTIO_PIN + number)
        .map_err(|e| VmmError::host("irqfd", e))?;
    let base_slot = FIRST_SLOT + number * SLOT_STRIDE;
    let host_events = poller.slot(base_slot + 1);
    let queue_events = poller.slot(base_slot);
    let device = MmioDevice::new(
        device,
        memory.clone(),
        Arc::new(IrqLine::new(irq)),
        host_events,
    );
    // If the guest writes a queue's number to this register, KVM signals the queue's eventfd
    // without an exit to the VMM.
    let notify = IoEventAddress::Mmio(MMIO_START + u64::from(number) * MMIO_STRIDE + QUEUE_NOTIFY);
    for queue in 0..device.queue_count() {
        let queue = u32::try_from(queue).map_err(|e| VmmError::host("queue number", e))?;
        let kick = new_eventfd()?;
        vm.register_ioevent(&kick, &notify, queue)
            .map_err(|e| VmmError::host("ioeventfd", e))?;
        queue_events
            // Edge-triggered: each kick wakes the event loop once, and the counter need not be
            // read.
            .add(
                borrow_eventfd(&kick),
                queue,
                EpollFlags::EPOLLIN | EpollFlags::EPOLLET,
            )
            .map_err(|e| VmmError::host("epoll", e))?;
        kicks.push(kick);
    }
    Ok(Arc::new(Mutex::new(device)))
}

/// Reports a failure of a device, and a warning about the host's files that the device uses.
pub(crate) fn report_device(
    mut device: MutexGuard<'_, MmioDevice>,
    bus: &Bus,
    report: impl Fn(&Event),
) {
    if let Some(reason) = device.take_failure() {
        let device = device.name().to_owned();
        report(&Event::DeviceFailed { device, reason });
    }
    let warning = device.take_warning();
    // Release the device's lock before the ports' lock is taken: no thread may hold both.
    drop(device);
    if let Some(warning) = warning {
        bus.log_to_console(&warning);
        report(&Event::DiskFailed { reason: warning });
    }
}

/// Returns the kernel command line arguments for `count` devices.
pub(super) fn device_cmdline(count: usize) -> String {
    let mut words = String::new();
    for (base, pin) in (MMIO_START..)
        .step_by(usize::try_from(MMIO_STRIDE).unwrap_or(usize::MAX))
        .zip(FIRST_VIRTIO_PIN..)
        .take(count)
    {
        words.push_str(&format!(" virtio_mmio.device=4K@{base:#x}:{pin}"));
    }
    words
}

/// Creates a non-blocking, close-on-exec eventfd.
pub(crate) fn new_eventfd() -> Result<EventFd, VmmError> {
    EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(|e| VmmError::host("eventfd", e))
}

/// Borrows an eventfd.
pub(crate) fn borrow_eventfd(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor belongs to `event`, which lives as long as the borrow.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_names_each_device_with_its_own_page_and_pin() {
        assert_eq!(
            device_cmdline(2),
            " virtio_mmio.device=4K@0xd0000000:5 virtio_mmio.device=4K@0xd0001000:6"
        );
    }

    #[test]
    fn slots_decode_to_their_device() {
        assert_eq!(EventSlot::decode(3), EventSlot::Other(3));
        assert_eq!(EventSlot::decode(FIRST_SLOT), EventSlot::Queue(0));
        assert_eq!(EventSlot::decode(FIRST_SLOT + 3), EventSlot::Host(1));
    }
}
