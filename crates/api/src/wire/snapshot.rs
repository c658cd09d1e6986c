//! Conversion of snapshots to the bodies of the API.

use super::moment;
use crate::app::App;
use crate::caller::Caller;
use jiffy_api_types::{Snapshot, SnapshotInfo, SnapshotStatus};
use jiffy_sandbox_manager as manager;

impl App {
    /// Returns a snapshot in the form that the caller may see.
    pub(crate) fn snapshot_info(&self, caller: &Caller, snapshot: &manager::Snapshot) -> Snapshot {
        let mut info = SnapshotInfo::from(snapshot.clone());
        info.sandbox = caller.shown_id(snapshot.sandbox()).to_owned();
        if !caller.is_owner() {
            info.env.clear();
        }
        Snapshot {
            snapshot_id: snapshot.id().to_owned(),
            names: snapshot.name().map(str::to_owned).into_iter().collect(),
            status: if snapshot.is_storing() {
                SnapshotStatus::Storing
            } else {
                SnapshotStatus::Ready
            },
            // A template snapshot has no sandbox.
            origin_sandbox_id: Some(info.sandbox.clone()).filter(|s| !s.is_empty()),
            template_id: caller.display_name(snapshot.template()),
            parent_snapshot_id: snapshot.parent().map(str::to_owned),
            purpose: snapshot.purpose(),
            cpu_count: snapshot.size().vcpus,
            memory_mb: snapshot.size().memory_mib,
            disk_size_mb: snapshot.size().disk_mib,
            created_at: moment(snapshot.created_ms()),
            // Snapshots never change.
            updated_at: moment(snapshot.created_ms()),
            stopped_ms: snapshot.stopped_ms(),
            total_ms: snapshot.total_ms(),
            store_state: self.sandboxes.snapshots().store_state(snapshot),
            jiffy: info,
        }
    }
}
