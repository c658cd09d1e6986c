//! `ioctl` requests that confined threads of a VMM may make.
//!
//! Requests that modify state affect only the guest's registers, interrupts, clock and memory, and
//! the offloads of its TAP device. Most of them are needed for rollbacks. All other requests kill
//! the process. These include other requests of KVM (new machines, vCPUs, devices, another CPUID),
//! and all requests of other drivers, sockets and terminals.

use crate::snapshot::userfaultfd;
use kvm_bindings::{
    kvm_clock_data, kvm_cpuid2, kvm_debugregs, kvm_irq_routing, kvm_lapic_state, kvm_mp_state,
    kvm_msrs, kvm_regs, kvm_sregs, kvm_userspace_memory_region, kvm_vcpu_events, kvm_xcrs,
    kvm_xsave,
};

/// Type of KVM's requests (include/uapi/linux/kvm.h).
const KVMIO: u8 = 0xae;

/// Request that a kind of thread may make.
#[derive(Debug, Clone, Copy)]
pub struct IoctlRequest {
    /// Name of the constant in the kernel's headers.
    pub name: &'static str,
    /// Request number, of which the kernel reads 32 bits.
    pub number: u32,
}

/// Builds a request number from direction, type, number and argument size
/// (include/uapi/asm-generic/ioctl.h).
const fn request(direction: u32, kind: u8, number: u8, size: usize) -> u32 {
    assert!(size < 1 << 14);
    #[expect(
        clippy::cast_possible_truncation,
        reason = "sizes are 14 bits, as asserted"
    )]
    let size = size as u32;
    direction << 30 | size << 16 | (kind as u32) << 8 | number as u32
}

/// Directions of a request's argument: no argument, read by the kernel, written by the kernel.
const DIRECTION_NONE: u32 = 0;
const DIRECTION_WRITE: u32 = 1;
const DIRECTION_READ: u32 = 2;

macro_rules! requests {
    ($($name:literal = $direction:expr, $kind:expr, $number:expr, $size:expr;)*) => {
        &[$(IoctlRequest {
            name: $name,
            number: request($direction, $kind, $number, $size),
        }),*]
    };
}

/// Requests of threads that run vCPUs. The filter compares in this order. `KVM_RUN` is first
/// because nearly all requests are `KVM_RUN`.
pub const VCPU_IOCTLS: &[IoctlRequest] = requests![
    "KVM_RUN" = DIRECTION_NONE, KVMIO, 0x80, 0;
    "KVM_KVMCLOCK_CTRL" = DIRECTION_NONE, KVMIO, 0xad, 0;
    "KVM_SET_GSI_ROUTING" = DIRECTION_WRITE, KVMIO, 0x6a, size_of::<kvm_irq_routing>();
    "TUNSETOFFLOAD" = DIRECTION_WRITE, b'T', 208, size_of::<libc::c_uint>();
    "KVM_GET_REGS" = DIRECTION_READ, KVMIO, 0x81, size_of::<kvm_regs>();
    "KVM_GET_SREGS" = DIRECTION_READ, KVMIO, 0x83, size_of::<kvm_sregs>();
    "KVM_GET_MSRS" = DIRECTION_READ | DIRECTION_WRITE, KVMIO, 0x88, size_of::<kvm_msrs>();
    "KVM_GET_LAPIC" = DIRECTION_READ, KVMIO, 0x8e, size_of::<kvm_lapic_state>();
    "KVM_GET_CPUID2" = DIRECTION_READ | DIRECTION_WRITE, KVMIO, 0x91, size_of::<kvm_cpuid2>();
    "KVM_GET_MP_STATE" = DIRECTION_READ, KVMIO, 0x98, size_of::<kvm_mp_state>();
    "KVM_GET_VCPU_EVENTS" = DIRECTION_READ, KVMIO, 0x9f, size_of::<kvm_vcpu_events>();
    "KVM_GET_DEBUGREGS" = DIRECTION_READ, KVMIO, 0xa1, size_of::<kvm_debugregs>();
    "KVM_GET_XSAVE" = DIRECTION_READ, KVMIO, 0xa4, size_of::<kvm_xsave>();
    "KVM_GET_XCRS" = DIRECTION_READ, KVMIO, 0xa6, size_of::<kvm_xcrs>();
    "KVM_SET_MSRS" = DIRECTION_WRITE, KVMIO, 0x89, size_of::<kvm_msrs>();
    "KVM_SET_REGS" = DIRECTION_WRITE, KVMIO, 0x82, size_of::<kvm_regs>();
    "KVM_SET_SREGS" = DIRECTION_WRITE, KVMIO, 0x84, size_of::<kvm_sregs>();
    "KVM_SET_LAPIC" = DIRECTION_WRITE, KVMIO, 0x8f, size_of::<kvm_lapic_state>();
    "KVM_SET_MP_STATE" = DIRECTION_WRITE, KVMIO, 0x99, size_of::<kvm_mp_state>();
    "KVM_SET_VCPU_EVENTS" = DIRECTION_WRITE, KVMIO, 0xa0, size_of::<kvm_vcpu_events>();
    "KVM_SET_DEBUGREGS" = DIRECTION_WRITE, KVMIO, 0xa2, size_of::<kvm_debugregs>();
    "KVM_SET_XSAVE" = DIRECTION_WRITE, KVMIO, 0xa5, size_of::<kvm_xsave>();
    "KVM_SET_XCRS" = DIRECTION_WRITE, KVMIO, 0xa7, size_of::<kvm_xcrs>();
];

/// Requests of the event loop.
pub const MAIN_IOCTLS: &[IoctlRequest] = requests![
    "KVM_GET_CLOCK" = DIRECTION_READ, KVMIO, 0x7c, size_of::<kvm_clock_data>();
    // The argument is `struct pm_scan_arg` (include/uapi/linux/fs.h).
    "PAGEMAP_SCAN" = DIRECTION_READ | DIRECTION_WRITE, b'f', 16, 96;
    "KVM_SET_CLOCK" = DIRECTION_WRITE, KVMIO, 0x7b, size_of::<kvm_clock_data>();
    "KVM_SET_GSI_ROUTING" = DIRECTION_WRITE, KVMIO, 0x6a, size_of::<kvm_irq_routing>();
    "KVM_SET_USER_MEMORY_REGION" = DIRECTION_WRITE, KVMIO, 0x46,
        size_of::<kvm_userspace_memory_region>();
    "TUNSETOFFLOAD" = DIRECTION_WRITE, b'T', 208, size_of::<libc::c_uint>();
];

/// Additional request of the event loop of a VM that has no missing memory. The userfaultfd of such
/// a VM receives no faults of the kernel, so the event loop cannot delay the kernel.
pub const TRACKING_IOCTLS: &[IoctlRequest] = &[IoctlRequest {
    name: "UFFDIO_REGISTER",
    number: userfaultfd::UFFDIO_REGISTER,
}];

/// Requests of the thread that fills missing memory. No request changes a present page.
pub const FAULT_IOCTLS: &[IoctlRequest] = &[
    IoctlRequest {
        name: "UFFDIO_COPY",
        number: userfaultfd::UFFDIO_COPY,
    },
    IoctlRequest {
        name: "UFFDIO_ZEROPAGE",
        number: userfaultfd::UFFDIO_ZEROPAGE,
    },
    IoctlRequest {
        name: "UFFDIO_WAKE",
        number: userfaultfd::UFFDIO_WAKE,
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_numbers_of_the_kernels_headers() {
        let of = |name: &str| {
            let all = VCPU_IOCTLS.iter().chain(MAIN_IOCTLS);
            all.clone().find(|r| r.name == name).unwrap().number
        };
        assert_eq!(of("KVM_RUN"), 0xae80);
        assert_eq!(of("KVM_SET_GSI_ROUTING"), 0x4008_ae6a);
        assert_eq!(of("TUNSETOFFLOAD"), 0x4004_54d0);
        assert_eq!(of("KVM_GET_REGS"), 0x8090_ae81);
        assert_eq!(of("KVM_GET_MSRS"), 0xc008_ae88);
        assert_eq!(of("KVM_GET_XSAVE"), 0x9000_aea4);
        assert_eq!(of("KVM_GET_CLOCK"), 0x8030_ae7c);
        assert_eq!(of("KVM_SET_REGS"), 0x4090_ae82);
        assert_eq!(of("KVM_SET_USER_MEMORY_REGION"), 0x4020_ae46);
        assert_eq!(of("PAGEMAP_SCAN"), 0xc060_6610);
    }
}
