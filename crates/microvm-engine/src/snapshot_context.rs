//! [`SnapshotContext`]: state that snapshots of a running microVM need: the disk overlay, the
//! parent snapshot, and the VMM's replies. It exists once per microVM, and at most one snapshot
//! uses it.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *layer* is the part of a memory or disk that one
//! snapshot stores: the content that differs from its ancestors. The *overlay* is the file that
//! receives the disk writes of a guest. The *greeting* is the first message of the agent, which
//! then receives the identity of its sandbox. A daemon *adopts* the guests that continued to run
//! while no daemon ran.

mod publish;

use jiffy_proto::agent::Hello;
use jiffy_proto::channel::ChannelError;
use jiffy_proto::snapshot::{AfterSnapshot, SnapshotReport};
use jiffy_proto::vm::{Event, FdIndex};
use jiffy_snapshot::{Durability, Hold, SnapshotDraft, SnapshotError};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use tokio::sync::mpsc;

/// Error of pausing, resuming or saving a microVM. The microVM continues to run unless it has
/// ended.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The VM ended.
    #[error("the sandbox has ended")]
    Gone,
    /// The control socket failed.
    #[error(transparent)]
    Control(#[from] ChannelError),
    /// The VMM rejected the request or failed.
    #[error("the snapshot failed, the sandbox continues to run: {0}")]
    Refused(String),
    /// The snapshot would be larger than its limit.
    #[error(
        "the snapshot would exceed its size limit with {needed} bytes; the sandbox continues to run"
    )]
    TooLarge {
        /// Upper bound of the snapshot's size, in bytes.
        needed: u64,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] SnapshotError),
    /// An operation of the host failed.
    #[error("{what}: {source}")]
    Host {
        /// Failed operation.
        what: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// A layer on which the VM is based was lost.
    #[error(
        "a snapshot on which this sandbox is based is damaged or missing; the sandbox continues to run but cannot be saved"
    )]
    Unsavable,
}

/// Specification of a snapshot.
#[derive(Debug, Clone)]
pub struct SnapshotSpec {
    /// Snapshot id: 1 to 64 lower-case letters and digits, not used in the store.
    pub id: String,
    /// Template of the sandbox.
    pub template: String,
    /// Action of the VM after the snapshot.
    pub then: AfterSnapshot,
    /// Durability of the snapshot if the host crashes.
    pub durability: Durability,
    /// Maximum size in bytes ([`Snapshot::bytes`]). `None` if unlimited.
    pub max_bytes: Option<u64>,
    /// True to record the chunks that the guest has touched since its restore, if they are few
    /// ([`Snapshot::put_touched`]). Meaningful only for guests restored with
    /// [`crate::MemoryPolicy::Map`].
    pub working_set: bool,
    /// True to store the disk without the memory. The file system of the guest must be frozen.
    pub disk_only: bool,
}

/// Snapshot that the VMM has written but the store has not published. The VM's memory and disk are
/// already based on it.
#[derive(Debug)]
pub(crate) struct UnpublishedSnapshot {
    pub draft: SnapshotDraft,
    /// Frozen overlay, which becomes the disk layer of the snapshot.
    pub frozen: File,
    pub spec: SnapshotSpec,
    pub report: SnapshotReport,
    /// Index of the chunks that the guest has touched. `None` if not recorded.
    pub touched: Option<File>,
}

/// Snapshot that an earlier controller captured. The VMM is writing it, or has written it.
#[derive(Debug)]
pub(crate) struct CapturedDraft {
    pub draft: SnapshotDraft,
    /// Frozen overlay, which becomes the disk layer of the snapshot.
    pub frozen: File,
    pub spec: SnapshotSpec,
    /// `None` while the snapshot is being written.
    pub report: Option<SnapshotReport>,
}

/// State for snapshots of a VM, and the receiver of the VMM's replies.
#[derive(Debug)]
pub(crate) struct SnapshotContext {
    replies: mpsc::UnboundedReceiver<Event>,
    /// Current overlay of the disk.
    pub overlay: File,
    /// Parent snapshot, held so that it is not removed.
    pub parent: Option<(String, Hold)>,
    /// Snapshot on which the VM is based and which the store has not published yet.
    pub unpublished: Option<UnpublishedSnapshot>,
    /// Snapshot that an earlier controller captured.
    pub captured: Option<CapturedDraft>,
    /// True if the VM has a network interface.
    pub net: bool,
    /// Checksum of the image with the kernel modules. `None` without modules.
    pub modules: Option<String>,
    /// True if the VM booted and no snapshot was taken since. If it booted from the disks of the
    /// parent, the memory of the next snapshot is not based on the parent.
    pub fresh_memory: bool,
    /// True if the VM was adopted and its parent is missing or unusable.
    pub lineage_lost: bool,
    /// Latest greeting of the agent. `None` until the first greeting, and in an adopted VM whose
    /// greeting was not recorded.
    pub hello: Option<Hello>,
    /// Duplicate of the host's end of the greeting's stream. `None` until the agent has confirmed
    /// its identity, and after the duplicate was passed to a detached VMM.
    pub greeting: Option<OwnedFd>,
}

impl SnapshotContext {
    /// Creates the context of a guest that has just started. `fresh_memory` is true if no snapshot
    /// of its memory exists yet.
    pub fn new(
        replies: mpsc::UnboundedReceiver<Event>,
        overlay: File,
        parent: Option<(String, Hold)>,
        net: bool,
        modules: Option<String>,
        fresh_memory: bool,
    ) -> Self {
        Self {
            replies,
            overlay,
            parent,
            unpublished: None,
            captured: None,
            net,
            modules,
            fresh_memory,
            lineage_lost: false,
            hello: None,
            greeting: None,
        }
    }

    /// Waits for a reply that `pick` accepts. Other replies are dropped: they belong to requests
    /// whose caller was cancelled.
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
    /// Index of the touched chunks, for [`crate::MemoryPolicy::CopyWorkingSet`].
    pub touched: File,
    /// Number of touched chunks.
    pub chunks: u64,
    /// Index of the written pages, for [`crate::RestoreSpec::populate`] or
    /// [`crate::RestoreSpec::populate_later`].
    pub written: File,
}

/// Adds a file to the descriptors of a message and returns its index.
pub(crate) fn add_fd<'a>(fds: &mut Vec<BorrowedFd<'a>>, file: &'a File) -> FdIndex {
    fds.push(file.as_fd());
    // If the index does not fit, sending fails because the channel limits the number of
    // descriptors.
    FdIndex(u8::try_from(fds.len() - 1).unwrap_or(u8::MAX))
}
