//! Everything that crosses a process or machine boundary inside Jiffy, in one place:
//!
//! * [`vm`]: host to `jiffy-vmm` and back, over a Unix `SOCK_SEQPACKET` socket, with descriptors.
//! * [`channel`]: how those messages travel.
//! * [`agent`]: the first words between host and guest agent, and the vsock ports they use.
//! * [`console`]: the shared ring that holds a guest's last console output.

pub mod agent;
pub mod channel;
pub mod console;
pub mod vm;
