//! Egress block: while it is active, no packet leaves the guest.
//!
//! The agent activates it while it resets the TCP connections of a clone (a guest restored from a
//! snapshot of another sandbox, its parent). A reset makes the kernel send a packet to the peer.
//! The peer must not receive it, because it still communicates with the parent over this
//! connection.
//!
//! The block is a BPF filter on the root control group. It drops every packet of every socket,
//! except packets to a loopback interface. The filter does not depend on addresses, routes or names
//! of interfaces. The kernel removes the filter when the descriptor of its link is closed, so a
//! crash of the agent cannot leave it active.

use crate::sys;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

/// Commands of bpf(2), `linux/bpf.h`.
const PROG_LOAD: libc::c_int = 5;
const LINK_CREATE: libc::c_int = 28;
/// `BPF_PROG_TYPE_CGROUP_SKB`
const CGROUP_SKB: u32 = 8;
/// `BPF_CGROUP_INET_EGRESS`
const EGRESS: u32 = 1;

/// Encodes a `struct bpf_insn`: code, registers (source in the upper half, destination in the lower
/// half), offset, immediate value.
const fn instruction(code: u8, registers: u8, offset: i16, value: i32) -> [u8; 8] {
    let [o0, o1] = offset.to_le_bytes();
    let [v0, v1, v2, v3] = value.to_le_bytes();
    [code, registers, o0, o1, v0, v1, v2, v3]
}

/// Program of the filter. It returns 1 (pass) for packets to interface 1, which is `lo` in every
/// namespace, and 0 (drop) for all others.
const FILTER: [[u8; 8]; 4] = [
    // r0 = context->ifindex, 40 bytes into struct __sk_buff
    instruction(0x61, 0x10, 40, 0),
    // if r0 == 1, skip the next instruction
    instruction(0x15, 0x00, 1, 1),
    // r0 = 0
    instruction(0xb7, 0x00, 0, 0),
    // return r0
    instruction(0x95, 0x00, 0, 0),
];

/// Beginning of `union bpf_attr` for [`PROG_LOAD`].
#[repr(C)]
struct ProgLoadAttr {
    kind: u32,
    /// Number of instructions.
    instructions: u32,
    /// Address of the first instruction.
    first: u64,
    /// Address of the name of the license, which the kernel requires.
    license: u64,
    /// Level, size and address of a log. Zero: no log is requested.
    log: [u64; 2],
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    attach: u32,
}

/// Beginning of `union bpf_attr` for [`LINK_CREATE`].
#[repr(C)]
struct LinkCreateAttr {
    /// Descriptor of the program.
    program: u32,
    /// Descriptor of the control group.
    target: u32,
    attach: u32,
    flags: u32,
}

/// Active egress block. No packet leaves the guest until this value is dropped.
pub struct EgressBlock {
    _link: OwnedFd,
}

impl EgressBlock {
    /// Activates the egress block.
    pub fn new() -> io::Result<Self> {
        let root = std::fs::File::options()
            .read(true)
            .custom_flags(libc::O_DIRECTORY | libc::O_CLOEXEC)
            .open("/sys/fs/cgroup")?;
        let program = bpf(
            PROG_LOAD,
            &ProgLoadAttr {
                kind: CGROUP_SKB,
                instructions: FILTER.len() as u32,
                first: FILTER.as_ptr() as u64,
                license: c"Apache-2.0".as_ptr() as u64,
                log: [0; 2],
                kernel_version: 0,
                flags: 0,
                name: *b"jiffy_egress\0\0\0\0",
                interface: 0,
                attach: EGRESS,
            },
        )?;
        let link = bpf(
            LINK_CREATE,
            &LinkCreateAttr {
                program: program.as_raw_fd().cast_unsigned(),
                target: root.as_raw_fd().cast_unsigned(),
                attach: EGRESS,
                flags: 0,
            },
        )?;
        // The program's descriptor is closed here: the link refers to the program.
        Ok(Self { _link: link })
    }
}

/// Makes a call of bpf(2) that returns a close-on-exec descriptor.
fn bpf<T>(command: libc::c_int, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: `attributes` has the layout of union bpf_attr for this command, and all its pointers
    // are valid during the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(attributes),
            size_of::<T>(),
        )
    };
    sys::owned(libc::c_int::try_from(result).unwrap_or(-1))
}
