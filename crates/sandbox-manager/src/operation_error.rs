//! [`OperationError`]: errors of operations on sandboxes and snapshots, and their classes.

use crate::journal::JournalError;
use crate::quota::{Bytes, QuotaRefusal};
use crate::startup::StartupError;
use jiffy_api_types::{MAX_SANDBOX_NAME, SandboxState};
use jiffy_engine_api::{EngineError, IdentityError, SizeError};
use jiffy_fleet::HeadError;
use jiffy_store::host::RemoteError;
use std::time::Duration;

/// Time after which a client may check again whether a snapshot is in the store.
const STORE_RETRY: Duration = Duration::from_secs(30);

/// Time after which a client may retry an operation whose head could not be read or changed. The
/// head is the record that decides which host runs a stored sandbox.
const HEAD_RETRY: Duration = Duration::from_secs(5);

/// Class of an error, which determines its HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The object does not exist: 404.
    Unknown,
    /// The request is invalid: 400.
    Invalid,
    /// The present state does not allow the operation: 409.
    Conflict,
    /// The request exceeds the total resources of this host: 400. Not retryable.
    TooLarge,
    /// The host lacks free resources or is shutting down, or the store or the host that runs the
    /// sandbox is unavailable: 503 with `Retry-After`. Retryable.
    Busy,
    /// The quota of the owner is exhausted: 429.
    Quota,
    /// The disk limit of the owner or the host's disk is exhausted: 507.
    DiskQuota,
    /// The host failed: 500.
    Failed,
}

impl ErrorKind {
    /// Returns the name of the class.
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

/// Error of an operation on sandboxes. Unless a variant states otherwise, the operation had no
/// effect.
#[derive(Debug, thiserror::Error)]
pub enum OperationError {
    /// The sandbox or snapshot does not exist.
    #[error("{what} `{id}` does not exist; list the existing ones with `{list}`")]
    Unknown {
        /// Sandbox or snapshot.
        what: &'static str,
        /// Id or name in the request.
        id: String,
        /// Command that lists the existing objects.
        list: &'static str,
    },
    /// The prefix of an id is ambiguous.
    #[error("`{id}` is ambiguous and matches {}: pass more characters of the id", candidates.join(" or "))]
    Ambiguous {
        /// Id or name in the request.
        id: String,
        /// Sandboxes whose ids have the prefix.
        candidates: Vec<String>,
    },
    /// The state of the sandbox does not allow the operation.
    #[error(
        "cannot {operation} sandbox {id}: it is {}{}",
        describe(state),
        remedy(state)
    )]
    State {
        /// Verb.
        operation: &'static str,
        /// Sandbox.
        id: String,
        /// State of the sandbox.
        state: SandboxState,
    },
    /// The snapshot has another template or size than the sandbox.
    #[error(
        "cannot roll back sandbox {id} to snapshot {snapshot}: the snapshot has template `{theirs}`, the sandbox has `{ours}`; create a sandbox from the snapshot instead"
    )]
    IncompatibleSnapshot {
        /// Sandbox.
        id: String,
        /// Snapshot.
        snapshot: String,
        /// Template and size of the sandbox.
        ours: String,
        /// Template and size of the snapshot.
        theirs: String,
    },
    /// Two objects of a comparison have different templates.
    #[error(
        "cannot compare {a} with {b}: their templates `{a_template}` and `{b_template}` differ; compare sandboxes and snapshots of one template"
    )]
    Incomparable {
        /// First object.
        a: String,
        /// Second object.
        b: String,
        /// Template of the first object, with its version if it is known.
        a_template: String,
        /// Template of the second object.
        b_template: String,
    },
    /// The files of a sandbox or snapshot cannot be compared.
    #[error("cannot compare the files of {object}: {problem}")]
    Comparison {
        /// Sandbox or snapshot.
        object: String,
        /// Reason.
        problem: String,
    },
    /// The path of a comparison is a directory or a special file.
    #[error("{path} of {object} is not a regular file")]
    NotAFile {
        /// Path in the request.
        path: String,
        /// Sandbox or snapshot.
        object: String,
    },
    /// The snapshot cannot be removed because it is in use.
    #[error("cannot remove snapshot {id}: it is needed by {user}")]
    InUse {
        /// Snapshot.
        id: String,
        /// Sandbox or snapshot that uses it.
        user: String,
    },
    /// The name is not valid for a sandbox.
    #[error(
        "invalid sandbox name: use a letter or digit, followed by letters, digits, `.`, `_` and `-`, at most {MAX_SANDBOX_NAME} in total, and not in the format of an id"
    )]
    BadName,
    /// Another sandbox has the name.
    #[error(
        "the name `{name}` is in use by sandbox {holder}: choose another name, or rename that sandbox"
    )]
    NameTaken {
        /// Name in the request.
        name: String,
        /// Sandbox that has the name.
        holder: String,
    },
    /// The number of children of a fork is out of bounds.
    #[error("cannot fork {count} children: choose 1 to {most}")]
    Count {
        /// Count in the request.
        count: usize,
        /// Maximum number of children.
        most: usize,
    },
    /// The size is out of bounds.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// The request has a size, but the snapshot determines the size.
    #[error("a sandbox created from a snapshot has the size of the snapshot: omit the size")]
    FixedSize,
    /// A snapshot without memory was requested of a sandbox that is paused with its memory.
    #[error(
        "sandbox {id} is paused with its memory: resume it, then take the snapshot without memory"
    )]
    PausedWithMemory {
        /// Sandbox.
        id: String,
    },
    /// The engine does not exist or cannot be used on this host.
    #[error("{}", no_engine(name, *exists, usable))]
    NoEngine {
        /// Engine in the request.
        name: String,
        /// True if the engine exists but cannot be used.
        exists: bool,
        /// Engines that can be used.
        usable: Vec<String>,
    },
    /// The request has an engine, but the snapshot determines the engine.
    #[error("snapshot {snapshot} can be restored by the engine {own} only: omit the engine")]
    FixedEngine {
        /// Snapshot.
        snapshot: String,
        /// Engine that took it.
        own: String,
    },
    /// The guest cannot mount a volume at the requested path.
    #[error("cannot mount the volumes of the sandbox: {0}; choose another path")]
    MountPath(String),
    /// A volume was removed after the request had named it.
    #[error(
        "cannot mount the volumes of the sandbox: volume `{0}` does not exist; `jiffy volume ls` and `GET /volumes` list the volumes of this key"
    )]
    NoVolume(String),
    /// The egress rules are invalid.
    #[error("{0}")]
    Network(String),
    /// The clock or entropy of the guest cannot be set.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The engine failed.
    #[error("cannot {operation}: {source}")]
    Engine {
        /// Operation and its object.
        operation: String,
        /// Error of the engine.
        source: EngineError,
    },
    /// The host has no store for snapshots.
    #[error("this host has no store: start its daemon with --store, or do not request `durable`")]
    NoStore,
    /// The snapshot is on this host but not in the store yet.
    #[error(
        "snapshot {id} is on this host but not in the store yet: {reason}; the upload is retried"
    )]
    NotStored {
        /// Snapshot.
        id: String,
        /// Error of the latest attempt.
        reason: String,
    },
    /// The snapshot was captured in memory but could not be stored.
    #[error(
        "snapshot {id} was captured but lost before it was stored: {reason}; take another snapshot"
    )]
    CaptureLost {
        /// Snapshot.
        id: String,
        /// Reason why it could not be stored.
        reason: String,
    },
    /// The shared store of snapshots failed.
    #[error("cannot fetch snapshot {id}: {source}")]
    Store {
        /// Snapshot.
        id: String,
        /// Error of the store.
        source: RemoteError,
    },
    /// The record that decides which host runs a stored sandbox prevents the operation, or cannot
    /// be read.
    #[error(transparent)]
    Head(#[from] HeadError),
    /// A copy cannot be removed from the store.
    #[error(transparent)]
    Retraction(RemoteError),
    /// The start command of the template did not become ready.
    #[error("cannot start template `{template}`: {source}")]
    Startup {
        /// Template.
        template: String,
        /// Error of the start command.
        source: StartupError,
    },
    /// The journal failed.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// A stream to the guest cannot be opened.
    #[error("cannot connect to port {port} of sandbox {id}: {source}")]
    Connect {
        /// Sandbox.
        id: String,
        /// Port.
        port: u32,
        /// Error of the connection.
        source: std::io::Error,
    },
    /// A restart started but did not finish: processes may have been terminated.
    #[error(
        "cannot restart sandbox {id}: {problem}; some of its processes may have been terminated"
    )]
    Restart {
        /// Sandbox.
        id: String,
        /// Reason of the failure.
        problem: String,
    },
    /// The host has too few free resources at present. No operation was started.
    #[error("{what}; try again in {} s", retry_after.as_secs())]
    Busy {
        /// Resource that is short, and the remedy.
        what: String,
        /// Time after which to retry.
        retry_after: Duration,
    },
    /// The request exceeds the total resources of this host.
    #[error("{what}")]
    TooLarge {
        /// Resource that is too small, and its maximum.
        what: String,
    },
    /// The owner's quota is exhausted.
    #[error(transparent)]
    Quota(#[from] QuotaRefusal),
    /// The remaining disk limit of the owner's key is too small for the snapshot, which was not
    /// taken.
    #[error(
        "the snapshot needs up to {} of disk space, and the disk limit of this key has {} left: remove snapshots or paused sandboxes, or raise the limit",
        Bytes(*needed),
        Bytes(*left)
    )]
    DiskQuota {
        /// Maximum number of bytes that the snapshot needs.
        needed: u64,
        /// Bytes that are left.
        left: u64,
    },
    /// The free space of the host's disk is too small for the snapshot, which was not taken.
    #[error(
        "the snapshot needs up to {} of disk space, and this host has {} in addition to the reserved space: remove snapshots or paused sandboxes, or add disk space",
        Bytes(*needed),
        Bytes(*left)
    )]
    HostDisk {
        /// Maximum number of bytes that the snapshot needs.
        needed: u64,
        /// Bytes that are left.
        left: u64,
    },
    /// The task of the operation panicked or was aborted.
    #[error("the operation failed unexpectedly: {0}; see the log of the daemon")]
    Lost(String),
}

impl OperationError {
    /// Returns whether the host of the sandbox is dead, and may have a newer state than the store.
    pub fn is_host_lost(&self) -> bool {
        matches!(self, Self::Head(e) if e.is_host_lost())
    }

    /// Returns a function that converts an engine's error during `operation`.
    pub(crate) fn engine(operation: impl Into<String>) -> impl FnOnce(EngineError) -> Self {
        let operation = operation.into();
        move |source| Self::Engine { operation, source }
    }

    /// Converts the error of a removal from the store.
    pub(crate) fn retraction(source: RemoteError) -> Self {
        Self::Retraction(source)
    }

    /// Returns whether the request, rather than the host, is at fault.
    pub fn is_refusal(&self) -> bool {
        !matches!(self.kind(), ErrorKind::Busy | ErrorKind::Failed)
    }

    /// Returns whether the store has a newer pause of the sandbox than this host had. This host has
    /// forgotten the sandbox, which can be resumed from the store.
    pub fn is_newer(&self) -> bool {
        matches!(self, Self::Head(HeadError::Newer { .. }))
    }

    /// Returns the class of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            // A snapshot whose capture was lost does not exist.
            Self::Unknown { .. } | Self::CaptureLost { .. } | Self::NoVolume(_) => {
                ErrorKind::Unknown
            }
            Self::Ambiguous { .. }
            | Self::Count { .. }
            | Self::BadName
            | Self::Size(_)
            | Self::FixedSize
            | Self::NoEngine { .. }
            | Self::FixedEngine { .. }
            | Self::NoStore
            | Self::Incomparable { .. }
            | Self::NotAFile { .. }
            | Self::MountPath(_)
            | Self::Network(_) => ErrorKind::Invalid,
            Self::State { .. }
            | Self::PausedWithMemory { .. }
            | Self::IncompatibleSnapshot { .. }
            | Self::InUse { .. }
            | Self::NameTaken { .. }
            | Self::Connect { .. }
            | Self::Comparison { .. }
            | Self::Restart { .. } => ErrorKind::Conflict,
            Self::Engine {
                source: EngineError::Incompatible { .. },
                ..
            } => ErrorKind::Conflict,
            // The guards select errors with a class of their own. All other errors of stores and
            // heads are `Failed`.
            Self::Store { source, .. } if source.retry_after().is_some() => ErrorKind::Busy,
            Self::Head(HeadError::Killed { .. }) => ErrorKind::Unknown,
            Self::Head(e) if e.is_moved() => ErrorKind::Conflict,
            Self::Head(e) if e.is_temporary() || e.is_host_lost() => ErrorKind::Busy,
            Self::Store { source, .. } if source.is_damage() => ErrorKind::Conflict,
            Self::TooLarge { .. } => ErrorKind::TooLarge,
            Self::Busy { .. } | Self::NotStored { .. } => ErrorKind::Busy,
            Self::Quota(refusal) if !refusal.of_disk => ErrorKind::Quota,
            Self::Quota(_) | Self::DiskQuota { .. } | Self::HostDisk { .. } => ErrorKind::DiskQuota,
            Self::Identity(_)
            | Self::Engine { .. }
            | Self::Store { .. }
            | Self::Head(_)
            | Self::Retraction(_)
            | Self::Startup { .. }
            | Self::Journal(_)
            | Self::Lost(_) => ErrorKind::Failed,
        }
    }

    /// Returns the time after which the same request may succeed. `None` if waiting does not help,
    /// or if the time is unknown.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Busy { retry_after, .. } => Some(*retry_after),
            Self::NotStored { .. } => Some(STORE_RETRY),
            Self::Head(e) if e.is_temporary() => Some(HEAD_RETRY),
            Self::Store { source, .. } => source.retry_after(),
            _ => None,
        }
    }
}

/// Explains why the engine `name` creates no sandbox, and which engines do. `exists` states whether
/// this version has an engine with the name.
fn no_engine(name: &str, exists: bool, usable: &[String]) -> String {
    let problem = if exists {
        format!("the engine `{name}` cannot be used on this host")
    } else {
        format!("the engine `{name}` does not exist")
    };
    let instead = match usable {
        [] => "and no other engine can be used either".to_owned(),
        usable => format!("choose {}", usable.join(" or ")),
    };
    format!("{problem}: {instead}; see `jiffy engines`")
}

fn describe(state: &SandboxState) -> String {
    match state {
        SandboxState::Broken { cause, .. } => format!("broken ({cause})"),
        state => state.name().to_owned(),
    }
}

/// End of an error message, which names the remedy in a state that rejects an operation.
fn remedy(state: &SandboxState) -> &'static str {
    match state {
        SandboxState::Paused => "; resume it first",
        // A killed sandbox has no remedy, and a running one needs none.
        SandboxState::Running | SandboxState::Killed => "",
        SandboxState::Creating => "; wait until it is running",
        broken if broken.is_broken_and_resumable() => {
            "; resume it, roll it back to a snapshot, or kill it"
        }
        SandboxState::Broken { .. } => "; roll it back to a snapshot, or kill it",
    }
}
