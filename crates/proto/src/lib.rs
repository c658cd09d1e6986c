//! Protocols between Jiffy's processes and machines, and small definitions that several programs
//! share:
//!
//! * [`vm`]: messages between the host and `jiffy-vmm` over a Unix `SOCK_SEQPACKET` socket, with
//!   descriptors.
//! * [`snapshot`]: the part of these messages that concerns snapshots and restores.
//! * [`layer`]: the format of the files in snapshots.
//! * [`channel`]: transport of these messages.
//! * [`fetch`]: messages between a VMM with incomplete memory and the process that fetches the
//!   rest.
//! * [`agent`]: greeting between host and guest agent, and their vsock ports.
//! * [`file_lock`]: ranges of files that sandboxes lock.
//! * [`function`]: messages between the daemon and the process of a tenant's functions.
//! * [`internal`]: connections of functions and sandboxes to the control plane.
//! * [`cpu_level`]: CPU features that guests see.
//! * [`console`]: shared ring buffer with a guest's last console output.
//! * [`kernel`]: system calls that no library supports.
//! * [`page_scan`]: page scans of the kernel.
//! * [`panic`]: behaviour of all processes at a panic.
//! * [`process_mounts`]: mounts of a process of a guest.

pub mod agent;
pub mod channel;
pub mod console;
pub mod cpu_level;
pub mod fetch;
pub mod file_lock;
pub mod function;
pub mod internal;
pub mod kernel;
pub mod layer;
pub mod page_scan;
pub mod panic;
pub mod process_mounts;
pub mod snapshot;
pub mod vm;
