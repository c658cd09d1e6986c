//! Pause and resume of a running microVM, and what is remembered for its snapshots.

use crate::snapshot::Unnamed;
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

/// Why a microVM could not be paused, resumed or saved. It runs on as before unless it is gone.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The VM ended.
    #[error("the sandbox is gone")]
    Gone,
    /// The control socket failed.
    #[error(transparent)]
    Control(#[from] ChannelError),
    /// The VMM could not do it.
    #[error("the snapshot failed and the sandbox runs on: {0}")]
    Refused(String),
    /// The snapshot would have more bytes than it may.
    #[error("the snapshot would have {needed} bytes, more than it may; the sandbox runs on")]
    TooLarge {
        /// Bytes it would have at most.
        needed: u64,
    },
    /// The store could not.
    #[error(transparent)]
    Store(#[from] SnapshotError),
    /// A host resource is missing.
    #[error("{what}: {source}")]
    Host {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The host lost a layer that the VM lies on.
    #[error(
        "a snapshot that this sandbox lies on is damaged or gone; it runs on, but cannot be saved"
    )]
    Unsavable,
}

/// What saving a VM needs to know, and who waits for an answer.
#[derive(Debug)]
pub(crate) struct Saving {
    replies: mpsc::UnboundedReceiver<Event>,
    /// The disk's overlay in use.
    pub overlay: File,
    /// What the VM descends from; held, so that it stays.
    pub parent: Option<(String, Hold)>,
    /// What the VM lies on and the store could not name yet.
    pub unnamed: Option<Unnamed>,
    /// Whether it has a network card.
    pub net: bool,
    /// Checksum of the image with its kernel's modules, if it has one.
    pub modules: Option<String>,
    /// It was adopted, and what it lies on is not in the store.
    pub lost: bool,
    pub hello: Option<Hello>,
    /// The host's end of the agent's greeting, until the VMM holds it.
    pub greeting: Option<OwnedFd>,
}

impl Saving {
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
            unnamed: None,
            net,
            modules,
            lost: false,
            hello: None,
            greeting: None,
        }
    }

    /// Waits for the answer that `pick` takes.
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
    /// Stops all vCPUs; returns after how many microseconds the last one stood still.
    pub async fn pause(&self) -> Result<u64, SaveError> {
        let mut saving = self.saving.lock().await;
        self.link.send(&Request::Pause, &[])?;
        let paused = |event| match event {
            Event::Paused { stopped_us } => Some(stopped_us),
            _ => None,
        };
        saving.reply(paused).await
    }

    /// Lets them go on.
    pub async fn resume(&self) -> Result<(), SaveError> {
        let mut saving = self.saving.lock().await;
        self.link.send(&Request::Resume, &[])?;
        let resumed = |event| matches!(event, Event::Resumed).then_some(());
        saving.reply(resumed).await
    }

    /// Disk space of what the guest wrote since its last snapshot, in bytes; none while a snapshot is being taken.
    pub fn overlay_bytes(&self) -> Option<u64> {
        let saving = self.saving.try_lock().ok()?;
        let metadata = saving.overlay.metadata().ok()?;
        // st_blocks counts units of 512 bytes (stat(2)).
        Some(metadata.blocks() * 512)
    }

    /// Counters since the VMM began.
    pub async fn stats(&self) -> Result<VmStats, SaveError> {
        let mut saving = self.saving.lock().await;
        self.link.send(&Request::Stats, &[])?;
        let stats = |event| match event {
            Event::Stats(stats) => Some(stats),
            _ => None,
        };
        saving.reply(stats).await
    }

    /// Writes to a new nameless file in `store` which chunks of memory are present now: what a VM restored with
    /// [`crate::MemoryPolicy::Map`] has touched since. For [`crate::MemoryPolicy::CopyWorkingSet`].
    pub async fn working_set(&self, store: &Store) -> Result<(File, u64), SaveError> {
        let mut saving = self.saving.lock().await;
        let host = |what| move |source| SaveError::Host { what, source };
        let pagemap = File::open(format!("/proc/{}/pagemap", self.vmm_pid()))
            .map_err(host("opening the VMM's pagemap"))?;
        let file = store.overlay()?;
        let mut fds = Vec::new();
        let request = Request::WorkingSet {
            index: add(&mut fds, &file),
            pagemap: add(&mut fds, &pagemap),
        };
        self.link.send(&request, &fds)?;
        let chunks = saving
            .reply(|event| match event {
                Event::WorkingSet { chunks } => Some(chunks),
                _ => None,
            })
            .await?;
        let none =
            || SaveError::Refused("this host does not tell which pages are present".to_owned());
        Ok((file, chunks.ok_or_else(none)?))
    }
}

/// Puts a file beside a message.
pub(crate) fn add<'a>(fds: &mut Vec<BorrowedFd<'a>>, file: &'a File) -> FdIndex {
    fds.push(file.as_fd());
    // The channel refuses more than fit.
    FdIndex(u8::try_from(fds.len() - 1).unwrap_or(u8::MAX))
}
