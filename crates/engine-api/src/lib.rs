//! Interface between the sandbox manager and the isolation engines, and types that both sides use:
//! sizes, ids, names, reports.

mod boot;
mod burst_memory;
mod child_messages;
mod clock;
mod connections;
mod engine;
mod engine_error;
mod engine_name;
mod engines;
mod exit_reason;
mod first_use;
mod guest;
mod guest_stream;
mod guest_usage;
mod identity;
mod lineage_limits;
mod network;
mod process_instance;
mod reserved_names;
mod snapshot_files;
mod snapshot_fold;
mod snapshot_import;
mod snapshot_parts;
mod snapshot_types;
mod startup;
pub mod steps;

pub use boot::BootReport;
pub use burst_memory::BurstMemory;
pub use child_messages::ChildMessages;
pub use clock::now_ms;
pub use connections::{
    ConnectionLog, ConnectionProtocol, ConnectionRecord, ConnectionRecords, HeaderUse,
    MAX_CONNECTIONS, RefusalReason,
};
pub use engine::{DetachedGuest, Engine, TemplateState};
pub use engine_error::{EngineError, RollbackFailure};
pub use engine_name::{EngineName, GVISOR, MICROVM};
pub use engines::Engines;
pub use exit_reason::ExitReason;
pub use first_use::{FirstUse, FirstUseAction};
pub use guest::{Guest, GuestHandle, RollbackCommit, SandboxIdentity, UnassignedGuest};
pub use guest_stream::GuestStream;
pub use guest_usage::{GuestCounters, GuestUsage};
pub use identity::{IdentityError, is_id, new_id, new_token, random_bytes};
pub use jiffy_api_types::{
    BootMode, Capabilities, DamagedChunk, EngineDescription, MAX_IDENTITY_BYTES,
    MAX_TRUST_ROOT_BYTES, MAX_VERIFY_IDENTITIES, MAX_VERIFY_KEYS, SandboxSize, SignerIdentity,
    SizeError, SnapshotContent, TemplateNetwork, VerifiedSnapshot,
};
pub use lineage_limits::LineageLimits;
pub use network::{
    EgressProxy, EgressProxyTls, HeaderRules, MEMBER_ADDRESSES, NetworkMembership, NetworkRules,
    PRIVATE_NETWORK_RANGE, Workload,
};
pub use process_instance::ProcessInstance;
pub use reserved_names::{
    IMPORTED_IMAGE_DIGITS, IMPORTED_IMAGE_PREFIX, UNFINISHED_BUILD_PREFIX, is_imported_image,
    is_reserved, is_unfinished_build,
};
pub use snapshot_files::{SnapshotFiles, SnapshotWalk};
pub use snapshot_fold::{FoldPace, FoldPreparation, FoldResult, PreparedFold};
pub use snapshot_import::{ExistingSnapshot, ImportedFile, ImportedFiles, SnapshotImport};
pub use snapshot_parts::{PART_CHUNK_BYTES, SnapshotFile, SnapshotFileKind, SnapshotParts};
pub use snapshot_types::{AfterSnapshot, CaptureNotice, SnapshotRequest, SnapshotTimes};
pub use startup::{Readiness, ReadinessProbe, StartCommand, Startup};
