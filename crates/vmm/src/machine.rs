//! The machine: KVM objects, memory, devices and vCPUs, built from a configuration and descriptors.

pub mod bus;
pub mod ioapic;
pub mod legacy_ports;
mod memory_slots;
pub mod vcpu;

mod builder;
mod cpu_features;
mod cpu_level;
mod devices;
mod exit_counters;
mod fold;
mod kvm_vm;
mod lazy_layers;
mod received_fds;
mod restore;
mod rollback;
mod save;

pub use builder::{Machine, build};
pub use devices::EventSlot;
pub(crate) use devices::{borrow_eventfd, new_eventfd, report_device};
pub use exit_counters::ExitCounters;
pub(crate) use fold::adjacent;
#[cfg(test)]
pub(crate) use fold::file_identity;
pub use kvm_vm::{KvmVm, VCPUS_AHEAD};
pub use received_fds::ReceivedFds;
pub use restore::restore;
pub use rollback::RollbackTarget;
