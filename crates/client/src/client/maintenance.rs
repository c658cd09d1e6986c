//! Usage of sandboxes, and removal of unused data.

use super::Client;
use hyper::Method;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Duration;

/// Most sandboxes of one look at what they use.
const MAX_SANDBOXES_PER_LOOK: usize = 100;

/// Usage of a sandbox at one moment. Sizes in bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metric {
    /// When.
    pub timestamp: String,
    /// Virtual processors.
    pub cpu_count: u8,
    /// Of all of them together, in percent.
    pub cpu_used_pct: f64,
    /// Memory in use.
    pub mem_used: u64,
    /// Memory there is.
    pub mem_total: u64,
    /// Disk in use.
    pub disk_used: u64,
    /// Disk there is.
    pub disk_total: u64,
    /// Sent since it came up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub net_bytes_out: Option<u64>,
    /// Received since it came up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub net_bytes_in: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct Metrics {
    sandboxes: BTreeMap<String, Metric>,
}

/// Unused data that was removed, or would be.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pruned {
    /// True if this was a dry run.
    pub dry_run: bool,
    /// Disk space of all of it.
    pub bytes: u64,
    /// Things.
    pub items: Vec<PrunedItem>,
}

/// A thing that nothing needed.
#[derive(Debug, Serialize, Deserialize)]
pub struct PrunedItem {
    /// Its kind, in a word.
    pub kind: String,
    /// Its id or name.
    pub id: String,
    /// Its subject.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Disk space that it takes itself.
    pub bytes: u64,
}

impl Client {
    /// Usage of these sandboxes now, by id; of those that do not run, the last sample.
    pub async fn metrics(&self, ids: &[&str]) -> anyhow::Result<BTreeMap<String, Metric>> {
        let mut all = BTreeMap::new();
        for some in ids.chunks(MAX_SANDBOXES_PER_LOOK) {
            let path = format!("/sandboxes/metrics?now=true&sandbox_ids={}", some.join(","));
            let found: Metrics = self.call(Method::GET, &path, &()).await?;
            all.extend(found.sandboxes);
        }
        Ok(all)
    }

    /// Removes what nothing needed for so long, or tells what that is.
    pub async fn prune(&self, unused: Duration, dry_run: bool) -> anyhow::Result<Pruned> {
        let body = json!({ "dryRun": dry_run, "unusedSeconds": unused.as_secs() });
        self.call(Method::POST, "/prune", &body).await
    }
}
