//! Requests for the lineage of sandboxes and snapshots.

use super::calls::path_segment;
use super::{Client, has_error_code};
use hyper::Method;
use jiffy_api_types::Lineage;

/// Sandbox or snapshot, by its complete id or by its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LineageTarget {
    /// Sandbox.
    Sandbox(String),
    /// Snapshot.
    Snapshot(String),
}

impl LineageTarget {
    /// Returns the id or name.
    pub fn id(&self) -> &str {
        match self {
            Self::Sandbox(id) | Self::Snapshot(id) => id,
        }
    }
}

impl Client {
    /// Finds the sandbox or the snapshot with this id, prefix of an id, or name.
    pub async fn sandbox_or_snapshot(&self, id: &str) -> anyhow::Result<LineageTarget> {
        match self.sandbox(id).await {
            Ok(sandbox) => Ok(LineageTarget::Sandbox(sandbox.record.id)),
            Err(e) if has_error_code(&e, "sandbox_not_found") => match self.snapshot(id).await {
                Ok(record) => Ok(LineageTarget::Snapshot(record.id)),
                // Neither exists: the first error names the id as a sandbox.
                Err(error) if has_error_code(&error, "snapshot_not_found") => Err(e),
                Err(error) => Err(error),
            },
            Err(e) => Err(e),
        }
    }

    /// Returns the sandboxes and snapshots that are connected with an object.
    pub async fn lineage(&self, target: &LineageTarget) -> anyhow::Result<Lineage> {
        let parameter = match target {
            LineageTarget::Sandbox(_) => "sandboxID",
            LineageTarget::Snapshot(_) => "snapshotID",
        };
        let path = format!("/lineage?{parameter}={}", path_segment(target.id())?);
        self.call(Method::GET, &path, &()).await
    }
}
