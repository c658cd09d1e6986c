//! The engines of a host, `microvm` and `gvisor`: both implement [`jiffy_engine_api::Engine`] with
//! the programs, templates and snapshots of a data directory. [`open_engines`] opens them.

mod agent_identity;
mod cpu_level;
mod data_dir_gc;
mod engine_choice;
mod guest_nic;
mod gvisor_engine;
mod host;
mod imported_files;
mod microvm_engine;
mod open;
mod programs;
mod rehearsal;
mod restore_policy;
mod template_cache;
mod vm_agent;

pub use data_dir_gc::OLD_LOGS;
pub use engine_choice::{EngineChoice, EngineFacts};
pub use host::{CreateError, Host, HostError, PreparedTemplate, SandboxSpec};
pub use microvm_engine::{LazyStore, MicroVmEngine};
pub use open::{open_engines, open_ephemeral_engine};
pub use programs::{ProgramError, Programs};
pub use restore_policy::{
    EngineCost, HostFile, HostFileError, HostFingerprint, Percentiles, PolicyCost, PolicyInForce,
    PolicyReason, RestorePolicy, choose,
};
pub use vm_agent::agent;
