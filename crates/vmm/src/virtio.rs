//! Virtio 1.2 devices and their common parts. A device never trusts a ring: addresses, lengths and
//! chains are bounded and checked at use, and a broken one ends in [`DeviceError`], never in a
//! panic.

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
