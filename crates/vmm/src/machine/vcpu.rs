//! vCPUs: their initial state, the threads that run them, and their saved state.

mod run;
mod state;
mod threads;

pub use run::VcpuEnd;
pub use state::{VcpuState, msr_list};
pub use threads::Vcpus;

use crate::boot::{BOOT_GDT, BOOT_STACK, PML4_START, ZERO_PAGE_START};
use crate::error::VmmError;
use kvm_bindings::{
    CpuId, KVM_MP_STATE_UNINITIALIZED, Msrs, kvm_fpu, kvm_lapic_state, kvm_mp_state, kvm_msr_entry,
    kvm_regs, kvm_segment,
};
use kvm_ioctls::VcpuFd;

const CR0_BOOT: u64 = 0x8005_0033; // PE MP ET NE WP AM PG
const CR4_PAE: u64 = 0x20;
const EFER_LONG_MODE: u64 = 0x500; // LME LMA
/// `IA32_MISC_ENABLE`, and its bit that enables fast string operations.
const MSR_MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
/// Offsets of the registers for the two interrupt pins of a local APIC.
const LAPIC_LVT_LINT0: usize = 0x350;
const LAPIC_LVT_LINT1: usize = 0x360;
/// Delivery modes of a pin (bits 8 to 10).
const LVT_EXTINT: u32 = 0x700;
const LVT_NMI: u32 = 0x400;
/// Bits of CPUID leaf 1, ECX.
const CPUID_HYPERVISOR: u32 = 1 << 31;
const CPUID_TSC_DEADLINE: u32 = 1 << 24;

/// Returns the CPUID of vCPU `id` of `vcpus`: the supported features with this machine's topology.
pub fn cpuid(supported: &CpuId, id: u8, vcpus: u8) -> CpuId {
    let mut table = supported.clone();
    for entry in table.as_mut_slice() {
        match entry.function {
            1 => {
                // EBX: initial APIC id (bits 24 to 31) and number of logical processors (bits 16 to
                // 23).
                entry.ebx =
                    (entry.ebx & 0x0000_ffff) | u32::from(vcpus) << 16 | u32::from(id) << 24;
                // KVM's list may omit the deadline timer, which requires that KVM emulates the
                // local APIC (Documentation/virt/kvm/api.rst, KVM_GET_SUPPORTED_CPUID).
                entry.ecx |= CPUID_HYPERVISOR | CPUID_TSC_DEADLINE;
            }
            // Extended topology: EDX is the x2APIC id of the processor that executes CPUID.
            0xb | 0x1f => entry.edx = u32::from(id),
            // AMD: extended APIC id.
            0x8000_001e => entry.eax = u32::from(id),
            _ => {}
        }
    }
    table
}

/// Sets the initial state of a new vCPU. vCPU 0 gets the state that the kernel's entry point
/// expects. All other vCPUs wait for the interrupts INIT and SIPI.
pub fn set_up(vcpu: &VcpuFd, id: u8, cpuid: &CpuId, entry: u64) -> Result<(), VmmError> {
    let failed = |e: kvm_ioctls::Error| VmmError::host("setting up a vCPU", e);
    vcpu.set_cpuid2(cpuid).map_err(failed)?;
    let msrs = Msrs::from_entries(&[kvm_msr_entry {
        index: MSR_MISC_ENABLE,
        data: MISC_ENABLE_FAST_STRING,
        ..Default::default()
    }])
    .map_err(|e| VmmError::host("setting up a vCPU", format!("{e:?}")))?;
    // Ignore the error: some hosts do not support this register, and the guest runs without it.
    let _ = vcpu.set_msrs(&msrs);
    // FPU state as after FNINIT, and MXCSR as after a reset: all exceptions are masked.
    let fpu = kvm_fpu {
        fcw: 0x37f,
        mxcsr: 0x1f80,
        ..Default::default()
    };
    vcpu.set_fpu(&fpu).map_err(failed)?;
    let mut lapic = vcpu.get_lapic().map_err(failed)?;
    // The PC's wiring: LINT0 receives external interrupts, and LINT1 receives NMIs.
    set_lapic_register(&mut lapic, LAPIC_LVT_LINT0, LVT_EXTINT);
    set_lapic_register(&mut lapic, LAPIC_LVT_LINT1, LVT_NMI);
    vcpu.set_lapic(&lapic).map_err(failed)?;
    // The guest's kernel starts all vCPUs except vCPU 0 by sending INIT and SIPI to their APICs.
    if id != 0 {
        return vcpu
            .set_mp_state(kvm_mp_state {
                mp_state: KVM_MP_STATE_UNINITIALIZED,
            })
            .map_err(failed);
    }
    set_boot_registers(vcpu, entry).map_err(failed)
}

fn set_lapic_register(lapic: &mut kvm_lapic_state, at: usize, value: u32) {
    for (to, from) in lapic.regs[at..].iter_mut().zip(value.to_le_bytes()) {
        *to = i8::from_le_bytes([from]);
    }
}

/// Sets the registers for the 64-bit entry point of a Linux kernel: long mode, paging and flat
/// segments.
fn set_boot_registers(vcpu: &VcpuFd, entry: u64) -> Result<(), kvm_ioctls::Error> {
    let mut sregs = vcpu.get_sregs()?;
    // Flat segments that match the entries of `BOOT_GDT`. Type 3 is writable data. Type 11 is
    // readable code or, for the task state, a busy 64-bit segment.
    let data = kvm_segment {
        limit: u32::MAX,
        selector: 0x18,
        type_: 3,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    sregs.cs = kvm_segment {
        selector: 0x10,
        type_: 11,
        db: 0,
        l: 1,
        ..data
    };
    sregs.ds = data;
    sregs.es = data;
    sregs.fs = data;
    sregs.gs = data;
    sregs.ss = data;
    sregs.tr = kvm_segment {
        limit: 0xf_ffff,
        selector: 0x20,
        type_: 11,
        present: 1,
        g: 1,
        ..Default::default()
    };
    sregs.gdt.base = BOOT_GDT.start;
    // Five entries of 8 bytes. The limit is the offset of the last byte.
    sregs.gdt.limit = 39;
    // No IDT: interrupts are disabled until the kernel loads its own.
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    sregs.cr0 = CR0_BOOT;
    sregs.cr3 = PML4_START;
    sregs.cr4 = CR4_PAE;
    sregs.efer = EFER_LONG_MODE;
    vcpu.set_sregs(&sregs)?;
    vcpu.set_regs(&kvm_regs {
        rip: entry,
        rsp: BOOT_STACK,
        rbp: BOOT_STACK,
        rsi: ZERO_PAGE_START,
        rflags: 2,
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvm_bindings::kvm_cpuid_entry2;

    #[test]
    fn each_vcpu_gets_its_own_apic_id_and_a_deadline_timer() {
        let leaf = |function| kvm_cpuid_entry2 {
            function,
            ebx: 0xaabb_ccdd,
            ..Default::default()
        };
        let supported = CpuId::from_entries(&[leaf(1), leaf(0xb)]).unwrap();
        let table = cpuid(&supported, 3, 4);
        let [one, topology] = table.as_slice() else {
            panic!()
        };
        assert_eq!(one.ebx, 0x0304_ccdd);
        assert_eq!(one.ecx, CPUID_HYPERVISOR | CPUID_TSC_DEADLINE);
        assert_eq!(topology.edx, 3);
    }
}
