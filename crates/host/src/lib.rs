//! Life of sandboxes on one host: from a template's name and a size to a guest whose agent has answered.

mod admission;
mod card;
mod engine_choice;
mod gvisor_engine;
mod host;
mod host_engine;
mod identity;
mod journal;
mod journal_room;
mod litter;
mod metrics;
mod microvm_engine;
mod programs;
mod quota;
mod record;
mod rehearsal;
mod restore_policy;
mod sandboxes;
mod shelf;
mod site;
mod startup;
mod terms;
mod usage;

pub use admission::{HostFigures, Limits, Pressure, Promised, ReadHost, Shortage, ThisHost};
pub use engine_choice::{EngineChoice, EngineFacts, EngineName};
pub use gvisor_engine::{GVISOR, GvisorEngine, GvisorGuest, UnassignedGvisorGuest};
pub use host::{CreateError, Host, HostError, Prepared, SandboxSpec, usual_size};
pub use host_engine::{HostEngine, HostGuest, UnassignedHostGuest};
pub use identity::{IdentityError, new_id, new_token};
pub use journal::{Change, Journal, JournalError, JournalledSnapshot};
pub use litter::OLD_LOGS;
pub use metrics::{BootTimes, Figure, FigureFamily};
pub use microvm_engine::{MICROVM, MicroVmEngine, MicroVmGuest, UnassignedMicroVmGuest, agent};
pub use programs::{ProgramError, Programs};
pub use quota::{
    Bytes, OwnerQuota, QuotaAmount, QuotaHold, QuotaPermit, QuotaRefusal, QuotaRequest, Reserving,
};
pub use record::{Operation, Purpose, SandboxRecord, SnapshotRecord, State};
pub use restore_policy::{
    EngineCost, HostFile, HostFingerprint, KeepError, PolicyCost, PolicyInForce, PolicyReason,
    RestorePolicy, Spread, choose,
};
pub use sandboxes::{
    AwakeTime, Child, CreateSpec, ErrorKind, ForkReport, MAX_RESTART_GRACE, MAX_SANDBOX_NAME,
    OperationError, Options, OwnerUsage, PoolSize, Sandboxes, Source, WakeOptions, WeakSandboxes,
};
pub use site::{
    MAX_AUTHORITIES_BYTES, MAX_HOST_AUTHORITIES_BYTES, MAX_NO_PROXY, MAX_PROXY_URL, SiteError,
    authorities, joined, proxy,
};
pub use startup::{StartupError, start_up};
pub use terms::{Network, OnTimeout, Terms};
pub use usage::Sample;
