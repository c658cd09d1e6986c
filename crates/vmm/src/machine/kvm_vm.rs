//! KVM objects of a VM. A spare VMM process creates them before it receives a configuration.
//!
//! A *spare* is a VMM process that the daemon starts in advance for the next guest.

use super::ioapic::IOAPIC_PINS;
use super::{memory_slots, vcpu};
use crate::GuestMemory;
use crate::error::VmmError;
use crate::memory::{self, KVM_IDENTITY_MAP_START, KVM_TSS_START, layout};
use jiffy_proto::vm::limits;
use kvm_bindings::{CpuId, KVM_CAP_SPLIT_IRQCHIP, KVM_MAX_CPUID_ENTRIES, kvm_enable_cap};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

/// Number of vCPUs of a spare VM: the default of sandboxes.
pub const SPARE_VCPUS: usize = 2;
/// Maximum memory of a spare VM, in MiB. The tables of the host's kernel for this memory take about
/// 1/400 of its size.
const MAX_SPARE_MEMORY_MIB: u32 = 4096;

/// VM whose vCPUs have no state. Its memory, if any, is empty.
pub struct KvmVm {
    pub vm: VmFd,
    /// Features that KVM offers to vCPUs.
    pub cpuid: CpuId,
    /// MSRs that are part of a vCPU's state.
    pub msrs: Vec<u32>,
    vcpus: Vec<VcpuFd>,
    /// Registered memory that is not in use yet.
    unused_memory: Option<GuestMemory>,
    /// True after guest memory was registered with KVM.
    memory_is_registered: bool,
}

impl KvmVm {
    /// Creates a spare VM for a future guest that probably has `memory_mib` MiB of memory (0 if
    /// unknown). The guest's start then does not wait for these steps. For example, reading the
    /// CPUID causes an exit for each leaf if the host is itself a VM.
    pub fn prepare(kvm: OwnedFd, memory_mib: u32) -> Result<Self, VmmError> {
        let mut vm = Self::new(kvm)?;
        vm.add_vcpus(SPARE_VCPUS as u64)?;
        if (limits::MIN_MEMORY_MIB..=MAX_SPARE_MEMORY_MIB).contains(&memory_mib) {
            let memory = memory::allocate(memory_mib)?;
            vm.register_memory(&memory)?;
            vm.unused_memory = Some(memory);
        }
        Ok(vm)
    }

    /// Returns empty memory of `mib` MiB for the guest.
    pub fn take_memory(&mut self, mib: u32) -> Result<GuestMemory, VmmError> {
        let Some(memory) = self.unused_memory.take() else {
            return memory::allocate(mib);
        };
        let ranges = memory
            .iter()
            .map(|region| (region.start_addr().0, region.len()));
        if ranges.eq(layout(mib)) {
            return Ok(memory);
        }
        // The spare memory has another size.
        memory_slots::unregister(&self.vm, &memory)?;
        self.memory_is_registered = false;
        memory::allocate(mib)
    }

    /// Registers the memory from [`Self::take_memory`] with KVM, unless it is registered.
    pub fn register_memory(&mut self, memory: &GuestMemory) -> Result<(), VmmError> {
        if !self.memory_is_registered {
            memory_slots::register(&self.vm, memory)?;
            self.memory_is_registered = true;
        }
        Ok(())
    }

    /// Returns `spare` if it has at most `vcpus` vCPUs, or else a new VM. Then adds missing vCPUs.
    pub fn with_vcpus(
        spare: Option<Self>,
        kvm: OwnedFd,
        vcpus: usize,
    ) -> Result<(Self, Vec<VcpuFd>), VmmError> {
        let mut vm = match spare {
            // KVM cannot remove vCPUs.
            Some(spare) if spare.vcpus.len() <= vcpus => spare,
            Some(spare) => {
                // The unused VM remains until the process exits: destroying it would take
                // milliseconds.
                std::mem::forget(spare);
                Self::new(kvm)?
            }
            None => Self::new(kvm)?,
        };
        vm.add_vcpus(vcpus as u64)?;
        let vcpus = std::mem::take(&mut vm.vcpus);
        Ok((vm, vcpus))
    }

    /// Creates a VM of KVM, with local APICs in the kernel and an I/O APIC in this process.
    fn new(kvm: OwnedFd) -> Result<Self, VmmError> {
        // SAFETY: `kvm` is owned by this function. If it is not KVM, the first ioctl fails.
        let kvm = unsafe { Kvm::from_raw_fd(kvm.into_raw_fd()) };
        // The only version since Linux 2.6.22 (Documentation/virt/kvm/api.rst).
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
        // The local APICs remain in the kernel. The I/O APIC is emulated by `super::ioapic`, and
        // there is no PIC and no PIT.
        vm.enable_cap(&kvm_enable_cap {
            cap: KVM_CAP_SPLIT_IRQCHIP,
            args: [u64::from(IOAPIC_PINS), 0, 0, 0],
            ..Default::default()
        })
        .map_err(|e| VmmError::host("split interrupt controller", e))?;
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        Ok(Self {
            vm,
            cpuid: cpuid.map_err(|e| VmmError::host("reading the CPU's features from KVM", e))?,
            msrs: vcpu::msr_list(&kvm)?,
            vcpus: Vec::new(),
            unused_memory: None,
            memory_is_registered: false,
        })
    }

    fn add_vcpus(&mut self, count: u64) -> Result<(), VmmError> {
        for id in self.vcpus.len() as u64..count {
            let vcpu = self
                .vm
                .create_vcpu(id)
                .map_err(|e| VmmError::host("KVM_CREATE_VCPU", e))?;
            self.vcpus.push(vcpu);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;
    use vm_memory::{Bytes, GuestAddress};

    fn skip(test: &str, reason: &dyn std::fmt::Display) {
        if let Some(log) = std::env::var_os("JIFFY_SKIP_LOG") {
            let mut log = File::options().create(true).append(true).open(log).unwrap();
            writeln!(log, "{test}: {reason}").unwrap();
        }
    }

    #[test]
    fn spare_memory_is_used_only_by_a_guest_of_its_size() {
        let opened = File::options().read(true).write(true).open("/dev/kvm");
        let Ok(kvm) = opened.map_err(|e| skip("spare_memory", &e)) else {
            return;
        };
        let spare = || KvmVm::prepare(kvm.try_clone().unwrap().into(), 128).unwrap();
        let place = |memory: &GuestMemory| memory.get_host_address(GuestAddress(0)).unwrap();

        let mut fits = spare();
        let address = place(fits.unused_memory.as_ref().unwrap());
        let memory = fits.take_memory(128).unwrap();
        assert_eq!(place(&memory), address);
        assert_eq!(memory.read_obj::<u64>(GuestAddress(0)).unwrap(), 0);
        fits.register_memory(&memory).unwrap();

        let mut other = spare();
        let memory = other.take_memory(256).unwrap();
        assert_eq!(
            memory.iter().map(|region| region.len()).sum::<u64>(),
            256 << 20
        );
        other.register_memory(&memory).unwrap();
        // KVM does not replace a slot by a slot of another size.
        let wrong = memory::allocate(128).unwrap();
        assert!(memory_slots::register(&other.vm, &wrong).is_err());
    }
}
