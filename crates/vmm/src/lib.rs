//! `jiffy-vmm`: one process is one microVM. The binary is [`process::run`]; the rest is a library so that every
//! device can be tested and fuzzed without KVM.

pub mod boot;
pub mod error;
pub mod machine;
pub mod memory;
pub mod poll;
pub mod process;
pub mod seccomp;
pub mod virtio;

/// Guest memory as every device sees it.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;
