//! Life of sandboxes on one host: from a template's name and a size to a guest whose agent has
//! answered.

mod admission;
mod data_dir_gc;
mod engine_choice;
mod guest_nic;
mod gvisor_engine;
mod host;
mod host_engine;
mod identity;
mod journal;
mod journal_space;
mod metrics;
mod microvm_engine;
mod programs;
mod quota;
mod records;
mod rehearsal;
mod restore_policy;
mod sandbox_settings;
mod sandboxes;
mod site;
mod startup;
mod template_cache;
mod usage;

pub use admission::{
    HostFigures, HostLimits, HostReader, KernelReader, Pressure, PromisedResources, Shortage,
};
pub use data_dir_gc::OLD_LOGS;
pub use engine_choice::{EngineChoice, EngineFacts, EngineName};
pub use gvisor_engine::{GVISOR, GvisorEngine, GvisorGuest, UnassignedGvisorGuest};
pub use host::{CreateError, Host, HostError, PreparedTemplate, SandboxSpec, usual_size};
pub use host_engine::{HostEngine, HostGuest, UnassignedHostGuest};
pub use identity::{IdentityError, new_id, new_token};
pub use journal::{Journal, JournalChange, JournalError, JournalledSnapshot};
pub use metrics::{BootTimes, Figure, FigureFamily};
pub use microvm_engine::{MICROVM, MicroVmEngine, MicroVmGuest, UnassignedMicroVmGuest, agent};
pub use programs::{ProgramError, Programs};
pub use quota::{
    Bytes, OwnerQuota, QuotaAmount, QuotaHold, QuotaPermit, QuotaRefusal, QuotaRequest, Reserving,
};
pub use records::{SandboxOperation, SandboxRecord, SandboxState, SnapshotPurpose, SnapshotRecord};
pub use restore_policy::{
    EngineCost, HostFile, HostFingerprint, KeepError, Percentiles, PolicyCost, PolicyInForce,
    PolicyReason, RestorePolicy, choose,
};
pub use sandbox_settings::{NetworkSettings, OnTimeout, SandboxSettings};
pub use sandboxes::{
    AwakeTime, CreateSpec, ErrorKind, ForkChild, ForkReport, HostOptions, MAX_RESTART_GRACE,
    MAX_SANDBOX_NAME, OperationError, OwnerUsage, PoolSize, SandboxSource, Sandboxes, WakeOptions,
    WeakSandboxes,
};
pub use site::{
    MAX_AUTHORITIES_BYTES, MAX_HOST_AUTHORITIES_BYTES, MAX_NO_PROXY, MAX_PROXY_URL, SiteError,
    authorities, joined, proxy,
};
pub use startup::{StartupError, start_up};
pub use usage::UsageSample;
