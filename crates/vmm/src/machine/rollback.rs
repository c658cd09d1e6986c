//! Rollback of a machine in use to a snapshot. The snapshot is read and checked while the guest
//! runs. Then the machine's state is replaced.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. A *private* page belongs to this process alone, because the guest has
//! written it or the VMM has copied it. All other pages are mapped from the files of layers, or
//! were never touched. The *captured pages* are the guest's private pages at the time of its newest
//! snapshot.

use super::bus::lock;
use super::devices::take_disk_layers;
use super::received_fds::ReceivedFds;
use super::restore::{PopulatePages, read_state, take_eager_chunks, take_memory_layers};
use super::vcpu::{VcpuState, Vcpus};
use super::{Machine, WritableDisk};
use crate::error::VmmError;
use crate::snapshot::huge_mappings::advise_huge_pages;
use crate::snapshot::linear_memory::LinearMemory;
use crate::snapshot::machine_state::MachineState;
use crate::snapshot::map_layers::{MAX_MAPPINGS, MappingPlan, plan_mappings};
use crate::snapshot::memory_layers::MemoryLayers;
use crate::snapshot::pagemap_scan::PrivatePagesFound;
use crate::snapshot::populate::{DeferredCopies, populate};
use crate::snapshot::revert_memory::{PrivatePages, revert_memory};
use crate::virtio::blk::{Block, DiskLayers};
use crate::virtio::net::Net;
use jiffy_proto::layer::UnitSet;
use jiffy_proto::snapshot::RollbackConfig;
use kvm_bindings::kvm_clock_data;
use std::fs::File;
use std::sync::Arc;

/// Checked snapshot that fits a machine in use.
pub struct RollbackTarget {
    state: MachineState,
    vcpus: Vec<Arc<VcpuState>>,
    layers: MemoryLayers,
    plan: MappingPlan,
    populate_pages: Option<PopulatePages>,
    /// Layers of writable disks, by device number.
    disks: Vec<(usize, DiskLayers)>,
}

impl RollbackTarget {
    /// Reads and checks a snapshot. Does not change the machine.
    pub fn read(
        machine: &Machine,
        config: &RollbackConfig,
        fds: &mut ReceivedFds,
    ) -> Result<Self, VmmError> {
        if machine.lazy.is_some() {
            return Err(rejected(
                "rollback is not possible while memory of this VM is fetched on demand",
            ));
        }
        let mut state = read_state(&File::from(fds.take(config.state, "snapshot state")?))?;
        // Each vCPU's thread receives its state as an `Arc`, without copying it.
        let vcpus = std::mem::take(&mut state.vcpus);
        check_shape(machine, &state)?;
        let linear = LinearMemory::new(&machine.memory)?;
        let layers = take_memory_layers(&config.memory, linear.bytes(), fds)?;
        let eager = take_eager_chunks(config.source, linear.chunks(), fds)?;
        let runs = layers.runs(linear.chunks());
        let plan = plan_mappings(runs, eager.as_ref(), MAX_MAPPINGS);
        Ok(Self {
            disks: open_disks(machine, config, fds)?,
            vcpus: vcpus.into_iter().map(Arc::new).collect(),
            populate_pages: PopulatePages::take(config.populate, config.populate_later, fds)?,
            state,
            layers,
            plan,
        })
    }

    /// Pauses the vCPUs, and checks that they can be reverted.
    pub fn pause_vcpus(&self, vcpus: &Vcpus) -> Result<(), VmmError> {
        vcpus.pause_and_check(&self.vcpus)
    }
}

fn rejected(why: &str) -> VmmError {
    VmmError::Config(why.to_owned())
}

/// Checks that the snapshot has the size, processor features and devices of the machine. A rollback
/// cannot change these.
fn check_shape(machine: &Machine, state: &MachineState) -> Result<(), VmmError> {
    if state.shape != machine.shape {
        return Err(rejected("the snapshot is of another size or processor"));
    }
    let names = machine.names.iter();
    if !names.eq(state.devices.iter().map(|device| device.name())) {
        return Err(rejected("the snapshot has other devices"));
    }
    Ok(())
}

/// Opens the layers of the snapshot's writable disks. Returns them with the numbers of their
/// devices.
fn open_disks(
    machine: &Machine,
    config: &RollbackConfig,
    fds: &mut ReceivedFds,
) -> Result<Vec<(usize, DiskLayers)>, VmmError> {
    let writable = &machine.writable_disks;
    if writable.len() != config.disks.len() {
        return Err(rejected(
            "the snapshot has another number of writable disks",
        ));
    }
    let mut disks = Vec::new();
    for (disk_of_machine, disk) in writable.iter().zip(&config.disks) {
        let layers = take_disk_layers(&disk.layers, fds)?;
        let overlay = File::from(fds.take(disk.overlay, "overlay disk")?);
        let WritableDisk { device, bytes, .. } = disk_of_machine;
        let layers = DiskLayers::open(layers, overlay, *bytes)
            .map_err(|e| VmmError::Config(format!("disk {device}: {e}")))?;
        disks.push((*device, layers));
    }
    Ok(disks)
}

impl Machine {
    /// Returns the private pages that have the content of the target. Empty unless the target is
    /// the newest snapshot of this memory.
    pub fn unwritten_pages(&self, target: &RollbackTarget, private: &PrivatePagesFound) -> UnitSet {
        let captured = self.captured.as_ref();
        let captured = captured.filter(|captured| captured.belong_to(&target.layers));
        captured.map_or_else(
            || UnitSet::empty(private.all.units()),
            |captured| captured.unwritten(private),
        )
    }

    /// Reverts memory. `private` are the guest's private pages, and `unwritten` is the result of
    /// [`Self::unwritten_pages`]. No vCPU or device may be running. After an error, the guest must
    /// not run again.
    pub fn revert_memory(
        &mut self,
        target: &mut RollbackTarget,
        private: &UnitSet,
        unwritten: &UnitSet,
    ) -> Result<(), VmmError> {
        let linear = LinearMemory::new(&self.memory)?;
        let (plan, layers) = (&target.plan, &target.layers);
        // The changes below replace guest memory, including the guest's page tables. KVM does not
        // detect these changes, so its shadow page tables must be dropped first.
        self.drop_shadows()?;
        let captured = self.captured.take();
        // Captured pages describe the newest layer at the time of the capture. They are only valid
        // for a rollback to this layer.
        self.captured = captured.filter(|captured| captured.belong_to(layers));
        let own = PrivatePages {
            current: private,
            unwritten,
            retainable: target.populate_pages.as_ref().map(PopulatePages::all),
            captured: self.captured.as_ref(),
            protected: std::mem::take(&mut self.protected),
        };
        let (mapped, retained) = revert_memory(&self.mapped, plan, layers, &linear, own)?;
        self.mapped = mapped;
        self.layers = std::mem::take(&mut target.layers);
        self.deferred_copies = DeferredCopies::default();
        // Advise before populating: the size of a page is decided when it is allocated.
        if let Some(pages) = &target.populate_pages {
            advise_huge_pages(&target.plan, pages.all(), &linear);
            populate(&target.plan, &pages.at_start.without(&retained), &linear);
            self.deferred_copies = pages.deferred(&target.plan, Some(&retained));
        }
        // `RollbackTarget::read` rejects lazy memory, so `self.lazy` is `None` before and after.
        Ok(())
    }

    /// Reverts vCPUs and devices. Must be called after memory was reverted. Network interfaces drop
    /// all frames until [`Net::open_gate`]. No vCPU or device may be running. After an error, the
    /// guest must not run again. Returns the disks' former layers, which take some time to drop.
    pub fn revert_state(
        &self,
        target: RollbackTarget,
        vcpus: &Vcpus,
    ) -> Result<Vec<DiskLayers>, VmmError> {
        let state = &target.state;
        vcpus.revert(&target.vcpus)?;
        let clock = kvm_clock_data {
            clock: state.clock.ns,
            ..Default::default()
        };
        let set = self.vm.set_clock(&clock);
        set.map_err(|e| VmmError::host("KVM_SET_CLOCK", e))?;
        // Restore the routes of interrupts before devices raise interrupts.
        self.bus.restore(&state.ioapic, &state.serial)?;
        let mut former = Vec::new();
        for (at, layers) in target.disks {
            if let Some(device) = self.devices.get(at) {
                let reverted = lock(device).device_mut(|block: &mut Block| block.revert(layers));
                former.extend(reverted.flatten());
            }
        }
        for (device, state) in self.devices.iter().zip(&target.state.devices) {
            let mut device = lock(device);
            device.device_mut(Net::close_gate);
            let reverted = device.revert(state);
            reverted.map_err(|e| VmmError::Config(e.to_string()))?;
            device.interrupt_if_needed();
        }
        // The snapshot may contain requests that the devices had not processed yet.
        self.kick_pending_queues();
        Ok(former)
    }
}
