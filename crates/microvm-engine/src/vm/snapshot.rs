//! Snapshots of a running microVM, from the side of the daemon: opens the files, sends the request
//! to the VMM, and publishes the result.
//!
//! The *overlay* is the file that receives the disk writes of a guest. The VMM *freezes* it for a
//! snapshot: the file becomes the disk layer of the snapshot, and a new overlay receives later
//! writes. A *draft* is the directory of a snapshot that is not published yet. A snapshot is
//! *captured* when its memory is frozen in a process of the VMM, which then completes the snapshot
//! even if the daemon exits.

use crate::control_socket::ControlSocket;
use crate::snapshot_context::{
    CapturedDraft, SaveError, SnapshotContext, SnapshotSpec, UnpublishedSnapshot, add_fd,
};
use crate::vm::MicroVm;
use jiffy_engine_api::CaptureNotice;
use jiffy_proto::snapshot::{
    AfterSnapshot, DiskFreeze, SnapshotConfig, SnapshotDecision, SnapshotReport,
};
use jiffy_proto::vm::{Event, Request};
use jiffy_snapshot::{Snapshot, SnapshotDraft, SnapshotError, Store};
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Progress of a snapshot, as reported by the VMM.
enum SnapshotProgress {
    Captured { stopped_us: u64 },
    Complete(SnapshotReport),
    Failed(SaveError),
}

impl SnapshotProgress {
    /// Converts a message of the VMM. `None` if the message does not concern a snapshot.
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
    /// Takes a snapshot into `store`. Its parent is the VM's latest snapshot, or else the snapshot
    /// from which the VM was restored. With [`AfterSnapshot::Resume`], the guest is paused only for
    /// a short time that does not depend on its writes. If the snapshot fails, the guest continues
    /// to run. The snapshot is completed even if this future is dropped.
    pub async fn snapshot(
        &self,
        store: &Store,
        spec: &SnapshotSpec,
    ) -> Result<(Snapshot, SnapshotReport), SaveError> {
        self.snapshot_with_notice(store, spec, None).await
    }

    /// Same as [`Self::snapshot`]. `notice` is sent when the memory is frozen, and dropped if the
    /// VMM does not capture the snapshot. After the notice, the VMM completes the snapshot even if
    /// this process exits ([`crate::AdoptSpec::captured`]).
    pub async fn snapshot_with_notice(
        &self,
        store: &Store,
        spec: &SnapshotSpec,
        notice: Option<CaptureNotice>,
    ) -> Result<(Snapshot, SnapshotReport), SaveError> {
        let task = SnapshotTask {
            link: self.link.clone(),
            store: store.clone(),
            spec: spec.clone(),
            vmm: self.vmm_pid(),
        };
        if spec.disk_only && !self.supported_requests.disk_only {
            return Err(SaveError::Refused(
                "the VMM was started by an earlier version of jiffy, which always stores the memory"
                    .to_owned(),
            ));
        }
        // The lock is held until the snapshot is published, so that operations of this VM do not
        // overlap.
        let mut context = self.context.clone().lock_owned().await;
        // A separate task always completes: during a snapshot, only the task's state refers to the
        // layers on which the VM is based.
        let result = tokio::spawn(async move { task.run(&mut context, notice).await });
        result
            .await
            .map_err(|e| SaveError::Refused(e.to_string()))?
    }

    /// Completes the snapshot that an earlier controller of this VM captured. The snapshot is
    /// completed even if this future is dropped.
    pub async fn finish_captured(
        &self,
        store: &Store,
    ) -> Result<(Snapshot, SnapshotReport), SaveError> {
        let mut context = self.context.clone().lock_owned().await;
        let captured = context
            .captured
            .take()
            .ok_or_else(|| SaveError::Refused("the VMM has no captured snapshot".to_owned()))?;
        let task = SnapshotTask {
            link: self.link.clone(),
            store: store.clone(),
            spec: captured.spec.clone(),
            vmm: self.vmm_pid(),
        };
        let result = tokio::spawn(async move { task.finish(&mut context, captured).await });
        result
            .await
            .map_err(|e| SaveError::Refused(e.to_string()))?
    }
}

/// Files of a request other than the files of the draft, and its `captured` flag.
struct RequestFiles<'a> {
    /// New overlay, which receives the guest's writes after the snapshot.
    overlay: &'a File,
    /// `/proc/PID/pagemap` of the VMM.
    pagemap: Option<&'a File>,
    /// Memory file of the draft, opened with `O_DIRECT`. `None` to write through the page cache.
    direct: Option<&'a File>,
    /// Receives the index of the touched chunks. `None` if not recorded.
    touched: Option<&'a File>,
    /// True if the VMM reports when the memory is frozen ([`SnapshotConfig::captured`]).
    captured: bool,
}

/// Task that takes one snapshot.
struct SnapshotTask {
    link: Arc<ControlSocket>,
    store: Store,
    spec: SnapshotSpec,
    /// Process id of the VMM.
    vmm: u32,
}

impl SnapshotTask {
    /// Takes the snapshot: opens its files, sends the request to the VMM, waits until the VMM has
    /// written them, and publishes the snapshot.
    async fn run(
        self,
        context: &mut SnapshotContext,
        notice: Option<CaptureNotice>,
    ) -> Result<(Snapshot, SnapshotReport), SaveError> {
        // Publish an earlier snapshot whose publication failed (for example because the disk was
        // full): the next snapshot is based on it.
        context.publish()?;
        if context.lineage_lost {
            return Err(SaveError::Unsavable);
        }
        if self.store.root().join(&self.spec.id).exists() {
            return Err(SnapshotError::Exists(self.spec.id).into());
        }
        let mut draft = self.store.draft(1)?;
        let overlay = self.store.overlay()?;
        // Without the pagemap, the VMM compares all memory.
        let pagemap = File::open(format!("/proc/{}/pagemap", self.vmm)).ok();
        // The snapshot without a parent is written through the page cache: all sandboxes of a
        // template are restored from it, so it should stay in the cache in huge pages.
        let direct = context.parent.as_ref().and_then(|_| draft.memory_direct());
        let touched = if self.spec.working_set {
            self.store.overlay().ok()
        } else {
            None
        };
        let files = RequestFiles {
            overlay: &overlay,
            pagemap: pagemap.as_ref(),
            direct: direct.as_ref(),
            touched: touched.as_ref(),
            captured: notice.is_some(),
        };
        self.send_request(&draft, &files)?;
        let written = self.wait_until_written(context, &mut draft, notice).await;
        // After a failure, the draft is removed even if it was captured. A captured draft remains
        // only if this process exits while the snapshot is written.
        let report = written.inspect_err(|_| draft.remove_on_drop())?;
        // Later snapshots and `overlay_bytes` refer to the new overlay.
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
    async fn wait_until_written(
        &self,
        context: &mut SnapshotContext,
        draft: &mut SnapshotDraft,
        mut notice: Option<CaptureNotice>,
    ) -> Result<SnapshotReport, SaveError> {
        loop {
            match context.reply(SnapshotProgress::of).await? {
                SnapshotProgress::Captured { stopped_us } => {
                    // This is a second report of the capture, or the capture was not requested.
                    let Some(notice) = notice.take() else {
                        continue;
                    };
                    let overlays = std::slice::from_ref(&context.overlay);
                    match self.store.persist_captured(&self.spec.id, draft, overlays) {
                        // Ignore the error: the caller was cancelled.
                        Ok(()) => drop(notice.send(stopped_us)),
                        Err(e) => {
                            let id = &self.spec.id;
                            tracing::warn!(id, error = %e, "cannot capture a snapshot, storing it only");
                        }
                    }
                }
                SnapshotProgress::Complete(report) => return Ok(report),
                SnapshotProgress::Failed(e) => return Err(e),
            }
        }
    }

    /// Waits until a captured snapshot is written, and publishes it.
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
            None => self.wait_until_written(context, &mut draft, None).await,
        };
        let report = match written {
            Ok(report) => report,
            Err(e) => {
                draft.remove_on_drop();
                // The VMM continues with the overlay from before the snapshot.
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

    /// Publishes the snapshot that the VMM has written, and sends the VMM the decision.
    fn publish(
        &self,
        context: &mut SnapshotContext,
        written: UnpublishedSnapshot,
    ) -> Result<(Snapshot, SnapshotReport), SaveError> {
        // Store the written snapshot in the context first: if its publication fails, the next
        // snapshot of this VM publishes it.
        context.unpublished = Some(written);
        let published = context.publish();
        let next = match (self.spec.then, &published) {
            // The guest is paused. Terminate it only if its state is safe.
            (AfterSnapshot::Stop, Ok(_)) => Some(Request::Stop),
            (AfterSnapshot::Stop, Err(_)) => Some(Request::Resume),
            // The snapshot is published: the VMM commits it, also for a later controller.
            (_, Ok(_)) => Some(Request::ResolveSnapshot {
                decision: SnapshotDecision::Commit,
            }),
            // The VMM receives no decision: the snapshot may still be published.
            (_, Err(_)) => None,
        };
        if let Some(next) = next {
            // Ignore the error: the VMM has exited. No reply is awaited because a commit cannot
            // fail.
            let _ = self.link.send(&next, &[]);
        }
        // `None` is impossible: the snapshot was unpublished until now.
        published?.ok_or(SaveError::Gone)
    }

    /// Sends the request for a snapshot to the VMM, with the files of the draft.
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
            disk_only: self.spec.disk_only,
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
            // The VMM must not stop before the snapshot is published: until then, it holds the only
            // safe copy of the state.
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
