//! Life cycle of sandboxes on one host: creates, pauses, resumes, forks, removes and recovers them,
//! and manages their snapshots. The crate works with every engine that implements the traits of
//! `jiffy-engine-api`.
//!
//! [`Sandboxes`] has all operations. The record of each sandbox is in the journal, a database from
//! which the next daemon recovers the sandboxes (docs/design-journal.md). docs/glossary.md defines
//! the words.

mod admission;
mod comparison;
mod directory_lock;
mod fabricate;
mod journal;
mod journal_space;
mod lineage_record;
mod metrics;
mod operation_error;
mod operation_times;
mod private_database;
mod quota;
mod records;
mod sandbox;
mod sandbox_settings;
mod sandbox_stream;
mod sandboxes;
mod site;
mod snapshot;
mod startup;
mod store_copies;
mod usage;
mod usage_ledger;
mod volume_mounter;

pub use admission::{
    FreeResources, HostFigures, HostLimits, HostReader, KernelReader, Pressure, ReservedResources,
    Shortage,
};
pub use comparison::{DifferenceKind, FileDifference};
pub use directory_lock::DirectoryLock;
pub use fabricate::{FabricatedJournal, FabricatedSandbox, FabricatedSnapshot};
pub use jiffy_agent_client::comparison::FileState;
pub use jiffy_api_types::{
    BrokenBy, NetworkSettings, OnTimeout, Prefetch, SandboxState, SnapshotPurpose, StoreState,
};
pub use journal::{JournalError, OpenedJournal};
pub use metrics::{BootTimes, Figure, FigureFamily};
pub use operation_error::{ErrorKind, OperationError};
pub use operation_times::{OperationTimes, SandboxTimes};
pub use private_database::restrict_to_owner;
pub use quota::{
    Bytes, DiskLimit, OwnerQuota, QuotaAmount, QuotaHold, QuotaPermit, QuotaRefusal, QuotaRequest,
    Reserving,
};
pub use sandbox::{Sandbox, SandboxOperation};
pub use sandbox_settings::{Creation, EgressProxySecrets, HeaderAuthority, SandboxSettings};
pub use sandbox_stream::SandboxStream;
pub use sandboxes::{
    BuildSteps, ComparedContent, ComparedFiles, CreateSpec, FetchScope, ForkChild, ForkReport,
    HostOptions, Lineage, LineageEdge, LineageNode, LineageObject, LineageRelation, ListOrder,
    ListPosition, ListedSandboxes, ListedSnapshots, MAX_COMPARED_CONTENT, MAX_LINEAGE_NODES,
    MAX_RESTART_GRACE, NodeDetails, OwnerUsage, PinnedSnapshot, PoolDemand, PoolSize, ResumeHold,
    ResumeOptions, ResumeTimeout, SandboxDetails, SandboxObserver, SandboxSource, SandboxUse,
    Sandboxes, SnapshotDetails, UnfoldedSeries, UseInProgress, WeakSandboxes,
};
pub use site::{MAX_HOST_AUTHORITIES_BYTES, SiteError, authorities, joined, proxy};
pub use snapshot::Snapshot;
pub use startup::{StartupError, start_up};
pub use usage::UsageSample;
pub use usage_ledger::{
    Day, DayUsage, OTHER_OWNERS, UsageAmounts, UsageClock, UsageError, UsageLedger, UsageMoment,
    UsagePage, UsageQuery,
};
pub use volume_mounter::{MountError, MountedVolume, VolumeMount, VolumeMounter};

use std::time::Duration;

/// Delay of background work, so that it does not compete with clients. Applies after a start of the
/// daemon, and before a new snapshot is read for its checksums.
pub const START_DELAY: Duration = Duration::from_secs(1);
