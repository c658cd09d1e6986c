//! Costs of leaving a guest, measured with a minimal virtual machine: one page of code and no
//! devices.

use super::pages::Mapping;
use super::{Cost, batches};
use kvm_bindings::{kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use std::time::Instant;

/// Memory of the guest in bytes.
const MEMORY: usize = 2 << 20;
/// Page tables of the guest, which map the memory to identical addresses.
const TABLES: [u64; 3] = [0x1000, 0x2000, 0x3000];
/// Address of the guest's code.
const CODE: u64 = 0x8000;
/// Number of exits per batch.
const EXITS: u32 = 1000;

/// Flags of a page table entry that refers to a table: present, writable.
const TABLE: u64 = 0b11;
/// Flags of a page table entry for a page of 2 MiB: present, writable, large.
const LARGE_PAGE: u64 = 0b1000_0011;
/// Value of CR0: protected mode, extension type, numeric errors, write protection, paging.
const CR0: u64 = 0x8001_0031;
/// Value of CR4: physical address extension.
const CR4: u64 = 1 << 5;
/// Value of EFER: long mode, enabled and active.
const EFER: u64 = 0x500;
/// Value of RFLAGS: only the reserved bit, which is always set.
const RFLAGS: u64 = 2;

/// Reads the APIC base register, which KVM emulates, `EXITS` times; then exits to the VMM; then
/// repeats.
const READS: [u8; 20] = [
    0xbe, 0xe8, 0x03, 0, 0, // mov esi, EXITS
    0xb9, 0x1b, 0, 0, 0, // mov ecx, IA32_APIC_BASE
    0x0f, 0x32, // rdmsr
    0xff, 0xce, // dec esi
    0x75, 0xfa, // jnz rdmsr
    0xe6, 0x80, // out 0x80, al
    0xeb, 0xec, // jmp to the beginning
];
/// Exits to the VMM in a loop.
const OUTPUTS: [u8; 4] = [
    0xe6, 0x80, // out 0x80, al
    0xeb, 0xfc, // jmp to the beginning
];

/// Measures an exit that KVM handles itself.
pub(super) fn in_kernel() -> Result<Cost, String> {
    let mut guest = Guest::new(&READS)?;
    // The first run populates the guest's memory and is not measured.
    guest.run()?;
    batches(EXITS, || {
        let began = Instant::now();
        guest.run()?;
        Ok(began.elapsed())
    })
}

/// Measures an exit that the VMM handles.
pub(super) fn to_vmm() -> Result<Cost, String> {
    let mut guest = Guest::new(&OUTPUTS)?;
    guest.run()?;
    batches(EXITS, || {
        let began = Instant::now();
        for _ in 0..EXITS {
            guest.run()?;
        }
        Ok(began.elapsed())
    })
}

/// Guest. Its virtual processor is dropped before its memory.
struct Guest {
    vcpu: VcpuFd,
    _memory: Mapping,
}

impl Guest {
    /// Creates a virtual machine with one processor in 64-bit mode, which executes `code` without
    /// an operating system.
    fn new(code: &[u8]) -> Result<Self, String> {
        let failed = |e: kvm_ioctls::Error| format!("KVM: {e}");
        let mut memory = Mapping::anonymous(MEMORY)?;
        // One large page maps the whole memory, so that the guest has no page faults of its own.
        for (at, entry) in
            TABLES
                .into_iter()
                .zip([TABLES[1] | TABLE, TABLES[2] | TABLE, LARGE_PAGE])
        {
            put(&mut memory, at, &entry.to_le_bytes());
        }
        put(&mut memory, CODE, code);
        let vm = Kvm::new().and_then(|kvm| kvm.create_vm()).map_err(failed)?;
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: MEMORY as u64,
            userspace_addr: memory.start().as_ptr() as u64,
        };
        // SAFETY: the region is a mapping of this length, which outlives the virtual processor.
        unsafe { vm.set_user_memory_region(region) }.map_err(failed)?;
        // The guest starts in 64-bit mode, without a kernel that would switch to it.
        let vcpu = vm.create_vcpu(0).map_err(failed)?;
        let mut registers = vcpu.get_sregs().map_err(failed)?;
        // Types of segments: 3 is data (read, write, accessed), 11 is code (execute, read,
        // accessed) or a busy TSS.
        let data = segment(0x18, 3);
        registers.cs = segment(0x10, 11);
        // A 64-bit code segment must not have the default size of 32 bits.
        registers.cs.l = 1;
        registers.cs.db = 0;
        for each in [
            &mut registers.ds,
            &mut registers.es,
            &mut registers.fs,
            &mut registers.gs,
            &mut registers.ss,
        ] {
            *each = data;
        }
        // KVM does not enter a guest in long mode without a busy task state segment.
        registers.tr = kvm_segment {
            s: 0,
            db: 0,
            ..segment(0x20, 11)
        };
        registers.cr0 = CR0;
        registers.cr3 = TABLES[0];
        registers.cr4 = CR4;
        registers.efer = EFER;
        vcpu.set_sregs(&registers).map_err(failed)?;
        let mut registers = vcpu.get_regs().map_err(failed)?;
        registers.rip = CODE;
        registers.rflags = RFLAGS;
        vcpu.set_regs(&registers).map_err(failed)?;
        Ok(Self {
            vcpu,
            _memory: memory,
        })
    }

    /// Runs the guest until it exits to the VMM.
    fn run(&mut self) -> Result<(), String> {
        match self.vcpu.run() {
            Ok(VcpuExit::IoOut(0x80, _)) => Ok(()),
            Ok(other) => Err(format!("unexpected KVM exit {other:?}")),
            Err(e) => Err(format!("KVM cannot run the guest: {e}")),
        }
    }
}

/// Copies bytes to a guest address.
fn put(memory: &mut Mapping, at: u64, bytes: &[u8]) {
    let at = usize::try_from(at).unwrap_or(usize::MAX);
    let room = memory.bytes().get_mut(at..).unwrap_or_default();
    room.iter_mut()
        .zip(bytes)
        .for_each(|(to, from)| *to = *from);
}

/// Returns a flat segment: base 0, and a limit of 4 GiB.
fn segment(selector: u16, kind: u8) -> kvm_segment {
    kvm_segment {
        limit: 0xffff_ffff,
        selector,
        type_: kind,
        present: 1,
        s: 1,
        g: 1,
        db: 1,
        ..kvm_segment::default()
    }
}
