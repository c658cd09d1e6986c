//! Engines of one host: `microvm` and `gvisor` with the programs, templates and snapshots of a data
//! directory, each as a [`jiffy_engine_api::Engine`] and both as one ([`HostEngine`]).

mod agent_identity;
mod cpu_level;
mod data_dir_gc;
mod engine_choice;
mod guest_nic;
mod gvisor_engine;
mod host;
mod host_engine;
mod imported_files;
mod microvm_engine;
mod programs;
mod rehearsal;
mod restore_policy;
mod template_cache;
mod vm_agent;

pub use data_dir_gc::OLD_LOGS;
pub use engine_choice::{EngineChoice, EngineFacts};
pub use gvisor_engine::{GvisorEngine, GvisorGuest, UnassignedGvisorGuest};
pub use host::{CreateError, Host, HostError, PreparedTemplate, SandboxSpec};
pub use host_engine::{HostEngine, HostGuest, UnassignedHostGuest};
pub use microvm_engine::{LazyStore, MicroVmEngine, MicroVmGuest, UnassignedMicroVmGuest};
pub use programs::{ProgramError, Programs};
pub use restore_policy::{
    EngineCost, HostFile, HostFingerprint, KeepError, Percentiles, PolicyCost, PolicyInForce,
    PolicyReason, RestorePolicy, choose,
};
pub use vm_agent::agent;
