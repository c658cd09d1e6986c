//! [`Machine`]: one virtual machine of this process: KVM objects, memory, devices and vCPUs. It is
//! built from a configuration or a snapshot, and from descriptors of the controller (the daemon).
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. The *first use* of a restored guest is the first request or command of a
//! user. A *private* page belongs to this process alone, because the guest has written it or the
//! VMM has copied it. All other pages are mapped from the files of layers, or were never touched.

pub mod bus;
pub mod ioapic;
pub mod legacy_ports;
mod memory_slots;
pub mod vcpu;

mod builder;
mod cpu_features;
mod cpu_level;
mod devices;
mod exit_counters;
mod fold;
mod kvm_vm;
mod lazy_layers;
mod received_fds;
mod restore;
mod rollback;
mod save;

pub use builder::build;
pub use devices::EventSlot;
pub(crate) use devices::{borrow_eventfd, new_eventfd, report_device};
pub use exit_counters::ExitCounters;
pub(crate) use fold::adjacent;
#[cfg(test)]
pub(crate) use fold::file_identity;
pub use kvm_vm::{KvmVm, SPARE_VCPUS};
pub use received_fds::ReceivedFds;
pub use restore::restore;
pub use rollback::RollbackTarget;

use crate::GuestMemory;
use crate::error::VmmError;
use crate::poll::Poller;
use crate::snapshot::lazy_memory::LazyMemory;
use crate::snapshot::machine_state::MachineShape;
use crate::snapshot::memory_layers::MemoryLayers;
use crate::snapshot::populate::DeferredCopies;
use crate::snapshot::revert_memory::{CapturedPages, MappedFiles};
use crate::snapshot::write_tracker::WriteTracker;
use crate::virtio::blk::SharedOverlay;
use bus::{Bus, SharedDevice, lock};
use kvm_ioctls::{VcpuFd, VmFd};
use std::sync::Arc;
use vmm_sys_util::eventfd::EventFd;

/// Disk that the guest can write. Can be used without the lock of the device.
pub struct WritableDisk {
    /// Device number.
    pub device: usize,
    /// Size of the disk in bytes.
    pub bytes: u64,
    /// File that receives the guest's writes.
    pub overlay: SharedOverlay,
}

/// Virtual machine. [`build`] and [`restore`] return it before its first instruction. The process
/// then moves the vCPUs to their threads, and retains the other fields while the guest runs.
pub struct Machine {
    /// Address spaces of the machine.
    pub bus: Arc<Bus>,
    /// virtio devices in guest order. Disks come first.
    pub devices: Vec<SharedDevice>,
    /// Names of `devices`.
    names: Vec<String>,
    /// Number of disks in `devices`.
    disks: usize,
    /// Disks that the guest can write.
    pub writable_disks: Vec<WritableDisk>,
    /// vCPUs in order of their ids.
    pub vcpus: Vec<VcpuFd>,
    /// Descriptors of the event loop, including the descriptors of all devices except disks.
    pub poller: Poller,
    /// Descriptors of the disk thread.
    pub disk_poller: Poller,
    /// Signalled when a device fails during a vCPU's access.
    pub device_failed: EventFd,
    /// Guest memory.
    pub memory: GuestMemory,
    /// Layers below guest memory.
    pub layers: MemoryLayers,
    /// Files from which the layers are mapped.
    pub mapped: MappedFiles,
    /// Guest's private pages at the time of the newest layer. `None` unless this machine wrote that
    /// layer.
    pub captured: Option<CapturedPages>,
    /// Tracker of the pages that are written after a snapshot. `None` if the kernel does not
    /// support it, or if memory is fetched lazily.
    pub write_tracker: Option<WriteTracker>,
    /// True if private pages of this process were write-protected since the last rollback: for
    /// copy-on-write by the fork (fork(2)) of a process that writes a snapshot, or by the
    /// `write_tracker`. A rollback that reads into such a page makes it writable first, which
    /// avoids a fault per page.
    pub protected: bool,
    /// Pages of mapped layers that the guest probably writes at its first use. The VMM copies them
    /// to private memory while the guest runs, so that the writes cause no faults. Copies before
    /// the start would delay the start.
    pub deferred_copies: DeferredCopies,
    /// Lazily fetched memory. `None` if all memory is stored on this host.
    pub lazy: Option<Arc<LazyMemory>>,
    /// Size and processor features, which are saved with the state.
    pub shape: MachineShape,
    /// MSRs that are part of a vCPU's state.
    pub msrs: Arc<Vec<u32>>,
    /// KVM's VM descriptor.
    pub vm: Arc<VmFd>,
    /// Kick descriptors of all queues. They exist as long as the machine.
    kicks: Vec<EventFd>,
}

impl Machine {
    /// Returns the devices that the event loop serves. They exclude disks: a disk's lock is held
    /// while the host's storage responds, so the event loop must never take it.
    pub fn devices_of_event_loop(&self) -> Vec<SharedDevice> {
        self.devices.get(self.disks..).unwrap_or_default().to_vec()
    }

    /// Kicks all queues with pending work, like the guest would. The threads that serve the devices
    /// then process them. No vCPU or device may be running.
    pub fn kick_pending_queues(&self) {
        let queues = self.devices.iter().flat_map(|device| {
            let queues = 0..lock(device).queue_count();
            queues.map(move |queue| (device, queue))
        });
        // `kicks` has one entry per queue, in the order of the devices.
        for ((device, queue), kick) in queues.zip(&self.kicks) {
            if lock(device).needs_check(queue) {
                // Ignore the error: it only means that the counter is full, so a kick is already
                // pending.
                let _ = kick.write(1);
            }
        }
    }

    /// Makes KVM drop all state derived from guest memory. Guest memory may then be changed until a
    /// vCPU runs again. No vCPU may be running.
    pub fn drop_shadows(&self) -> Result<(), VmmError> {
        memory_slots::drop_shadows(&self.vm, &self.memory)
    }
}
