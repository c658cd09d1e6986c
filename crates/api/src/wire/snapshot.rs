//! Snapshots as clients see them.

use super::moment;
use crate::app::App;
use crate::caller::Caller;
use jiffy_proto::agent::SiteSettings;
use jiffy_sandbox_manager::{SnapshotPurpose, SnapshotRecord, StoreCopies, StoreState};
use serde::Serialize;

/// A snapshot.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Snapshot {
    #[serde(rename = "snapshotID")]
    snapshot_id: String,
    names: Vec<String>,
    status: &'static str,
    #[serde(rename = "originSandboxID", skip_serializing_if = "Option::is_none")]
    origin_sandbox_id: Option<String>,
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "parentSnapshotID", skip_serializing_if = "Option::is_none")]
    parent_snapshot_id: Option<String>,
    purpose: SnapshotPurpose,
    cpu_count: u8,
    #[serde(rename = "memoryMB")]
    memory_mb: u32,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u64,
    created_at: String,
    updated_at: String,
    /// Time for which the guest stood still, in milliseconds.
    stopped_ms: f64,
    /// From the request to its completion; 0 until then.
    total_ms: f64,
    /// State in the store that hosts share; none: this host shares none.
    #[serde(skip_serializing_if = "Option::is_none")]
    store_state: Option<StoreState>,
    /// The whole record; its environment is in it for the host's owner only.
    jiffy: SnapshotRecord,
}

impl Snapshot {
    pub fn new(app: &App, caller: &Caller, record: &SnapshotRecord) -> Self {
        let mut whole = record.clone();
        // Certificates are long, and a proxy's password is a secret.
        whole.site = SiteSettings::default();
        // Names of the host's buckets are no business of its clients.
        whole.store = StoreCopies::default();
        whole.sandbox = caller.shown_id(&record.sandbox).to_owned();
        if !caller.is_owner() {
            whole.env.clear();
        }
        Self {
            snapshot_id: record.id.clone(),
            names: record.name.iter().cloned().collect(),
            status: match record.storing {
                true => "storing",
                false => "ready",
            },
            origin_sandbox_id: Some(whole.sandbox.clone()).filter(|s| !s.is_empty()),
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
            store_state: app.sandboxes.snapshots().store_state(record),
            jiffy: whole,
        }
    }
}
