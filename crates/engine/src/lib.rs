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
    AfterSnapshot, DamagedChunk, Engine, EngineError, Guest, GuestHandle, GuestUsage, KeptGuest,
    SandboxIdentity, SnapshotTimes, UnassignedGuest, VerifiedSnapshot,
};
pub use end::ExitReason;
pub use mark::ProcessInstance;
pub use network::NetworkRules;
pub use size::{SandboxSize, SizeError};
pub use startup::{Readiness, ReadinessProbe, StartCommand, Startup};
