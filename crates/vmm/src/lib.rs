//! `jiffy-vmm`: each process is one microVM. The binary only calls [`process::run`]. The rest is a
//! library, so that every device can be tested and fuzzed without KVM.
//!
//! The *controller*, usually the daemon, starts the process and sends requests over a socket, with
//! the crate `jiffy-microvm-engine`. A *spare* process is started in advance, before its guest is
//! known. docs/design-vmm.md explains threads, devices and snapshots.

/// Fails to compile if the size of a state struct changes. Such a struct is part of the snapshot
/// format. A change requires the following steps:
/// - Increase the version of its section in `snapshot/machine_state.rs`.
/// - Keep the old version readable, or announce in CHANGELOG.md that old snapshots are rejected.
/// - Add a golden snapshot: a stored snapshot of this version, which a test loads.
/// - Update the size last.
#[macro_export]
macro_rules! frozen_layout {
    ($state:ty, $bytes:expr) => {
        // The compiler's error message contains both sizes.
        const _: [(); $bytes] = [(); std::mem::size_of::<$state>()];
    };
}

pub mod allocator;
pub mod boot;
pub mod confined_thread;
pub mod control_socket;
pub mod error;
pub mod jail;
pub mod machine;
pub mod memory;
pub mod poll;
pub mod process;
pub mod seccomp;
pub mod snapshot;
pub mod virtio;

/// Guest memory type of all devices.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;
