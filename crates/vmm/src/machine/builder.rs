//! Builds a machine that boots a kernel, from the configuration and descriptors of the controller.
//!
//! A *spare* VMM process is started in advance, and creates a VM before its guest is known.

use super::bus::{Bus, SharedDevice, lock};
use super::devices::{DeviceSet, attach, create_devices, device_cmdline, new_eventfd};
use super::ioapic::{IoApic, IoApicState, KvmRoutes};
use super::kvm_vm::KvmVm;
use super::legacy_ports::{COM1_IRQ, LegacyPorts};
use super::received_fds::ReceivedFds;
use super::vcpu;
use super::{Machine, WritableDisk};
use super::{cpu_features, cpu_level};
use crate::GuestMemory;
use crate::boot;
use crate::error::VmmError;
use crate::poll::Poller;
use crate::snapshot::machine_state::MachineShape;
use crate::snapshot::memory_layers::MemoryLayers;
use crate::snapshot::populate::DeferredCopies;
use crate::snapshot::revert_memory::MappedFiles;
use crate::virtio::blk::Block;
use crate::virtio::vsock::GuestConnect;
use jiffy_proto::console::ConsoleRing;
use jiffy_proto::vm::{FdIndex, VmConfig, limits};
use kvm_ioctls::VcpuFd;
use std::fs::File;
use std::sync::Arc;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use vmm_sys_util::eventfd::EventFd;

/// Machine under construction, without vCPUs and legacy devices.
pub(super) struct MachineBuilder {
    pub kvm: KvmVm,
    pub memory: GuestMemory,
    pub poller: Poller,
    disk_poller: Poller,
    names: Vec<String>,
    disks: usize,
    writable_disks: Vec<WritableDisk>,
    pub devices: Vec<SharedDevice>,
    kicks: Vec<EventFd>,
}

impl MachineBuilder {
    /// Registers the memory with KVM and creates the devices.
    pub fn new(
        mut kvm: KvmVm,
        memory: GuestMemory,
        devices: &DeviceSet<'_>,
        fds: &mut ReceivedFds,
        guest_connect: Box<dyn GuestConnect>,
    ) -> Result<Self, VmmError> {
        kvm.register_memory(&memory)?;
        let new_poller = || Poller::new().map_err(|e| VmmError::host("epoll", e));
        let (poller, disk_poller) = (new_poller()?, new_poller()?);
        let mut kicks = Vec::new();
        let mut attached = Vec::new();
        for (index, device) in create_devices(devices, fds, guest_connect)?
            .into_iter()
            .enumerate()
        {
            // Disks have an epoll set of their own, which the disk thread serves.
            let poller = match device.device_id() {
                VIRTIO_ID_BLOCK => &disk_poller,
                _ => &poller,
            };
            attached.push(attach(&kvm.vm, index, device, &memory, poller, &mut kicks)?);
        }
        let names = attached.iter().map(|device| lock(device).name().to_owned());
        Ok(Self {
            kvm,
            memory,
            poller,
            disk_poller,
            names: names.collect(),
            disks: devices.disks.len(),
            writable_disks: find_writable_disks(&attached),
            devices: attached,
            kicks,
        })
    }

    /// Creates the console's interrupt.
    pub fn serial_irq(&self) -> Result<EventFd, VmmError> {
        let irq = new_eventfd()?;
        self.kvm
            .vm
            .register_irqfd(&irq, COM1_IRQ)
            .map_err(|e| VmmError::host("irqfd", e))?;
        Ok(irq)
    }

    /// Adds vCPUs and legacy devices and completes the machine.
    pub fn finish(
        self,
        vcpus: Vec<VcpuFd>,
        ports: LegacyPorts,
        ioapic: Option<&IoApicState>,
        shape: MachineShape,
        layers: MemoryLayers,
    ) -> Result<Machine, VmmError> {
        // A device can fail while a vCPU accesses it. The vCPU's thread then signals this eventfd,
        // and the event loop reports the failure.
        let device_failed = new_eventfd()?;
        let wake = device_failed
            .try_clone()
            .map_err(|e| VmmError::host("eventfd", e))?;
        let vm = Arc::new(self.kvm.vm);
        let mut pins = IoApic::new(KvmRoutes(vm.clone()));
        if let Some(state) = ioapic {
            pins.restore(state)
                .map_err(|e| VmmError::host("routing interrupts", e))?;
        }
        let bus = Arc::new(Bus::new(
            self.devices.clone(),
            pins,
            ports,
            Box::new(move || {
                // Ignore the error: the counter is full, so the event loop is notified already.
                let _ = wake.write(1);
            }),
        ));
        Ok(Machine {
            bus,
            devices: self.devices,
            vcpus,
            poller: self.poller,
            disk_poller: self.disk_poller,
            names: self.names,
            disks: self.disks,
            writable_disks: self.writable_disks,
            device_failed,
            memory: self.memory,
            layers,
            mapped: MappedFiles::default(),
            captured: None,
            write_tracker: None,
            protected: false,
            deferred_copies: DeferredCopies::default(),
            lazy: None,
            shape,
            msrs: Arc::new(self.kvm.msrs),
            vm,
            kicks: self.kicks,
        })
    }
}

/// Returns the disks whose content a snapshot must contain, because the guest can write to them.
fn find_writable_disks(devices: &[SharedDevice]) -> Vec<WritableDisk> {
    let disks = devices.iter().enumerate().filter_map(|(device, shared)| {
        let find = |block: &Block| {
            block.writable().then(|| WritableDisk {
                device,
                bytes: block.bytes(),
                overlay: block.overlay(),
            })
        };
        lock(shared).device_ref(find).flatten()
    });
    disks.collect()
}

/// Builds the machine from its configuration. Opens no file: all descriptors come from `fds`.
/// `spare` is used if it has at most as many vCPUs as the configuration.
pub fn build(
    config: &VmConfig,
    fds: &mut ReceivedFds,
    spare: Option<KvmVm>,
    guest_connect: Box<dyn GuestConnect>,
) -> Result<Machine, VmmError> {
    check_config(config)?;
    let devices = DeviceSet {
        disks: &config.disks,
        disk_limits: config.disk_limits,
        vsock: config.vsock.as_ref(),
        net: config.net.as_ref(),
        rng: config.rng,
        balloon: config.balloon,
        lazy: None,
    };
    let kvm = fds.take(config.kvm, "/dev/kvm")?;
    let (mut kvm, vcpus) = KvmVm::with_vcpus(spare, kvm, config.vcpus.into())?;
    let memory = kvm.take_memory(config.memory_mib)?;
    let builder = MachineBuilder::new(kvm, memory, &devices, fds, guest_connect)?;

    let kernel = File::from(fds.take(config.kernel, "kernel")?);
    let initrd = config
        .initrd
        .map(|fd| fds.take(fd, "initrd").map(File::from))
        .transpose()?;
    // The guest's kernel finds devices only through its command line, because there is no PCI bus
    // and no ACPI.
    let line = format!(
        "{}{}",
        config.cmdline,
        device_cmdline(builder.devices.len())
    );
    let entry = boot::load(
        &builder.memory,
        &kernel,
        initrd.as_ref(),
        &line,
        config.vcpus,
    )?;

    let supported = cpu_level::mask(&builder.kvm.cpuid, config.cpu_level)?;
    for (id, vcpu) in (0..).zip(&vcpus) {
        let cpuid = vcpu::cpuid(&supported, id, config.vcpus);
        vcpu::set_up(vcpu, id, &cpuid, entry)?;
    }
    let ports = LegacyPorts::new(console(fds, config.console)?, builder.serial_irq()?);
    let shape = MachineShape {
        vcpus: config.vcpus,
        memory_mib: config.memory_mib,
        cpu: cpu_features::name_of(&supported, config.cpu_level),
    };
    builder.finish(vcpus, ports, None, shape, MemoryLayers::default())
}

pub(super) fn console(fds: &mut ReceivedFds, fd: FdIndex) -> Result<ConsoleRing, VmmError> {
    ConsoleRing::open(fds.take(fd, "console")?)
        .map_err(|e| VmmError::Config(format!("console ring: {e}")))
}

/// Checks the numbers of a configuration before memory is allocated.
fn check_config(config: &VmConfig) -> Result<(), VmmError> {
    let reject = |text: String| Err(VmmError::Config(text));
    if !(1..=limits::MAX_VCPUS).contains(&config.vcpus) {
        return reject(format!(
            "{} vCPUs: must be 1 to {}",
            config.vcpus,
            limits::MAX_VCPUS
        ));
    }
    if !(limits::MIN_MEMORY_MIB..=limits::MAX_MEMORY_MIB).contains(&config.memory_mib) {
        return reject(format!(
            "{} MiB of memory: must be {} to {}",
            config.memory_mib,
            limits::MIN_MEMORY_MIB,
            limits::MAX_MEMORY_MIB
        ));
    }
    if config.disks.len() > limits::MAX_DISKS {
        return reject(format!(
            "{} disks: at most {}",
            config.disks.len(),
            limits::MAX_DISKS
        ));
    }
    // Context ids 0 to 2 are `VMADDR_CID_HYPERVISOR`, `VMADDR_CID_LOCAL` (loopback) and
    // `VMADDR_CID_HOST`.
    if config.vsock.as_ref().is_some_and(|v| v.guest_cid < 3) {
        return reject("vsock context ids below 3 are reserved".to_owned());
    }
    Ok(())
}
