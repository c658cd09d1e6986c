//! Interface between the host and isolation engines.

mod boot;
mod capabilities;
mod connections;
mod contract;
mod exit_reason;
mod network;
mod process_instance;
mod size;
mod startup;

pub use boot::{BootMode, BootReport};
pub use capabilities::{Capabilities, EngineDescription};
pub use connections::{
    ConnectionLog, ConnectionProtocol, ConnectionRecord, ConnectionRecords, MAX_CONNECTIONS,
    RefusalReason,
};
pub use contract::{
    AfterSnapshot, DamagedChunk, Engine, EngineError, Guest, GuestHandle, GuestUsage, KeptGuest,
    SandboxIdentity, SnapshotTimes, UnassignedGuest, VerifiedSnapshot,
};
pub use exit_reason::ExitReason;
pub use network::NetworkRules;
pub use process_instance::ProcessInstance;
pub use size::{SandboxSize, SizeError};
pub use startup::{Readiness, ReadinessProbe, StartCommand, Startup};
