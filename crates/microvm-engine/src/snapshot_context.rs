//! Pause and resume of a running microVM, and the state that its snapshots need.

use crate::snapshot::{CapturedDraft, UnpublishedSnapshot};
use crate::vm::MicroVm;
use jiffy_proto::agent::Hello;
use jiffy_proto::channel::ChannelError;
use jiffy_proto::vm::{Event, FdIndex, Request, VmStats};
use jiffy_snapshot::{Hold, SnapshotError, Store};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
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

impl MicroVm {
    /// Pauses all vCPUs; returns the microseconds until the last one had stopped.
    pub async fn pause(&self) -> Result<u64, SaveError> {
        let mut context = self.context.lock().await;
        self.link.send(&Request::Pause, &[])?;
        let paused = |event| match event {
            Event::Paused { stopped_us } => Some(stopped_us),
            _ => None,
        };
        context.reply(paused).await
    }

    /// Resumes all vCPUs.
    pub async fn resume(&self) -> Result<(), SaveError> {
        let mut context = self.context.lock().await;
        self.link.send(&Request::Resume, &[])?;
        let resumed = |event| matches!(event, Event::Resumed).then_some(());
        context.reply(resumed).await
    }

    /// Disk space of the guest's writes since its last snapshot, in bytes; none while a snapshot is
    /// being taken.
    pub fn overlay_bytes(&self) -> Option<u64> {
        let context = self.context.try_lock().ok()?;
        let metadata = context.overlay.metadata().ok()?;
        // st_blocks counts units of 512 bytes (stat(2)).
        Some(metadata.blocks() * 512)
    }

    /// Counters since the VMM started.
    pub async fn stats(&self) -> Result<VmStats, SaveError> {
        let mut context = self.context.lock().await;
        self.link.send(&Request::Stats, &[])?;
        let stats = |event| match event {
            Event::Stats(stats) => Some(stats),
            _ => None,
        };
        context.reply(stats).await
    }

    /// Records the memory that a VM restored with [`crate::MemoryPolicy::Map`] has touched, in new
    /// nameless files in `store`.
    pub async fn working_set(&self, store: &Store) -> Result<WorkingSet, SaveError> {
        let mut context = self.context.lock().await;
        let host = |what| move |source| SaveError::Host { what, source };
        let pagemap = File::open(format!("/proc/{}/pagemap", self.vmm_pid()))
            .map_err(host("opening the VMM's pagemap"))?;
        let (touched, written) = (store.overlay()?, store.overlay()?);
        let mut fds = Vec::new();
        let request = Request::WorkingSet {
            index: add_fd(&mut fds, &touched),
            pagemap: add_fd(&mut fds, &pagemap),
            written: add_fd(&mut fds, &written),
        };
        self.link.send(&request, &fds)?;
        let chunks = context
            .reply(|event| match event {
                Event::WorkingSet { chunks } => Some(chunks),
                _ => None,
            })
            .await?;
        let none =
            || SaveError::Refused("this host does not tell which pages are present".to_owned());
        Ok(WorkingSet {
            chunks: chunks.ok_or_else(none)?,
            touched,
            written,
        })
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
