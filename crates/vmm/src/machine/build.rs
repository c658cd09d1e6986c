//! From a configuration to a machine that is ready to run.

use super::bus::{Bus, SharedDevice};
use super::devices::{attach, cmdline, create, event};
use super::fds::Descriptors;
use super::ioapic::{IoApic, KvmRoutes, PINS};
use super::legacy::{COM1_IRQ, LegacyPorts};
use super::vcpu;
use crate::GuestMemory;
use crate::boot;
use crate::error::VmmError;
use crate::memory::{self, KVM_IDENTITY_MAP_START, KVM_TSS_START};
use crate::poll::Poller;
use crate::virtio::vsock::GuestConnect;
use jiffy_proto::console::ConsoleRing;
use jiffy_proto::vm::{VmConfig, limits};
use kvm_bindings::{
    CpuId, KVM_CAP_SPLIT_IRQCHIP, KVM_MAX_CPUID_ENTRIES, kvm_enable_cap,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use std::fs::File;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;

/// A machine before its first instruction.
pub struct Machine {
    /// All address spaces.
    pub bus: Arc<Bus>,
    /// virtio devices in guest order.
    pub devices: Vec<SharedDevice>,
    /// vCPUs in order of their ids.
    pub vcpus: Vec<VcpuFd>,
    /// The event loop's descriptors, the devices' already among them.
    pub poller: Poller,
    /// Fires when a device failed in the middle of a vCPU's access.
    pub attention: EventFd,
    /// Kick descriptors; they live as long as the machine.
    _kicks: Vec<EventFd>,
    _vm: Arc<VmFd>,
}

/// Builds the machine. Opens nothing: all descriptors come from `fds`.
pub fn build(
    config: &VmConfig,
    fds: &mut Descriptors,
    guest_connect: Box<dyn GuestConnect>,
) -> Result<Machine, VmmError> {
    check(config)?;
    let (kvm, vm) = create_vm(fds.take(config.kvm, "/dev/kvm")?)?;
    let memory = memory::allocate(config.memory_mib)?;
    give_memory(&vm, &memory)?;

    let poller = Poller::new().map_err(|e| VmmError::host("epoll", e))?;
    let attention = event()?;
    let mut kicks = Vec::new();
    let mut devices = Vec::new();
    for (index, device) in create(config, fds, guest_connect)?.into_iter().enumerate() {
        devices.push(attach(&vm, index, device, &memory, &poller, &mut kicks)?);
    }

    let kernel = File::from(fds.take(config.kernel, "kernel")?);
    let initrd = config
        .initrd
        .map(|fd| fds.take(fd, "initrd").map(File::from))
        .transpose()?;
    let line = format!("{}{}", config.cmdline, cmdline(devices.len()));
    let entry = boot::load(&memory, &kernel, initrd.as_ref(), &line, config.vcpus)?;

    let supported = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(|e| VmmError::host("reading the CPU's features from KVM", e))?;
    let vcpus = create_vcpus(&vm, &supported, config.vcpus, entry)?;

    let console = ConsoleRing::open(fds.take(config.console, "console")?)
        .map_err(|e| VmmError::Config(format!("console ring: {e}")))?;
    let serial_irq = event()?;
    vm.register_irqfd(&serial_irq, COM1_IRQ)
        .map_err(|e| VmmError::host("irqfd", e))?;
    let vm = Arc::new(vm);
    let wake = attention
        .try_clone()
        .map_err(|e| VmmError::host("eventfd", e))?;
    let bus = Arc::new(Bus::new(
        devices.clone(),
        IoApic::new(KvmRoutes(vm.clone())),
        LegacyPorts::new(console, serial_irq),
        Box::new(move || {
            let _ = wake.write(1);
        }),
    ));
    Ok(Machine {
        bus,
        devices,
        vcpus,
        poller,
        attention,
        _kicks: kicks,
        _vm: vm,
    })
}

fn check(config: &VmConfig) -> Result<(), VmmError> {
    let refuse = |text: String| Err(VmmError::Config(text));
    if !(1..=limits::MAX_VCPUS).contains(&config.vcpus) {
        return refuse(format!(
            "{} vCPUs: must be 1 to {}",
            config.vcpus,
            limits::MAX_VCPUS
        ));
    }
    if !(limits::MIN_MEMORY_MIB..=limits::MAX_MEMORY_MIB).contains(&config.memory_mib) {
        return refuse(format!(
            "{} MiB of memory: must be {} to {}",
            config.memory_mib,
            limits::MIN_MEMORY_MIB,
            limits::MAX_MEMORY_MIB
        ));
    }
    if config.disks.len() > limits::MAX_DISKS {
        return refuse(format!(
            "{} disks: at most {}",
            config.disks.len(),
            limits::MAX_DISKS
        ));
    }
    if config.vsock.as_ref().is_some_and(|v| v.guest_cid < 3) {
        return refuse("vsock context ids below 3 are reserved".to_owned());
    }
    Ok(())
}

fn create_vm(fd: OwnedFd) -> Result<(Kvm, VmFd), VmmError> {
    // SAFETY: `fd` is ours alone; that it is KVM is checked by the first ioctl, which fails on anything else.
    let kvm = unsafe { Kvm::from_raw_fd(fd.into_raw_fd()) };
    if kvm.get_api_version() != 12 {
        return Err(VmmError::host(
            "/dev/kvm",
            "not a KVM device of API version 12",
        ));
    }
    let vm = kvm
        .create_vm()
        .map_err(|e| VmmError::host("KVM_CREATE_VM", e))?;
    vm.set_tss_address(usize::try_from(KVM_TSS_START).unwrap_or(0))
        .map_err(|e| VmmError::host("KVM_SET_TSS_ADDR", e))?;
    vm.set_identity_map_address(KVM_IDENTITY_MAP_START)
        .map_err(|e| VmmError::host("KVM_SET_IDENTITY_MAP_ADDR", e))?;
    vm.enable_cap(&kvm_enable_cap {
        cap: KVM_CAP_SPLIT_IRQCHIP,
        args: [u64::from(PINS), 0, 0, 0],
        ..Default::default()
    })
    .map_err(|e| VmmError::host("split interrupt controller", e))?;
    Ok((kvm, vm))
}

fn give_memory(vm: &VmFd, memory: &GuestMemory) -> Result<(), VmmError> {
    for (slot, region) in (0u32..).zip(memory.iter()) {
        let host = region
            .get_host_address(vm_memory::MemoryRegionAddress(0))
            .map_err(|e| VmmError::host("guest memory", e))?;
        let slot = kvm_userspace_memory_region {
            slot,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: u64::try_from(host.addr()).unwrap_or(0),
            flags: 0,
        };
        // SAFETY: the region is mapped for as long as the process lives, and so longer than the VM.
        unsafe { vm.set_user_memory_region(slot) }
            .map_err(|e| VmmError::host("KVM_SET_USER_MEMORY_REGION", e))?;
    }
    Ok(())
}

fn create_vcpus(
    vm: &VmFd,
    supported: &CpuId,
    count: u8,
    entry: u64,
) -> Result<Vec<VcpuFd>, VmmError> {
    (0..count)
        .map(|id| {
            let vcpu = vm
                .create_vcpu(u64::from(id))
                .map_err(|e| VmmError::host("KVM_CREATE_VCPU", e))?;
            vcpu::set_up(&vcpu, id, &vcpu::cpuid(supported, id, count), entry)?;
            Ok(vcpu)
        })
        .collect()
}
