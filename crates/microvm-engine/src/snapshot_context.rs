//! State that snapshots of a running microVM need.

use jiffy_proto::agent::Hello;
use jiffy_proto::channel::ChannelError;
use jiffy_proto::snapshot::{AfterSnapshot, SnapshotReport};
use jiffy_proto::vm::{Event, FdIndex};
use jiffy_snapshot::{Durability, Hold, SnapshotDraft, SnapshotError};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use tokio::sync::mpsc;

/// Failure to pause, resume or save a microVM. It runs on as before unless it has ended.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The VM ended.
    #[error("the sandbox is gone")]
    Gone,
    /// The control socket failed.
    #[error(transparent)]
    Control(#[from] ChannelError),
    /// The VMM refused or failed.
    #[error("the snapshot failed and the sandbox runs on: {0}")]
    Refused(String),
    /// The snapshot would be larger than its limit.
    #[error("the snapshot would have {needed} bytes, more than it may; the sandbox runs on")]
    TooLarge {
        /// Upper bound of its size in bytes.
        needed: u64,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] SnapshotError),
    /// A host resource is missing.
    #[error("{what}: {source}")]
    Host {
        /// Attempted operation.
        what: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// The host lost a layer below the VM.
    #[error(
        "a snapshot that this sandbox lies on is damaged or gone; it runs on, but cannot be saved"
    )]
    Unsavable,
}

/// Specification of a snapshot.
#[derive(Debug, Clone)]
pub struct SnapshotSpec {
    /// 1 to 64 lower-case letters and digits, not yet in the store.
    pub id: String,
    /// Template of the sandbox.
    pub template: String,
    /// Action of the VM afterwards.
    pub then: AfterSnapshot,
    /// Durability in a crash of the host.
    pub durability: Durability,
    /// Largest size in bytes ([`Snapshot::bytes`]); none: unlimited.
    pub max_bytes: Option<u64>,
    /// Records the chunks that the guest has touched since its restore, if they are few
    /// ([`Snapshot::put_touched`]). Says something of guests restored with
    /// [`crate::MemoryPolicy::Map`] only.
    pub working_set: bool,
}

/// Snapshot that the VMM has written and the store has not published. The VM's memory and disk are
/// based on it in any case.
#[derive(Debug)]
pub(crate) struct UnpublishedSnapshot {
    pub draft: SnapshotDraft,
    /// The disk's layer.
    pub frozen: File,
    pub spec: SnapshotSpec,
    pub report: SnapshotReport,
    /// Index of the chunks that the guest has touched.
    pub touched: Option<File>,
}

/// Snapshot that an earlier controller captured: the VMM is writing it, or has written it.
#[derive(Debug)]
pub(crate) struct CapturedDraft {
    pub draft: SnapshotDraft,
    /// The disk's layer.
    pub frozen: File,
    pub spec: SnapshotSpec,
    /// None while it is being written.
    pub report: Option<SnapshotReport>,
}

/// State for snapshots of a VM, and the receiver of the VMM's answers.
#[derive(Debug)]
pub(crate) struct SnapshotContext {
    replies: mpsc::UnboundedReceiver<Event>,
    /// Current overlay of the disk.
    pub overlay: File,
    /// Parent snapshot, held so that it is not removed.
    pub parent: Option<(String, Hold)>,
    /// Snapshot below the VM that the store has not published yet.
    pub unpublished: Option<UnpublishedSnapshot>,
    /// Snapshot that an earlier controller captured.
    pub captured: Option<CapturedDraft>,
    /// True if it has a network interface.
    pub net: bool,
    /// Checksum of the image with its kernel's modules, if it has one.
    pub modules: Option<String>,
    /// True if it was adopted and its parent is not in the store.
    pub lineage_lost: bool,
    pub hello: Option<Hello>,
    /// Host's end of the agent's greeting, until the VMM holds it.
    pub greeting: Option<OwnedFd>,
}

impl SnapshotContext {
    pub fn new(
        replies: mpsc::UnboundedReceiver<Event>,
        overlay: File,
        parent: Option<(String, Hold)>,
        net: bool,
        modules: Option<String>,
    ) -> Self {
        Self {
            replies,
            overlay,
            parent,
            unpublished: None,
            captured: None,
            net,
            modules,
            lineage_lost: false,
            hello: None,
            greeting: None,
        }
    }

    /// Waits for an answer that `pick` takes.
    pub async fn reply<T>(&mut self, pick: impl Fn(Event) -> Option<T>) -> Result<T, SaveError> {
        loop {
            let event = self.replies.recv().await.ok_or(SaveError::Gone)?;
            if let Some(value) = pick(event) {
                return Ok(value);
            }
        }
    }
}

/// Memory that a restored VM has touched.
#[derive(Debug)]
pub struct WorkingSet {
    /// Index of the chunks that are present, for [`crate::MemoryPolicy::CopyWorkingSet`].
    pub touched: File,
    /// Number of these chunks.
    pub chunks: u64,
    /// Index of the pages that were written, for [`crate::RestoreSpec::populate`] or
    /// [`crate::RestoreSpec::populate_later`].
    pub written: File,
}

/// Adds a file to the descriptors of a message.
pub(crate) fn add_fd<'a>(fds: &mut Vec<BorrowedFd<'a>>, file: &'a File) -> FdIndex {
    fds.push(file.as_fd());
    // The channel refuses too many descriptors.
    FdIndex(u8::try_from(fds.len() - 1).unwrap_or(u8::MAX))
}
