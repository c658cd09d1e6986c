//! Requests for the lineage of sandboxes and snapshots.
//!
//! The *lineage* of a sandbox or snapshot consists of the snapshots and sandboxes that are
//! connected with it: ancestors, descendants, and sandboxes created from them.

use super::calls::path_segment;
use super::{Client, has_error_code};
use anyhow::anyhow;
use hyper::Method;
use jiffy_api_types::{Lineage, SandboxInfo, SnapshotInfo};

/// Record of a sandbox or of a snapshot.
#[derive(Debug, Clone)]
pub enum SandboxOrSnapshot {
    /// Sandbox.
    Sandbox(Box<SandboxInfo>),
    /// Snapshot.
    Snapshot(Box<SnapshotInfo>),
}

impl SandboxOrSnapshot {
    /// Returns the id.
    pub fn id(&self) -> &str {
        match self {
            Self::Sandbox(record) => &record.id,
            Self::Snapshot(record) => &record.id,
        }
    }
}

impl Client {
    /// Finds the sandbox or the snapshot with this id, prefix of an id, or name.
    pub async fn sandbox_or_snapshot(&self, id: &str) -> anyhow::Result<SandboxOrSnapshot> {
        match self.sandbox(id).await {
            Ok(sandbox) => return Ok(SandboxOrSnapshot::Sandbox(Box::new(sandbox.record))),
            Err(e) if has_error_code(&e, "sandbox_not_found") => {}
            Err(e) => return Err(e),
        }
        match self.snapshot(id).await {
            Ok(record) => Ok(SandboxOrSnapshot::Snapshot(Box::new(record))),
            Err(e) if has_error_code(&e, "snapshot_not_found") => Err(anyhow!(
                "sandbox or snapshot `{id}` does not exist on this host; list sandboxes with \
                 `jiffy ls --all` and snapshots with `jiffy snapshots`"
            )),
            Err(e) => Err(e),
        }
    }

    /// Returns the sandboxes and snapshots that are connected with an object. With `unfold`, series
    /// of automatic snapshots are returned as single snapshots.
    pub async fn lineage(
        &self,
        target: &SandboxOrSnapshot,
        unfold: bool,
    ) -> anyhow::Result<Lineage> {
        let parameter = match target {
            SandboxOrSnapshot::Sandbox(_) => "sandboxID",
            SandboxOrSnapshot::Snapshot(_) => "snapshotID",
        };
        let unfold = if unfold { "&unfold=all" } else { "" };
        let path = format!(
            "/lineage?{parameter}={}{unfold}",
            path_segment(target.id())?
        );
        self.call(Method::GET, &path, &()).await
    }
}
