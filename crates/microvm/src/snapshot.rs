//! Snapshots of a running microVM.

use crate::link::Link;
use crate::saving::{SaveError, Saving, add};
use crate::vm::MicroVm;
use jiffy_proto::snapshot::{AfterSnapshot, DiskFreeze, SnapshotConfig, SnapshotReport};
use jiffy_proto::vm::{Event, Request};
use jiffy_snapshot::{
    DiskSizes, Draft, Durability, FORMAT, Manifest, MemorySizes, Snapshot, SnapshotError, Store,
    Versions,
};
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

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
    /// Most bytes that it may have ([`Snapshot::bytes`]); none: any number.
    pub max_bytes: Option<u64>,
}

/// A snapshot that the VMM has written: its memory and disk lie on it from now on, whether or not it gets its name.
#[derive(Debug)]
pub(crate) struct Unnamed {
    draft: Draft,
    /// The disk's layer.
    frozen: File,
    spec: SnapshotSpec,
    report: SnapshotReport,
}

impl MicroVm {
    /// Takes a snapshot into `store`. Its parent is the snapshot that this VM was restored from, or the last one taken of it. With
    /// [`AfterSnapshot::Resume`] the guest stands still only for a moment that does not depend on what it has written. If it fails,
    /// the guest runs on. If this call is dropped, the snapshot is taken nevertheless.
    pub async fn snapshot(
        &self,
        store: &Store,
        spec: &SnapshotSpec,
    ) -> Result<(Snapshot, SnapshotReport), SaveError> {
        let taker = Taker {
            link: self.link.clone(),
            store: store.clone(),
            spec: spec.clone(),
            vmm: self.vmm_pid(),
        };
        let mut saving = self.saving.clone().lock_owned().await;
        // In a task: half-way, the VM lies on layers that nobody but this knows of.
        let taken = tokio::spawn(async move { taker.take(&mut saving).await });
        taken.await.map_err(|e| SaveError::Refused(e.to_string()))?
    }
}

/// Everything that taking a snapshot needs.
struct Taker {
    link: Arc<Link>,
    store: Store,
    spec: SnapshotSpec,
    vmm: u32,
}

impl Taker {
    async fn take(self, saving: &mut Saving) -> Result<(Snapshot, SnapshotReport), SaveError> {
        // The store had no room for the last one's name, say; the next one lies on it.
        saving.name()?;
        if saving.lost {
            return Err(SaveError::Unsavable);
        }
        if self.store.root().join(&self.spec.id).exists() {
            return Err(SnapshotError::Exists(self.spec.id).into());
        }
        let draft = self.store.draft(1)?;
        let overlay = self.store.overlay()?;
        // Without it the VMM looks through all of memory.
        let pagemap = File::open(format!("/proc/{}/pagemap", self.vmm)).ok();
        let direct = draft.memory_direct();
        self.ask(&draft, &overlay, pagemap.as_ref(), direct.as_ref())?;
        let report = saving
            .reply(|event| match event {
                Event::Snapshotted(report) => Some(Ok(report)),
                Event::SnapshotFailed {
                    needed_bytes: Some(needed),
                    ..
                } => Some(Err(SaveError::TooLarge { needed })),
                Event::SnapshotFailed { reason, .. } => Some(Err(SaveError::Refused(reason))),
                _ => None,
            })
            .await??;
        saving.unnamed = Some(Unnamed {
            draft,
            frozen: std::mem::replace(&mut saving.overlay, overlay),
            spec: self.spec.clone(),
            report,
        });
        let named = saving.name();
        let next = match (self.spec.then, &named) {
            (AfterSnapshot::Stop, Ok(_)) => Some(Request::Stop),
            (AfterSnapshot::Stop, Err(_)) => Some(Request::Resume),
            // Now it happened, also for whoever commands the VMM after us. One without a name may still get it.
            (_, Ok(_)) => Some(Request::Settle { happened: true }),
            (_, Err(_)) => None,
        };
        if let Some(next) = next {
            // A VMM that is gone has stopped. Nobody waits for its answer: it cannot fail to forget.
            let _ = self.link.send(&next, &[]);
        }
        // It was unnamed until now.
        named?.ok_or(SaveError::Gone)
    }

    fn ask(
        &self,
        draft: &Draft,
        overlay: &File,
        pagemap: Option<&File>,
        direct: Option<&File>,
    ) -> Result<(), SaveError> {
        let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
        let mut add = |file| add(&mut fds, file);
        let config = SnapshotConfig {
            id: self.spec.id.clone(),
            state: add(&draft.state),
            memory: add(&draft.memory),
            direct: direct.map(&mut add),
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
            // It ends when the snapshot has its name, and not before: until then only the VMM has what it holds for sure.
            then: match self.spec.then {
                AfterSnapshot::Stop => AfterSnapshot::Stay,
                other => other,
            },
            max_bytes: self.spec.max_bytes,
        };
        Ok(self.link.send(&Request::Snapshot(config), &fds)?)
    }
}

impl Saving {
    /// Gives the unnamed snapshot its name, if there is one. If that fails it stays unnamed.
    fn name(&mut self) -> Result<Option<(Snapshot, SnapshotReport)>, SaveError> {
        let Some(mut unnamed) = self.unnamed.take() else {
            return Ok(None);
        };
        let named = self.try_name(&mut unnamed);
        if named.is_err() {
            self.unnamed = Some(unnamed);
        }
        named.map(Some)
    }

    fn try_name(&mut self, of: &mut Unnamed) -> Result<(Snapshot, SnapshotReport), SaveError> {
        let manifest = manifest(self, of)?;
        let overlays = std::slice::from_ref(&of.frozen);
        let snapshot = of.draft.finish(&manifest, overlays, of.spec.durability)?;
        self.parent = Some((of.spec.id.clone(), snapshot.hold()?));
        Ok((snapshot, of.report.clone()))
    }
}

fn manifest(saving: &Saving, of: &Unnamed) -> Result<Manifest, SaveError> {
    let Unnamed {
        draft,
        frozen,
        spec,
        report,
    } = of;
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
        net: saving.net,
        modules: saving.modules.clone(),
    })
}
