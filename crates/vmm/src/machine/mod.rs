//! The machine: KVM objects, memory, devices and vCPUs put together from a [`VmConfig`] and descriptors.

pub mod bus;
pub mod ioapic;
pub mod legacy;
pub mod vcpu;

mod fds;

pub use fds::Descriptors;
