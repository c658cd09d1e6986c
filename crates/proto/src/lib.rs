//! Protocols between Jiffy's processes and machines:
//!
//! * [`vm`]: host to `jiffy-vmm` and back, over a Unix `SOCK_SEQPACKET` socket, with descriptors.
//! * [`snapshot`]: its part for snapshots and restores, and [`layer`]: the files that these leave.
//! * [`channel`]: transport of those messages.
//! * [`fetch`]: a VMM whose memory has not all arrived, to the process that gets it.
//! * [`agent`]: greeting between host and guest agent, and their vsock ports.
//! * [`function`]: daemon to the process of a tenant's functions.
//! * [`internal`]: connections of functions and sandboxes to the control plane.
//! * [`cpu_level`]: features of the processor that guests see.
//! * [`console`]: shared ring with a guest's last console output.
//! * [`kernel`]: kernel calls that no library has.
//! * [`page_scan`]: page scans of the kernel.
//! * [`panic`]: the same end of all of them.

pub mod agent;
pub mod channel;
pub mod console;
pub mod cpu_level;
pub mod fetch;
pub mod function;
pub mod internal;
pub mod kernel;
pub mod layer;
pub mod page_scan;
pub mod panic;
pub mod snapshot;
pub mod vm;
