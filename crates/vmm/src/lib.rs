//! `jiffy-vmm`: one process is one microVM. The binary is [`process::run`]; the rest is a library,
//! so that every device can be tested and fuzzed without KVM.

/// Fails to compile when a state struct changes its size. Such a struct is part of the snapshot
/// format. A change raises the version of its section in `snapshot/machine_state.rs`, keeps the old
/// one readable or says in CHANGELOG.md that old snapshots are refused, adds a golden snapshot, and
/// only then updates the size.
#[macro_export]
macro_rules! frozen_layout {
    ($state:ty, $bytes:expr) => {
        // The compiler's message names both sizes.
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

/// Guest memory, the type that all devices use.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;
