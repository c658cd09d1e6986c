//! Pause, resume and snapshot of a running microVM.

use crate::vm::MicroVm;
use jiffy_proto::agent::Hello;
use jiffy_proto::channel::ChannelError;
use jiffy_proto::snapshot::{AfterSnapshot, DiskFreeze, SnapshotConfig, SnapshotReport};
use jiffy_proto::vm::{Event, FdIndex, Request};
use jiffy_snapshot::{
    DiskSizes, Draft, Durability, FORMAT, Hold, Manifest, MemorySizes, Snapshot, SnapshotError,
    Store, Versions,
};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{SystemTime, UNIX_EPOCH};
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
    /// The host lost a layer that the VM lies on now.
    #[error(
        "an earlier snapshot of this sandbox was given up half-way, so that it has no complete lineage any more; it runs on, but \
         cannot be saved"
    )]
    Unsavable,
}

/// What a snapshot is called and what becomes of the VM.
#[derive(Debug, Clone)]
pub struct SnapshotSpec {
    /// 1 to 64 lower-case letters and digits, not yet in the store.
    pub id: String,
    /// Template of the sandbox.
    pub template: String,
    /// What the VM does afterwards.
    pub then: AfterSnapshot,
    /// When the snapshot survives a crash of the host.
    pub durability: Durability,
}

/// What saving a VM needs to know, and who waits for an answer.
#[derive(Debug)]
pub(crate) struct Saving {
    replies: mpsc::UnboundedReceiver<Event>,
    /// The disk's overlay in use.
    overlay: File,
    /// What the VM descends from; held, so that it stays.
    pub parent: Option<(String, Hold)>,
    /// Something went wrong or was given up between the VMM's word and the store's.
    broken: bool,
    pub hello: Option<Hello>,
}

impl Saving {
    pub fn new(replies: mpsc::UnboundedReceiver<Event>, overlay: File) -> Self {
        Self {
            replies,
            overlay,
            parent: None,
            broken: false,
            hello: None,
        }
    }

    /// Waits for the answer that `pick` takes.
    async fn reply<T>(&mut self, pick: impl Fn(Event) -> Option<T>) -> Result<T, SaveError> {
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

    /// Takes a snapshot into `store`. Its parent is the snapshot that this VM was restored from, or the last one taken of it. With
    /// [`AfterSnapshot::Resume`] the guest stands still only for a moment that does not depend on what it has written.
    ///
    /// Once begun it must be waited for: if this call is dropped half-way, the VM runs on but cannot be saved again.
    pub async fn snapshot(
        &self,
        store: &Store,
        spec: &SnapshotSpec,
    ) -> Result<(Snapshot, SnapshotReport), SaveError> {
        let mut saving = self.saving.lock().await;
        if saving.broken {
            return Err(SaveError::Unsavable);
        }
        if store.root().join(&spec.id).exists() {
            return Err(SnapshotError::Exists(spec.id.clone()).into());
        }
        let draft = store.draft(1)?;
        let overlay = store.overlay()?;
        // Without it the VMM looks through all of memory.
        let pagemap = File::open(format!("/proc/{}/pagemap", self.vmm_pid())).ok();
        self.ask(&draft, &overlay, pagemap.as_ref(), spec.then)?;
        saving.broken = true;
        let outcome = saving
            .reply(|event| match event {
                Event::Snapshotted(report) => Some(Ok(report)),
                Event::SnapshotFailed { reason } => Some(Err(reason)),
                _ => None,
            })
            .await?;
        let report = match outcome {
            Ok(report) => report,
            Err(reason) => {
                saving.broken = false;
                return Err(SaveError::Refused(reason));
            }
        };
        let frozen = std::mem::replace(&mut saving.overlay, overlay);
        let manifest = manifest(&saving, spec, &draft, &frozen, &report)?;
        let snapshot = draft.finish(&manifest, &[frozen], spec.durability)?;
        saving.parent = Some((spec.id.clone(), snapshot.hold()?));
        saving.broken = false;
        Ok((snapshot, report))
    }

    fn ask(
        &self,
        draft: &Draft,
        overlay: &File,
        pagemap: Option<&File>,
        then: AfterSnapshot,
    ) -> Result<(), SaveError> {
        let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
        let mut add = |file| add(&mut fds, file);
        let config = SnapshotConfig {
            state: add(&draft.state),
            memory: add(&draft.memory),
            index: add(&draft.memory_index),
            pagemap: pagemap.map(&mut add),
            disks: draft
                .disk_indexes
                .iter()
                .map(|index| DiskFreeze {
                    overlay: add(overlay),
                    index: add(index),
                })
                .collect(),
            then,
        };
        Ok(self.link.send(&Request::Snapshot(config), &fds)?)
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

fn manifest(
    saving: &Saving,
    spec: &SnapshotSpec,
    draft: &Draft,
    frozen: &File,
    report: &SnapshotReport,
) -> Result<Manifest, SaveError> {
    let size = |file: &File| {
        let failed = |source| SaveError::Host {
            what: "size of a layer",
            source,
        };
        file.metadata().map(|m| m.len()).map_err(failed)
    };
    let index =
        jiffy_snapshot::read_index(&draft.disk_indexes[0]).map_err(|source| SaveError::Host {
            what: "disk index",
            source,
        })?;
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let hello = saving.hello.as_ref();
    Ok(Manifest {
        format: FORMAT,
        id: spec.id.clone(),
        parent: saving.parent.as_ref().map(|(id, _)| id.clone()),
        template: spec.template.clone(),
        created_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
        versions: Versions {
            vmm: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: hello.map(|h| h.kernel.clone()).unwrap_or_default(),
            agent: hello.map(|h| h.version.clone()).unwrap_or_default(),
        },
        cpu: report.cpu.clone(),
        vcpus: report.vcpus,
        memory: MemorySizes {
            bytes: size(&draft.memory)?,
            stored: report.stored,
            zero: report.zero,
        },
        disks: vec![DiskSizes {
            bytes: size(frozen)?,
            stored: index.stored.count(),
        }],
    })
}
