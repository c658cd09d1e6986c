//! Complete state of a vCPU, so that a restored guest notices no interruption.

use crate::error::VmmError;
use kvm_bindings::{
    CpuId, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry,
    kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd};
use serde::{Deserialize, Serialize};

/// State of one vCPU.
#[derive(Debug, Serialize, Deserialize)]
pub struct VcpuState {
    cpuid: Vec<kvm_cpuid_entry2>,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: kvm_xsave,
    xcrs: kvm_xcrs,
    debugregs: kvm_debugregs,
    lapic: kvm_lapic_state,
    mp_state: kvm_mp_state,
    events: kvm_vcpu_events,
    msrs: Vec<kvm_msr_entry>,
}

crate::frozen_layout!(VcpuState, 6216);

/// Control register of software-virtualized guests (see kernel/README.md). KVM does not list it. It
/// must be written last.
const MSR_PVM_CONTROL: u32 = 0x4b56_4d10;
/// Must be written after the time stamp counter.
const MSR_TSC_DEADLINE: u32 = 0x6e0;
const MSR_FS_BASE: u32 = 0xc000_0100;
const MSR_GS_BASE: u32 = 0xc000_0101;

/// Returns the MSRs to save on this host, in the order in which they must be restored.
pub fn msr_list(kvm: &Kvm) -> Result<Vec<u32>, VmmError> {
    let listed = kvm
        .get_msr_index_list()
        .map_err(|e| VmmError::host("KVM_GET_MSR_INDEX_LIST", e))?;
    let last = [MSR_TSC_DEADLINE, MSR_PVM_CONTROL];
    let mut list: Vec<u32> = listed
        .as_slice()
        .iter()
        .copied()
        .filter(|msr| !last.contains(msr))
        .collect();
    // KVM does not list these two.
    list.extend([MSR_FS_BASE, MSR_GS_BASE]);
    list.extend(last);
    Ok(list)
}

fn failed(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> VmmError {
    move |e| VmmError::host(what, e)
}

impl VcpuState {
    /// Saves the state of a vCPU that is outside the guest and has no unfinished exit.
    pub fn save(vcpu: &VcpuFd, msrs: &[u32]) -> Result<Self, VmmError> {
        let cpuid = vcpu
            .get_cpuid2(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
            .map_err(failed("KVM_GET_CPUID2"))?;
        Ok(Self {
            cpuid: cpuid.as_slice().to_vec(),
            // Read this first: KVM then completes pending events, as its documentation requires.
            mp_state: vcpu.get_mp_state().map_err(failed("KVM_GET_MP_STATE"))?,
            regs: vcpu.get_regs().map_err(failed("KVM_GET_REGS"))?,
            sregs: vcpu.get_sregs().map_err(failed("KVM_GET_SREGS"))?,
            xsave: vcpu.get_xsave().map_err(failed("KVM_GET_XSAVE"))?,
            xcrs: vcpu.get_xcrs().map_err(failed("KVM_GET_XCRS"))?,
            debugregs: vcpu.get_debug_regs().map_err(failed("KVM_GET_DEBUGREGS"))?,
            lapic: vcpu.get_lapic().map_err(failed("KVM_GET_LAPIC"))?,
            events: vcpu
                .get_vcpu_events()
                .map_err(failed("KVM_GET_VCPU_EVENTS"))?,
            msrs: save_msrs(vcpu, msrs)?,
        })
    }

    /// Restores the state of a new vCPU.
    pub fn restore(&self, vcpu: &VcpuFd) -> Result<(), VmmError> {
        let cpuid = CpuId::from_entries(&self.cpuid)
            .map_err(|e| VmmError::host("restoring CPUID", format!("{e:?}")))?;
        vcpu.set_cpuid2(&cpuid).map_err(failed("KVM_SET_CPUID2"))?;
        self.revert(vcpu)
    }

    /// Checks that a vCPU in use can be reverted to this state: its CPUID can no longer change.
    pub fn check_cpuid(&self, vcpu: &VcpuFd) -> Result<(), VmmError> {
        let cpuid = vcpu
            .get_cpuid2(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
            .map_err(failed("KVM_GET_CPUID2"))?;
        if cpuid.as_slice() == self.cpuid {
            return Ok(());
        }
        Err(VmmError::Config(
            "the snapshot's CPUID is another one".to_owned(),
        ))
    }

    /// Reverts a vCPU with the same CPUID to this state. The vCPU must be outside the guest and
    /// have no unfinished exit.
    pub fn revert(&self, vcpu: &VcpuFd) -> Result<(), VmmError> {
        // KVM requires this order. The local APIC follows `sregs`, which contain its base address.
        // MSRs follow the local APIC, which determines the mode of the deadline timer. Events are
        // last because setting `regs` clears a pending exception.
        vcpu.set_mp_state(self.mp_state)
            .map_err(failed("KVM_SET_MP_STATE"))?;
        vcpu.set_sregs(&self.sregs)
            .map_err(failed("KVM_SET_SREGS"))?;
        vcpu.set_regs(&self.regs).map_err(failed("KVM_SET_REGS"))?;
        vcpu.set_xcrs(&self.xcrs).map_err(failed("KVM_SET_XCRS"))?;
        // SAFETY: the buffer has the fixed size. No dynamically enabled feature needs a larger
        // buffer.
        unsafe { vcpu.set_xsave(&self.xsave) }.map_err(failed("KVM_SET_XSAVE"))?;
        vcpu.set_debug_regs(&self.debugregs)
            .map_err(failed("KVM_SET_DEBUGREGS"))?;
        vcpu.set_lapic(&self.lapic)
            .map_err(failed("KVM_SET_LAPIC"))?;
        restore_msrs(vcpu, &self.msrs)?;
        vcpu.set_vcpu_events(&self.events)
            .map_err(failed("KVM_SET_VCPU_EVENTS"))
    }
}

/// Reads the model-specific registers in `list`.
fn save_msrs(vcpu: &VcpuFd, list: &[u32]) -> Result<Vec<kvm_msr_entry>, VmmError> {
    let entry = |&index: &u32| kvm_msr_entry {
        index,
        ..Default::default()
    };
    let mut entries: Vec<kvm_msr_entry> = list.iter().map(entry).collect();
    let mut saved = Vec::with_capacity(entries.len());
    // KVM stops at the first register that it cannot read. The register is skipped, and reading
    // continues after it.
    while !entries.is_empty() {
        let mut batch = Msrs::from_entries(&entries)
            .map_err(|e| VmmError::host("KVM_GET_MSRS", format!("{e:?}")))?;
        let count = vcpu.get_msrs(&mut batch).map_err(failed("KVM_GET_MSRS"))?;
        saved.extend(batch.as_slice().iter().take(count).copied());
        entries.drain(..(count + 1).min(entries.len()));
    }
    Ok(saved)
}

/// Sets model-specific registers. A register that this host does not have must be zero.
fn restore_msrs(vcpu: &VcpuFd, mut remaining: &[kvm_msr_entry]) -> Result<(), VmmError> {
    while !remaining.is_empty() {
        let batch = Msrs::from_entries(remaining)
            .map_err(|e| VmmError::host("KVM_SET_MSRS", format!("{e:?}")))?;
        let count = vcpu.set_msrs(&batch).map_err(failed("KVM_SET_MSRS"))?;
        remaining = remaining.get(count..).unwrap_or_default();
        // KVM stops at the first register that it cannot write. The failure is ignored if the saved
        // value is zero, because this is the value after a reset.
        let Some((refused, others)) = remaining.split_first() else {
            return Ok(());
        };
        if refused.data != 0 {
            return Err(VmmError::host(
                "KVM_SET_MSRS",
                format!(
                    "this host refuses register {:#x} = {:#x}",
                    refused.index, refused.data
                ),
            ));
        }
        remaining = others;
    }
    Ok(())
}
