//! Everything that crosses a process or machine boundary inside Jiffy, in one place:
//!
//! * [`vm`]: host to `jiffy-vmm` and back, over a Unix `SOCK_SEQPACKET` socket, with descriptors.
//! * [`snapshot`]: the part of it that takes snapshots and restores them, and [`layer`]: the files that leaves.
//! * [`channel`]: how those messages travel.
//! * [`agent`]: the first words between host and guest agent, and the vsock ports they use.
//! * [`console`]: the shared ring that holds a guest's last console output.

pub mod agent;
pub mod channel;
pub mod console;
pub mod layer;
pub mod snapshot;
pub mod vm;
