//! Publication of a snapshot after the VMM has written its files: writes the manifest and renames
//! the directory. Later snapshots of the microVM have the published one as their parent.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran. A *hold* on a snapshot
//! prevents its removal. A *draft* is the directory of a snapshot that is not published yet.

use super::{SaveError, SnapshotContext, UnpublishedSnapshot};
use jiffy_engine_api::now_ms;
use jiffy_proto::snapshot::{AfterSnapshot, SnapshotReport};
use jiffy_snapshot::{DiskSizes, Manifest, MemorySizes, SNAPSHOT_FORMAT, Snapshot, Versions};
use std::fs::File;

impl SnapshotContext {
    /// Publishes the unpublished snapshot, if any. If this fails, the snapshot remains unpublished.
    pub fn publish(&mut self) -> Result<Option<(Snapshot, SnapshotReport)>, SaveError> {
        let Some(mut unpublished) = self.unpublished.take() else {
            return Ok(None);
        };
        let published = self.try_publish(&mut unpublished);
        if published.is_err() {
            // This process publishes the draft before the next snapshot. If this process exits, the
            // draft is removed, so that a daemon that adopts the VM does not find it.
            unpublished.draft.remove_on_drop();
            self.unpublished = Some(unpublished);
        }
        published.map(Some)
    }

    /// Completes a snapshot that the VMM has written: writes its manifest and renames its draft.
    /// The snapshot becomes the parent of the next one.
    fn try_publish(
        &mut self,
        unpublished: &mut UnpublishedSnapshot,
    ) -> Result<(Snapshot, SnapshotReport), SaveError> {
        let manifest = manifest(self, unpublished)?;
        let overlays = std::slice::from_ref(&unpublished.frozen);
        let snapshot =
            unpublished
                .draft
                .publish(&manifest, overlays, unpublished.spec.durability)?;
        // Later snapshots are based on the memory of this one.
        self.fresh_memory = false;
        // Hold the new parent before the hold on the former parent is dropped.
        self.parent = Some((unpublished.spec.id.clone(), snapshot.hold()?));
        if let Some(touched) = &unpublished.touched {
            // Ignore the result: the touched chunks only serve prefetching, and VMMs of earlier
            // versions leave the file empty.
            let _ = snapshot.put_touched(touched);
        }
        Ok((snapshot, unpublished.report.clone()))
    }
}

/// Returns the manifest of a snapshot that the VMM has written.
fn manifest(
    context: &SnapshotContext,
    unpublished: &UnpublishedSnapshot,
) -> Result<Manifest, SaveError> {
    let UnpublishedSnapshot {
        draft,
        frozen,
        spec,
        report,
        ..
    } = unpublished;
    let size = |file: &File| {
        let failed = |source| SaveError::Host {
            what: "cannot read the size of a layer",
            source,
        };
        file.metadata().map(|m| m.len()).map_err(failed)
    };
    let index =
        jiffy_snapshot::read_index(&draft.disk_indexes[0]).map_err(|source| SaveError::Host {
            what: "cannot read the disk index",
            source,
        })?;
    // `None` in an adopted VM whose greeting was not recorded.
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
            // True if the memory does not depend on the parent's memory. This is also the case
            // after a pause without memory: the guest stops, and its next boot starts with empty
            // memory. If the guest resumes after a snapshot without memory, later snapshots are
            // based on the memory of the ancestors.
            complete: context.parent.is_some()
                && (context.fresh_memory || spec.disk_only && spec.then == AfterSnapshot::Stop),
        },
        disks: vec![DiskSizes {
            bytes: size(frozen)?,
            stored: index.stored.count(),
        }],
        net: context.net,
        modules: context.modules.clone(),
        disk_only: spec.disk_only,
    })
}
