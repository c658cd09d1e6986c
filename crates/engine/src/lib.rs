//! What the host and an isolation engine say to each other about a sandbox. Types only, no I/O.

mod boot;
mod contract;
mod end;
mod size;

pub use boot::{BootMode, BootReport};
pub use contract::{AfterSnapshot, Arrival, Engine, EngineError, Guest, Persona, SnapshotTimes};
pub use end::SandboxEnd;
pub use size::{SandboxSize, SizeError};
