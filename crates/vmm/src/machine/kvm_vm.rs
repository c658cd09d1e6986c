//! KVM's objects of a VM: made with its configuration, or before there is one.

use super::ioapic::IOAPIC_PINS;
use super::vcpu;
use crate::error::VmmError;
use crate::memory::{KVM_IDENTITY_MAP_START, KVM_TSS_START};
use kvm_bindings::{CpuId, KVM_CAP_SPLIT_IRQCHIP, KVM_MAX_CPUID_ENTRIES, kvm_enable_cap};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};

/// vCPUs that are made ahead: as many as sandboxes have unless they ask for others.
const VCPUS_AHEAD: u64 = 2;

/// VM without memory, whose vCPUs have no state.
pub struct KvmVm {
    pub vm: VmFd,
    /// Features that KVM can give a vCPU.
    pub cpuid: CpuId,
    /// MSRs that are part of a vCPU's state.
    pub msrs: Vec<u32>,
    vcpus: Vec<VcpuFd>,
}

impl KvmVm {
    /// Makes one for a guest that is not known yet. What it takes, an exit for each leaf of CPUID
    /// of a host that is itself a VM for example, is not on the way of that guest then.
    pub fn ahead(kvm: OwnedFd) -> Result<Self, VmmError> {
        let mut made = Self::new(kvm)?;
        made.add_vcpus(VCPUS_AHEAD)?;
        Ok(made)
    }

    /// Returns `ahead` with `vcpus` vCPUs, or a new one if it has more.
    pub fn with_vcpus(
        ahead: Option<Self>,
        kvm: OwnedFd,
        vcpus: usize,
    ) -> Result<(Self, Vec<VcpuFd>), VmmError> {
        let mut made = match ahead {
            Some(ahead) if ahead.vcpus.len() <= vcpus => ahead,
            Some(ahead) => {
                // It stays as long as the process: its end would take milliseconds.
                std::mem::forget(ahead);
                Self::new(kvm)?
            }
            None => Self::new(kvm)?,
        };
        made.add_vcpus(vcpus as u64)?;
        let vcpus = std::mem::take(&mut made.vcpus);
        Ok((made, vcpus))
    }

    fn new(kvm: OwnedFd) -> Result<Self, VmmError> {
        // SAFETY: `kvm` is ours alone; that it is KVM is checked by the first ioctl, which fails
        // on anything else.
        let kvm = unsafe { Kvm::from_raw_fd(kvm.into_raw_fd()) };
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
        })
    }

    fn add_vcpus(&mut self, count: u64) -> Result<(), VmmError> {
        for id in self.vcpus.len() as u64..count {
            let vcpu = self.vm.create_vcpu(id);
            let vcpu = vcpu.map_err(|e| VmmError::host("KVM_CREATE_VCPU", e))?;
            self.vcpus.push(vcpu);
        }
        Ok(())
    }
}
