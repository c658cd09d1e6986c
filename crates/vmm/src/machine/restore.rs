//! Builds a machine from a snapshot, with the descriptors that the controller sends.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. A *spare* VMM process is started in advance, and creates a VM before its
//! guest is known.

use super::builder::{MachineBuilder, console};
use super::bus::lock;
use super::devices::{DeviceSet, read_all, read_layer_index};
use super::kvm_vm::KvmVm;
use super::lazy_layers::LazyLayerSet;
use super::legacy_ports::LegacyPorts;
use super::received_fds::ReceivedFds;
use super::{Machine, cpu_features};
use crate::error::VmmError;
use crate::snapshot::huge_mappings::advise_huge_pages;
use crate::snapshot::linear_memory::LinearMemory;
use crate::snapshot::machine_state::{MAX_STATE_BYTES, MachineShape, MachineState};
use crate::snapshot::map_layers::{MAX_MAPPINGS, MappingPlan, plan_lazy_mappings};
use crate::snapshot::memory_layers::{MemoryLayer, MemoryLayers};
use crate::snapshot::populate::{DeferredCopies, populate};
use crate::snapshot::revert_memory::MappedFiles;
use crate::virtio::vsock::GuestConnect;
use jiffy_proto::layer::{MEMORY_CHUNK, MEMORY_PAGE, UnitSet};
use jiffy_proto::snapshot::{LaterPages, LayerFiles, MemorySource, PopulateMoment, RestoreConfig};
use jiffy_proto::vm::{FdIndex, limits};
use kvm_bindings::kvm_clock_data;
use std::fs::File;

/// Builds the machine from a snapshot. Opens no file: all descriptors come from `fds`. `spare` is
/// used if it has at most as many vCPUs as the snapshot. `on_memory_failure` is called on another
/// thread if missing memory cannot be fetched. The callback must terminate the process, because any
/// thread may be waiting for that memory.
pub fn restore(
    config: &RestoreConfig,
    fds: &mut ReceivedFds,
    spare: Option<KvmVm>,
    guest_connect: Box<dyn GuestConnect>,
    on_memory_failure: impl FnOnce(VmmError) + Send + 'static,
) -> Result<Machine, VmmError> {
    let state = read_state(&File::from(fds.take(config.state, "snapshot state")?))?;
    check_config(&state.shape)?;
    let kvm = fds.take(config.kvm, "/dev/kvm")?;
    let (mut kvm, vcpus) = KvmVm::with_vcpus(spare, kvm, state.vcpus.len())?;
    let memory = kvm.take_memory(state.shape.memory_mib)?;
    let linear = LinearMemory::new(&memory)?;
    let layers = take_memory_layers(&config.memory, linear.bytes(), fds)?;
    let eager = take_eager_chunks(config.source, linear.chunks(), fds)?;
    // Chunks that a layer's file does not contain yet are fetched on demand.
    let lazy = LazyLayerSet::take(config, fds)?;
    let absent = |layer: usize, chunk: u64| lazy.is_absent(layer, chunk);
    let runs = layers.runs(linear.chunks());
    let plan = plan_lazy_mappings(runs, eager.as_ref(), absent, MAX_MAPPINGS);
    let lazy = lazy.map(&plan, &layers, &linear, on_memory_failure)?;
    let mapped = MappedFiles::of(&plan, &layers)?;
    let pages = PopulatePages::take(config.populate, config.populate_later, fds)?;
    let mut deferred_copies = DeferredCopies::default();
    if let Some(pages) = &pages {
        // KVM need not be notified of the changed pages: KVM does not know the memory yet, or has
        // mapped none of its pages.
        advise_huge_pages(&plan, pages.all(), &linear);
        populate(&plan, &pages.at_start, &linear);
        deferred_copies = pages.deferred(&plan, None);
    }

    // The presence of a disk, vsock or network interface follows from the configuration. Optional
    // devices without a configuration exist if the snapshot contains their state.
    let has = |name: &str| state.devices.iter().any(|d| d.name() == name);
    let devices = DeviceSet {
        disks: &config.disks,
        disk_limits: config.disk_limits,
        vsock: config.vsock.as_ref(),
        net: config.net.as_ref(),
        rng: has("rng"),
        balloon: has("balloon"),
        lazy: lazy.clone(),
    };
    // Check this before vCPU state is restored: KVM's errors would not name the missing features.
    cpu_features::check(&state.shape.cpu, &kvm.cpuid)?;
    let builder = MachineBuilder::new(kvm, memory, &devices, fds, guest_connect)?;
    for (vcpu, state) in vcpus.iter().zip(&state.vcpus) {
        state.restore(vcpu)?;
    }
    let clock = kvm_clock_data {
        clock: state.clock.ns,
        ..Default::default()
    };
    builder
        .kvm
        .vm
        .set_clock(&clock)
        .map_err(|e| VmmError::host("KVM_SET_CLOCK", e))?;

    let ring = console(fds, config.console)?;
    let irq = builder.serial_irq()?;
    let irq_trigger = irq.try_clone().map_err(|e| VmmError::host("eventfd", e))?;
    let mut ports = LegacyPorts::new(ring, irq);
    ports.restore(&state.serial).map_err(VmmError::Config)?;
    let shape = state.shape.clone();
    let mut machine = builder.finish(vcpus, ports, Some(&state.ioapic), shape, layers)?;
    machine.lazy = lazy;
    machine.deferred_copies = deferred_copies;
    machine.mapped = mapped;
    // `finish` has installed the interrupt routes. A console interrupt that `ports.restore` raised
    // before that was lost, so raise it again. A spurious interrupt is harmless. Ignore the error:
    // the counter is full, so an interrupt is already pending.
    let _ = irq_trigger.write(1);
    restore_devices(&machine, &state)?;
    Ok(machine)
}

/// Pages that a restored guest writes first. They are copied before it runs, or later.
pub(super) struct PopulatePages {
    /// Pages that are copied before the guest runs.
    pub at_start: UnitSet,
    /// All pages, and the moment after which the remaining pages are copied.
    later: Option<(UnitSet, PopulateMoment)>,
}

impl PopulatePages {
    /// Reads both sets of pages from the received descriptors. A request may lack either set.
    /// Returns `None` if it lacks both.
    pub fn take(
        at_start: Option<FdIndex>,
        later: Option<LaterPages>,
        fds: &mut ReceivedFds,
    ) -> Result<Option<Self>, VmmError> {
        let mut read = |pages| {
            let index = read_layer_index(fds, pages, "pages to populate", MEMORY_PAGE)?;
            Ok::<UnitSet, VmmError>(index.stored)
        };
        let at_start = at_start.map(&mut read).transpose()?;
        let Some(later) = later else {
            return Ok(at_start.map(|at_start| Self {
                at_start,
                later: None,
            }));
        };
        let pages = read(later.pages)?;
        let at_start = at_start.unwrap_or_else(|| UnitSet::empty(pages.units()));
        Ok(Some(Self {
            // The set of all pages includes `at_start`: `advise_huge_pages` must skip the pages of
            // both sets.
            later: Some((pages.with(&at_start), later.from)),
            at_start,
        }))
    }

    /// Returns all pages.
    pub fn all(&self) -> &UnitSet {
        self.later.as_ref().map_or(&self.at_start, |(all, _)| all)
    }

    /// Returns the copies to make later on memory that is mapped by `plan`. `own` are pages that
    /// are already private to the guest.
    pub fn deferred(&self, plan: &MappingPlan, own: Option<&UnitSet>) -> DeferredCopies {
        let Some((all, from)) = &self.later else {
            return DeferredCopies::default();
        };
        let remaining = all.without(&self.at_start);
        match own {
            Some(own) => DeferredCopies::of(plan, &remaining.without(own), *from),
            None => DeferredCopies::of(plan, &remaining, *from),
        }
    }
}

/// Takes the descriptors of the memory layers of a VM with `bytes` bytes of memory.
pub(super) fn take_memory_layers(
    layers: &[LayerFiles],
    bytes: u64,
    fds: &mut ReceivedFds,
) -> Result<MemoryLayers, VmmError> {
    let layers = layers.iter().map(|layer| {
        let file = File::from(fds.take(layer.file, "memory layer")?);
        let index = read_layer_index(fds, layer.index, "memory layer index", MEMORY_CHUNK)?;
        Ok(MemoryLayer::new(file, index))
    });
    MemoryLayers::new(layers.collect::<Result<Vec<_>, VmmError>>()?, bytes)
}

/// Takes the set of chunks that are read instead of mapped. `None` if all chunks are mapped.
/// Without a working set (the chunks that the guest is expected to use), all chunks are read.
pub(super) fn take_eager_chunks(
    source: MemorySource,
    chunks: u64,
    fds: &mut ReceivedFds,
) -> Result<Option<UnitSet>, VmmError> {
    Ok(match source {
        MemorySource::Map => None,
        MemorySource::Copy { working_set: None } => Some(UnitSet::full(chunks)),
        MemorySource::Copy {
            working_set: Some(file),
        } => Some(read_layer_index(fds, file, "working set", MEMORY_CHUNK)?.stored),
    })
}

pub(super) fn read_state(file: &File) -> Result<MachineState, VmmError> {
    let bytes = read_all(file, MAX_STATE_BYTES)
        .map_err(|e| VmmError::host("reading the snapshot's state", e))?;
    MachineState::decode(&bytes)
}

/// Checks the sizes of a machine from a snapshot, whose file may be damaged, before memory is
/// reserved.
fn check_config(shape: &MachineShape) -> Result<(), VmmError> {
    let memory = limits::MIN_MEMORY_MIB..=limits::MAX_MEMORY_MIB;
    if (1..=limits::MAX_VCPUS).contains(&shape.vcpus) && memory.contains(&shape.memory_mib) {
        return Ok(());
    }
    Err(VmmError::Config(format!(
        "snapshot state is damaged: {} vCPUs and {} MiB",
        shape.vcpus, shape.memory_mib
    )))
}

/// Restores the state of the devices from a snapshot.
fn restore_devices(machine: &Machine, state: &MachineState) -> Result<(), VmmError> {
    if machine.devices.len() != state.devices.len() {
        return Err(VmmError::Config(format!(
            "the snapshot has {} devices and the configuration {}",
            state.devices.len(),
            machine.devices.len()
        )));
    }
    // The snapshot may contain requests that the devices had not processed yet: kick all queues.
    for (device, state) in machine.devices.iter().zip(&state.devices) {
        let mut device = lock(device);
        device
            .restore(state)
            .map_err(|e| VmmError::Config(e.to_string()))?;
        device.kick_queues();
    }
    Ok(())
}
