//! The machine: KVM objects, memory, devices and vCPUs put together from a configuration and descriptors.

pub mod bus;
pub mod ioapic;
pub mod legacy;
pub mod vcpu;

mod build;
mod cpu;
mod devices;
mod exits;
mod fds;
mod restore;
mod save;

pub use build::{Machine, build};
pub use devices::Slot;
pub(crate) use devices::{borrow, event, report};
pub use exits::ExitCounters;
pub use fds::Descriptors;
pub use restore::restore;
