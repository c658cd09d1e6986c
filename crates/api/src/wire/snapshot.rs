//! Snapshots as clients see them.

use super::moment;
use crate::app::App;
use crate::caller::Caller;
use jiffy_api_types::{Snapshot, SnapshotInfo, SnapshotStatus};
use jiffy_sandbox_manager::SnapshotRecord;

impl App {
    /// A snapshot as the caller sees it.
    pub(crate) fn shown_snapshot(&self, caller: &Caller, record: &SnapshotRecord) -> Snapshot {
        let mut info = SnapshotInfo::from(record.clone());
        info.sandbox = caller.shown_id(&record.sandbox).to_owned();
        if !caller.is_owner() {
            info.env.clear();
        }
        Snapshot {
            snapshot_id: record.id.clone(),
            names: record.name.iter().cloned().collect(),
            status: match record.storing {
                true => SnapshotStatus::Storing,
                false => SnapshotStatus::Ready,
            },
            origin_sandbox_id: Some(info.sandbox.clone()).filter(|s| !s.is_empty()),
            template_id: caller.called(&record.template),
            parent_snapshot_id: record.parent.clone(),
            purpose: record.purpose,
            cpu_count: record.size.vcpus,
            memory_mb: record.size.memory_mib,
            disk_size_mb: record.size.disk_mib,
            created_at: moment(record.created_ms),
            updated_at: moment(record.created_ms),
            stopped_ms: record.stopped_ms,
            total_ms: record.total_ms,
            store_state: self.sandboxes.snapshots().store_state(record),
            jiffy: info,
        }
    }
}
