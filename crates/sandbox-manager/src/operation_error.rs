//! Why an operation on sandboxes failed.

use crate::journal::JournalError;
use crate::quota::{Bytes, QuotaRefusal};
use crate::startup::StartupError;
use jiffy_api_types::{MAX_SANDBOX_NAME, SandboxState};
use jiffy_engine_api::{EngineError, IdentityError, SizeError};
use jiffy_store::host::RemoteError;
use std::time::Duration;

/// Time after which it is worth a look whether a snapshot is in the store by now.
const STORE_RETRY: Duration = Duration::from_secs(30);

/// Class of an error, by which an HTTP interface chooses its status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// There is nothing of that name: 404.
    Unknown,
    /// The request makes no sense: 400.
    Invalid,
    /// It does not go with the present state: 409.
    Conflict,
    /// More than this host can ever give: 400, and not worth another try.
    TooLarge,
    /// The host has no room now: 503 with `Retry-After`, worth another try.
    Busy,
    /// The owner has as much as they may: 429.
    Quota,
    /// The disk limit of the owner or the host's disk has no room: 507.
    DiskQuota,
    /// The host failed: 500.
    Failed,
}

impl ErrorKind {
    /// One word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Invalid => "invalid",
            Self::Conflict => "conflict",
            Self::TooLarge => "too_large",
            Self::Busy => "busy",
            Self::Quota => "quota",
            Self::DiskQuota => "disk_quota",
            Self::Failed => "failed",
        }
    }
}

/// Why an operation on sandboxes failed. Unless it says otherwise, everything is as it was before.
#[derive(Debug, thiserror::Error)]
pub enum OperationError {
    /// No such sandbox or snapshot.
    #[error("{what} `{id}` does not exist; `{list}` lists those that exist")]
    Unknown {
        /// Sandbox or snapshot.
        what: &'static str,
        /// Id or name in the request.
        id: String,
        /// Command that lists them.
        list: &'static str,
    },
    /// A short id that could be several.
    #[error("`{id}` could be {}: give more of the id", candidates.join(" or "))]
    Ambiguous {
        /// Id or name in the request.
        id: String,
        /// Sandboxes that it could be.
        candidates: Vec<String>,
    },
    /// The sandbox cannot do that now.
    #[error(
        "cannot {operation} sandbox {id}: it is {}{}",
        shown(state),
        remedy(state)
    )]
    State {
        /// Verb.
        operation: &'static str,
        /// Sandbox.
        id: String,
        /// Its state.
        state: SandboxState,
    },
    /// The snapshot is of something else.
    #[error(
        "cannot roll back sandbox {id} to snapshot {snapshot}: that one is of template `{theirs}`, this sandbox of `{ours}`; create a sandbox from the snapshot instead"
    )]
    Stranger {
        /// Sandbox.
        id: String,
        /// Snapshot.
        snapshot: String,
        /// Template and size of the sandbox.
        ours: String,
        /// Template and size of the snapshot.
        theirs: String,
    },
    /// The snapshot is needed.
    #[error("cannot remove snapshot {id}: it is needed by {user}")]
    InUse {
        /// Snapshot.
        id: String,
        /// Sandbox or snapshot that needs it.
        user: String,
    },
    /// No name of a sandbox.
    #[error(
        "a name of a sandbox begins with a letter or digit and goes on with those and `._-`, {MAX_SANDBOX_NAME} at most; what reads as an id is no name"
    )]
    BadName,
    /// Another sandbox has the name.
    #[error("the name `{name}` is that of sandbox {holder}: choose another, or rename that one")]
    NameTaken {
        /// Name in the request.
        name: String,
        /// Sandbox that has it.
        holder: String,
    },
    /// More or fewer children than a fork has.
    #[error("cannot fork {count} children: choose 1 to {most}")]
    Count {
        /// Count in the request.
        count: usize,
        /// Most there can be.
        most: usize,
    },
    /// Size out of bounds.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// A size where the snapshot decides.
    #[error("a sandbox made from a snapshot has the snapshot's size: leave the size out")]
    FixedSize,
    /// An engine that makes no sandboxes here.
    #[error("{}", no_engine(wanted, *known, usable))]
    NoEngine {
        /// Size in the request.
        wanted: String,
        /// It exists, and cannot be used.
        known: bool,
        /// Those that can be used.
        usable: Vec<String>,
    },
    /// An engine where the snapshot decides.
    #[error(
        "snapshot {snapshot} was taken with the engine {own}, and so are sandboxes made from it: leave the engine out"
    )]
    FixedEngine {
        /// Snapshot.
        snapshot: String,
        /// Engine that took it.
        own: String,
    },
    /// Rules for the network that cannot be kept.
    #[error("{0}")]
    Network(String),
    /// Clock or entropy.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The engine.
    #[error("cannot {operation}: {source}")]
    Engine {
        /// Operation, and its object.
        operation: String,
        /// Why not.
        source: EngineError,
    },
    /// There is no store to put a snapshot into.
    #[error(
        "this host shares no store: start its daemon with --store, or do not ask for `durable`"
    )]
    NoStore,
    /// A snapshot that is here and is not in the store yet.
    #[error(
        "snapshot {id} is on this host, and not in the store yet: {reason}; it is uploaded when that is possible"
    )]
    NotStored {
        /// Snapshot.
        id: String,
        /// Failure of the latest attempt.
        reason: String,
    },
    /// A snapshot that was captured in memory and could not be stored.
    #[error("snapshot {id} was captured, and lost before it was stored: {reason}; take another")]
    CaptureLost {
        /// Snapshot.
        id: String,
        /// Why it could not be stored.
        reason: String,
    },
    /// The store that hosts share snapshots in.
    #[error("cannot fetch snapshot {id}: {source}")]
    Store {
        /// Snapshot.
        id: String,
        /// Why not.
        source: RemoteError,
    },
    /// The start command of the template did not get ready.
    #[error("cannot start template `{template}`: {source}")]
    Startup {
        /// Template.
        template: String,
        /// Why not.
        source: StartupError,
    },
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// A stream to the guest.
    #[error("cannot connect to port {port} of sandbox {id}: {source}")]
    Connect {
        /// Sandbox.
        id: String,
        /// Port.
        port: u32,
        /// Why not.
        source: std::io::Error,
    },
    /// A restart that was begun and not finished: processes may have ended.
    #[error("cannot restart sandbox {id}: {problem}; processes of it may have ended already")]
    Restart {
        /// Sandbox.
        id: String,
        /// Why not.
        problem: String,
    },
    /// The host has no room for it now. Nothing was begun.
    #[error("{what}; try again in {} s", retry_after.as_secs())]
    Busy {
        /// Resource that is short, and what can be done.
        what: String,
        /// When to ask again.
        retry_after: Duration,
    },
    /// The host can never have room for it.
    #[error("{what}")]
    TooLarge {
        /// Resource that is too large, and what could be had.
        what: String,
    },
    /// The owner's budget has no room.
    #[error(transparent)]
    Quota(#[from] QuotaRefusal),
    /// The disk limit of the owner's key has too little room for a snapshot, which was not taken.
    #[error(
        "it would take up to {} on disk, and the disk limit of this key has {} left: remove snapshots or paused sandboxes, or raise the limit",
        Bytes(*needed),
        Bytes(*left)
    )]
    DiskQuota {
        /// Bytes it would take at most.
        needed: u64,
        /// Bytes that are left.
        left: u64,
    },
    /// The host's disk has too little room for a snapshot, which was not taken.
    #[error(
        "it would take up to {} on disk, and this host's disk has {} to give beside what its sandboxes may write: remove snapshots or paused sandboxes, or add disk space",
        Bytes(*needed),
        Bytes(*left)
    )]
    HostDisk {
        /// Bytes it would take at most.
        needed: u64,
        /// Bytes that are left.
        left: u64,
    },
    /// The operation was aborted from inside.
    #[error("the operation was lost: {0}; the log of the daemon says more")]
    Lost(String),
}

impl OperationError {
    /// Makes an engine's refusal of `operation` into an error.
    pub(crate) fn engine(operation: impl Into<String>) -> impl FnOnce(EngineError) -> Self {
        let operation = operation.into();
        move |source| Self::Engine { operation, source }
    }

    /// True if it is the caller's mistake rather than the host's.
    pub fn is_refusal(&self) -> bool {
        !matches!(self.kind(), ErrorKind::Busy | ErrorKind::Failed)
    }

    /// Returns the class of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Unknown { .. } | Self::CaptureLost { .. } => ErrorKind::Unknown,
            Self::Ambiguous { .. }
            | Self::Count { .. }
            | Self::BadName
            | Self::Size(_)
            | Self::FixedSize
            | Self::NoEngine { .. }
            | Self::FixedEngine { .. }
            | Self::NoStore
            | Self::Network(_) => ErrorKind::Invalid,
            Self::State { .. }
            | Self::Stranger { .. }
            | Self::InUse { .. }
            | Self::NameTaken { .. }
            | Self::Connect { .. }
            | Self::Restart { .. } => ErrorKind::Conflict,
            Self::Engine {
                source: EngineError::Incompatible { .. },
                ..
            } => ErrorKind::Conflict,
            Self::Store { source, .. } if source.retry_after().is_some() => ErrorKind::Busy,
            Self::Store { source, .. } if source.is_damage() => ErrorKind::Conflict,
            Self::TooLarge { .. } => ErrorKind::TooLarge,
            Self::Busy { .. } | Self::NotStored { .. } => ErrorKind::Busy,
            Self::Quota(refusal) if !refusal.of_disk => ErrorKind::Quota,
            Self::Quota(_) | Self::DiskQuota { .. } | Self::HostDisk { .. } => ErrorKind::DiskQuota,
            Self::Identity(_)
            | Self::Engine { .. }
            | Self::Store { .. }
            | Self::Startup { .. }
            | Self::Journal(_)
            | Self::Lost(_) => ErrorKind::Failed,
        }
    }

    /// After which time the same request may succeed, if waiting is all it takes.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Busy { retry_after, .. } => Some(*retry_after),
            Self::NotStored { .. } => Some(STORE_RETRY),
            Self::Store { source, .. } => source.retry_after(),
            _ => None,
        }
    }
}

fn no_engine(wanted: &str, known: bool, usable: &[String]) -> String {
    let what = match known {
        true => format!("the engine `{wanted}` cannot be used on this host"),
        false => format!("there is no engine `{wanted}`"),
    };
    let instead = match usable {
        [] => "and no other can be used either".to_owned(),
        usable => format!("sandboxes here come up on {}", usable.join(" or ")),
    };
    format!("{what}: {instead}; `jiffy engines` says more")
}

fn shown(state: &SandboxState) -> String {
    match state {
        SandboxState::Broken { cause, .. } => format!("broken ({cause})"),
        state => state.name().to_owned(),
    }
}

fn remedy(state: &SandboxState) -> &'static str {
    match state {
        SandboxState::Paused => "; resume it first",
        SandboxState::Running => "",
        SandboxState::Creating => "; try again when it is up",
        SandboxState::Killed => " for good",
        broken if broken.is_broken_and_resumable() => {
            "; resume it, roll it back to a snapshot, or kill it"
        }
        SandboxState::Broken { .. } => "; roll it back to a snapshot, or kill it",
    }
}
