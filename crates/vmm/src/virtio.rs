//! Virtio 1.2 devices and their common parts. A device never trusts a ring: addresses, lengths and
//! chains are checked when they are used. An invalid ring causes a [`DeviceError`], never a panic.

pub mod balloon;
pub mod blk;
pub mod device;
pub mod mmio;
pub mod net;
pub mod rng;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod token_bucket;
pub mod vsock;

pub use device::{Activation, DeviceError, Interrupt, VirtioDevice};
