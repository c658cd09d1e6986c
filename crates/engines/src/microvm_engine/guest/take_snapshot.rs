//! Snapshots of running microVMs: of memory and disk, or of the disk only, after the agent has
//! frozen its file system.

use crate::microvm_engine::guest::MicroVmGuest;
use crate::restore_policy::RestorePolicy;
use crate::vm_agent::agent;
use jiffy_engine_api::{
    AfterSnapshot, BootMode, EngineError, SnapshotRequest, SnapshotTimes, steps,
};
use jiffy_microvm_engine::{SaveError, SnapshotSpec};
use jiffy_proto::snapshot::{AfterSnapshot as Then, SnapshotReport};
use jiffy_snapshot::{Durability, Snapshot};
use std::io;
use std::time::Duration;

/// Timeout of a freeze or thaw of the disk. A freeze writes all changed data of the guest.
const FREEZE_LIMIT: Duration = Duration::from_secs(60);

impl MicroVmGuest {
    /// Takes a snapshot of the guest's disk without its memory.
    pub(in crate::microvm_engine) async fn save_disk(
        &self,
        request: SnapshotRequest<'_>,
    ) -> Result<SnapshotTimes, EngineError> {
        let then = request.then;
        let agent = agent(&self.vm);
        let agent = match self.identity().access_token {
            Some(token) => agent.with_token(token),
            None => agent,
        };
        let step = steps::begin("freeze_disk");
        let frozen = tokio::time::timeout(FREEZE_LIMIT, agent.freeze_disk()).await;
        drop(step);
        let frozen =
            frozen.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()));
        let saved = match frozen {
            Ok(()) => self.save(request).await,
            Err(e) => Err(EngineError::Failed {
                reason: format!(
                    "the sandbox could not write its changes to its disk: {e}; it continues to run"
                ),
            }),
        };
        // A guest that stops must not change its disk afterwards.
        if then == AfterSnapshot::Resume || saved.is_err() {
            let _step = steps::begin("thaw_disk");
            let thawed = tokio::time::timeout(FREEZE_LIMIT, agent.thaw_disk()).await;
            if !matches!(thawed, Ok(Ok(()))) {
                // The agent thaws the disk itself after some seconds.
                tracing::warn!("cannot thaw the disk of a sandbox");
            }
        }
        saved
    }

    /// Takes a snapshot of the guest. Without memory, the disk must be frozen.
    pub(in crate::microvm_engine) async fn save(
        &self,
        request: SnapshotRequest<'_>,
    ) -> Result<SnapshotTimes, EngineError> {
        let SnapshotRequest {
            id,
            content,
            then,
            max_bytes,
            notice,
            ..
        } = request;
        let spec = SnapshotSpec {
            id: id.to_owned(),
            template: self.image.clone(),
            then: match then {
                AfterSnapshot::Resume => Then::Resume,
                AfterSnapshot::Stop => Then::Stop,
            },
            // The daemon's journal is not synchronised either: a power failure may lose both.
            durability: Durability::PageCache,
            max_bytes,
            // The pages that a guest has touched since its restore are the working set of the next
            // restore. They are only known for a restored guest with mapped memory.
            working_set: then == AfterSnapshot::Stop
                && self.shared.policy.policy == RestorePolicy::Map
                && self.vm.report().mode != BootMode::Cold
                && content.is_full(),
            disk_only: !content.is_full(),
        };
        let saved = self.vm.snapshot_with_notice(
            &self.shared.store,
            &spec,
            notice.filter(|_| content.is_full()),
        );
        let saved = saved.await;
        self.times(saved, max_bytes)
    }

    /// Converts the result of a snapshot. An error may have its cause in the exit of the guest.
    pub(in crate::microvm_engine) fn times(
        &self,
        saved: Result<(Snapshot, SnapshotReport), SaveError>,
        max_bytes: Option<u64>,
    ) -> Result<SnapshotTimes, EngineError> {
        let (_, report) = saved.map_err(|e| match (e, self.vm.end()) {
            (SaveError::Gone, Some(end)) => EngineError::Ended { end },
            (SaveError::TooLarge { needed }, _) => EngineError::SnapshotTooLarge {
                needed,
                most: max_bytes.unwrap_or(u64::MAX),
            },
            (e, _) => EngineError::failed(e),
        })?;
        Ok(SnapshotTimes {
            stopped_us: report.stopped_us,
            total_us: report.total_us,
        })
    }
}
