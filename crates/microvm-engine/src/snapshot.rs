//! Snapshots of a running microVM.

use crate::control_socket::ControlSocket;
use crate::snapshot_context::{
    CapturedDraft, SaveError, SnapshotContext, SnapshotSpec, UnpublishedSnapshot, add_fd,
};
use crate::vm::MicroVm;
use jiffy_engine_api::{CaptureNotice, now_ms};
use jiffy_proto::snapshot::{
    AfterSnapshot, DiskFreeze, SnapshotConfig, SnapshotDecision, SnapshotReport,
};
use jiffy_proto::vm::{Event, Request};
use jiffy_snapshot::{
    DiskSizes, Manifest, MemorySizes, SNAPSHOT_FORMAT, Snapshot, SnapshotDraft, SnapshotError,
    Store, Versions,
};
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Word of the VMM about a snapshot.
enum SnapshotProgress {
    Captured { stopped_us: u64 },
    Complete(SnapshotReport),
    Failed(SaveError),
}

impl SnapshotProgress {
    fn of(event: Event) -> Option<Self> {
        match event {
            Event::Captured { stopped_us } => Some(Self::Captured { stopped_us }),
            Event::Snapshotted(report) => Some(Self::Complete(report)),
            Event::SnapshotFailed {
                needed_bytes: Some(needed),
                ..
            } => Some(Self::Failed(SaveError::TooLarge { needed })),
            Event::SnapshotFailed { reason, .. } => Some(Self::Failed(SaveError::Refused(reason))),
            _ => None,
        }
    }
}

impl MicroVm {
    /// Takes a snapshot into `store`. Its parent is the snapshot that this VM was restored from, or
    /// the last one taken of it. With [`AfterSnapshot::Resume`] the guest is paused only for a
    /// moment that does not depend on its writes. If the snapshot fails, the guest runs on. If this
    /// call is dropped, the snapshot is taken nevertheless.
    pub async fn snapshot(
        &self,
        store: &Store,
        spec: &SnapshotSpec,
    ) -> Result<(Snapshot, SnapshotReport), SaveError> {
        self.snapshot_with_notice(store, spec, None).await
    }

    /// The same; `notice` is told when its memory is frozen, and dropped untold if the VMM does not
    /// capture it. From then on the VMM completes it also without this process
    /// ([`crate::AdoptSpec::captured`]).
    pub async fn snapshot_with_notice(
        &self,
        store: &Store,
        spec: &SnapshotSpec,
        notice: Option<CaptureNotice>,
    ) -> Result<(Snapshot, SnapshotReport), SaveError> {
        let taker = SnapshotTask {
            link: self.link.clone(),
            store: store.clone(),
            spec: spec.clone(),
            vmm: self.vmm_pid(),
        };
        let mut context = self.context.clone().lock_owned().await;
        // In a task that always completes: half-way, only its state refers to the layers below the
        // VM.
        let taken = tokio::spawn(async move { taker.run(&mut context, notice).await });
        taken.await.map_err(|e| SaveError::Refused(e.to_string()))?
    }

    /// Completes the snapshot that an earlier controller of this VM captured. If this call is
    /// dropped, it is completed nevertheless.
    pub async fn finish_captured(
        &self,
        store: &Store,
    ) -> Result<(Snapshot, SnapshotReport), SaveError> {
        let mut context = self.context.clone().lock_owned().await;
        let captured = context.captured.take().ok_or_else(|| {
            SaveError::Refused("its VMM knows of no captured snapshot".to_owned())
        })?;
        let taker = SnapshotTask {
            link: self.link.clone(),
            store: store.clone(),
            spec: captured.spec.clone(),
            vmm: self.vmm_pid(),
        };
        let taken = tokio::spawn(async move { taker.finish(&mut context, captured).await });
        taken.await.map_err(|e| SaveError::Refused(e.to_string()))?
    }
}

/// Files of a request beside those of the draft.
struct RequestFiles<'a> {
    overlay: &'a File,
    pagemap: Option<&'a File>,
    direct: Option<&'a File>,
    touched: Option<&'a File>,
    captured: bool,
}

/// Task that takes one snapshot.
struct SnapshotTask {
    link: Arc<ControlSocket>,
    store: Store,
    spec: SnapshotSpec,
    vmm: u32,
}

impl SnapshotTask {
    async fn run(
        self,
        context: &mut SnapshotContext,
        notice: Option<CaptureNotice>,
    ) -> Result<(Snapshot, SnapshotReport), SaveError> {
        // Publishes a former snapshot if that failed (disk full, for example): the next one is
        // based on it.
        context.publish()?;
        if context.lineage_lost {
            return Err(SaveError::Unsavable);
        }
        if self.store.root().join(&self.spec.id).exists() {
            return Err(SnapshotError::Exists(self.spec.id).into());
        }
        let mut draft = self.store.draft(1)?;
        let overlay = self.store.overlay()?;
        // Without it the VMM compares all of memory.
        let pagemap = File::open(format!("/proc/{}/pagemap", self.vmm)).ok();
        // All sandboxes of a template are made of the one without a parent: written through the
        // page cache it stays there, in huge pages.
        let direct = context.parent.as_ref().and_then(|_| draft.memory_direct());
        let touched = match self.spec.working_set {
            true => self.store.overlay().ok(),
            false => None,
        };
        let files = RequestFiles {
            overlay: &overlay,
            pagemap: pagemap.as_ref(),
            direct: direct.as_ref(),
            touched: touched.as_ref(),
            captured: notice.is_some(),
        };
        self.send_request(&draft, &files)?;
        let written = self.written(context, &mut draft, notice).await;
        // A captured draft stays if this process ends while it is written, and only then.
        let report = written.inspect_err(|_| draft.give_up())?;
        let frozen = std::mem::replace(&mut context.overlay, overlay);
        self.publish(
            context,
            UnpublishedSnapshot {
                draft,
                frozen,
                spec: self.spec.clone(),
                report,
                touched,
            },
        )
    }

    /// Waits until the VMM has written the snapshot.
    async fn written(
        &self,
        context: &mut SnapshotContext,
        draft: &mut SnapshotDraft,
        mut notice: Option<CaptureNotice>,
    ) -> Result<SnapshotReport, SaveError> {
        loop {
            match context.reply(SnapshotProgress::of).await? {
                SnapshotProgress::Captured { stopped_us } => {
                    let Some(notice) = notice.take() else {
                        continue;
                    };
                    let overlays = std::slice::from_ref(&context.overlay);
                    match self.store.keep_captured(&self.spec.id, draft, overlays) {
                        // The caller may be gone.
                        Ok(()) => drop(notice.send(stopped_us)),
                        Err(e) => {
                            let id = &self.spec.id;
                            tracing::warn!(id, "a snapshot is not captured, only stored: {e}");
                        }
                    }
                }
                SnapshotProgress::Complete(report) => return Ok(report),
                SnapshotProgress::Failed(e) => return Err(e),
            }
        }
    }

    async fn finish(
        self,
        context: &mut SnapshotContext,
        captured: CapturedDraft,
    ) -> Result<(Snapshot, SnapshotReport), SaveError> {
        let CapturedDraft {
            mut draft,
            frozen,
            spec,
            report,
        } = captured;
        let written = match report {
            Some(report) => Ok(report),
            None => self.written(context, &mut draft, None).await,
        };
        let report = match written {
            Ok(report) => report,
            Err(e) => {
                draft.give_up();
                // The VMM goes on with the overlay from before the snapshot.
                context.overlay = frozen;
                return Err(e);
            }
        };
        self.publish(
            context,
            UnpublishedSnapshot {
                draft,
                frozen,
                spec,
                report,
                touched: None,
            },
        )
    }

    /// Publishes what the VMM has written, and tells it what becomes of it.
    fn publish(
        &self,
        context: &mut SnapshotContext,
        written: UnpublishedSnapshot,
    ) -> Result<(Snapshot, SnapshotReport), SaveError> {
        context.unpublished = Some(written);
        let published = context.publish();
        let next = match (self.spec.then, &published) {
            (AfterSnapshot::Stop, Ok(_)) => Some(Request::Stop),
            (AfterSnapshot::Stop, Err(_)) => Some(Request::Resume),
            // Committed, also for a later controller. An unpublished snapshot may still be
            // published.
            (_, Ok(_)) => Some(Request::ResolveSnapshot {
                decision: SnapshotDecision::Commit,
            }),
            (_, Err(_)) => None,
        };
        if let Some(next) = next {
            // A VMM that is gone has stopped. The answer is not awaited: a commit cannot fail.
            let _ = self.link.send(&next, &[]);
        }
        // It was unpublished until now.
        published?.ok_or(SaveError::Gone)
    }

    fn send_request(
        &self,
        draft: &SnapshotDraft,
        files: &RequestFiles<'_>,
    ) -> Result<(), SaveError> {
        let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
        let mut add = |file| add_fd(&mut fds, file);
        let config = SnapshotConfig {
            id: self.spec.id.clone(),
            state: add(&draft.state),
            memory: add(&draft.memory),
            direct: files.direct.map(&mut add),
            index: add(&draft.memory_index),
            pagemap: files.pagemap.map(&mut add),
            working_set: files.touched.map(&mut add),
            disks: draft
                .disk_indexes
                .iter()
                .map(|index| DiskFreeze {
                    overlay: add(files.overlay),
                    index: add(index),
                })
                .collect(),
            // The VM ends only when the snapshot is published: until then the VMM holds the only
            // safe copy.
            then: match self.spec.then {
                AfterSnapshot::Stop => AfterSnapshot::Stay,
                other => other,
            },
            max_bytes: self.spec.max_bytes,
            captured: files.captured,
        };
        Ok(self.link.send(&Request::Snapshot(config), &fds)?)
    }
}

impl SnapshotContext {
    /// Publishes the unpublished snapshot, if there is one. If that fails it stays unpublished.
    fn publish(&mut self) -> Result<Option<(Snapshot, SnapshotReport)>, SaveError> {
        let Some(mut unpublished) = self.unpublished.take() else {
            return Ok(None);
        };
        let published = self.try_publish(&mut unpublished);
        if published.is_err() {
            // Only this process will publish it.
            unpublished.draft.give_up();
            self.unpublished = Some(unpublished);
        }
        published.map(Some)
    }

    fn try_publish(
        &mut self,
        of: &mut UnpublishedSnapshot,
    ) -> Result<(Snapshot, SnapshotReport), SaveError> {
        let manifest = manifest(self, of)?;
        let overlays = std::slice::from_ref(&of.frozen);
        let snapshot = of.draft.publish(&manifest, overlays, of.spec.durability)?;
        self.parent = Some((of.spec.id.clone(), snapshot.hold()?));
        if let Some(touched) = &of.touched {
            // A hint: a VMM of an earlier version leaves the file empty.
            let _ = snapshot.put_touched(touched);
        }
        Ok((snapshot, of.report.clone()))
    }
}

fn manifest(context: &SnapshotContext, of: &UnpublishedSnapshot) -> Result<Manifest, SaveError> {
    let UnpublishedSnapshot {
        draft,
        frozen,
        spec,
        report,
        ..
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
    let hello = context.hello.as_ref();
    Ok(Manifest {
        format: SNAPSHOT_FORMAT,
        id: spec.id.clone(),
        parent: context.parent.as_ref().map(|(id, _)| id.clone()),
        template: spec.template.clone(),
        created_ms: now_ms(),
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
        net: context.net,
        modules: context.modules.clone(),
    })
}
