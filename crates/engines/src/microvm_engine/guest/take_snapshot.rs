//! Snapshots of running microVMs.

use crate::microvm_engine::guest::MicroVmGuest;
use crate::restore_policy::RestorePolicy;
use jiffy_engine_api::{AfterSnapshot, BootMode, CaptureNotice, EngineError, SnapshotTimes};
use jiffy_microvm_engine::{SaveError, SnapshotSpec};
use jiffy_proto::snapshot::{AfterSnapshot as Then, SnapshotReport};
use jiffy_snapshot::{Durability, Snapshot};

impl MicroVmGuest {
    /// Takes snapshot `id` of the guest.
    pub(in crate::microvm_engine) async fn save(
        &self,
        id: &str,
        then: AfterSnapshot,
        max_bytes: Option<u64>,
        notice: Option<CaptureNotice>,
    ) -> Result<SnapshotTimes, EngineError> {
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
                && self.vm.report().mode != BootMode::Cold,
        };
        let saved = self
            .vm
            .snapshot_with_notice(&self.shared.store, &spec, notice);
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
