//! What the host and an isolation engine say to each other about a sandbox.

mod boot;
mod capabilities;
mod connections;
mod contract;
mod end;
mod mark;
mod network;
mod size;
mod startup;

pub use boot::{BootMode, BootReport};
pub use capabilities::{Capabilities, EngineDescription};
pub use connections::{Connection, ConnectionLog, Connections, MAX_CONNECTIONS, Protocol, Refusal};
pub use contract::{
    AfterSnapshot, DamagedPiece, Engine, EngineError, Guest, Handle, Orphan, SandboxIdentity,
    SnapshotTimes, UnassignedGuest, Usage, VerifiedSnapshot,
};
pub use end::SandboxEnd;
pub use mark::ProcessMark;
pub use network::NetworkRules;
pub use size::{SandboxSize, SizeError};
pub use startup::{Probe, Readiness, StartCommand, Startup};
