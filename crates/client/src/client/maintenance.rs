//! Requests for resource usage and for the removal of unused data.

use super::Client;
use hyper::Method;
use jiffy_api_types::{AllMetrics, Metric, PruneHost, PrunedHost};
use std::collections::BTreeMap;
use std::time::Duration;

/// Maximum number of sandboxes in a request for their usage.
const MAX_SANDBOXES_PER_REQUEST: usize = 100;

impl Client {
    /// Returns the current usage of sandboxes by id. For sandboxes that are not running, returns
    /// the last sample.
    pub async fn metrics(&self, ids: &[&str]) -> anyhow::Result<BTreeMap<String, Metric>> {
        self.usage(ids, "now=true&").await
    }

    /// Like [`Self::metrics`], but returns the last periodic sample of each sandbox, which is at
    /// most 10 s old. This causes no measurements.
    pub async fn sampled_metrics(&self, ids: &[&str]) -> anyhow::Result<BTreeMap<String, Metric>> {
        self.usage(ids, "").await
    }

    /// Requests the usage of sandboxes, in several calls if necessary.
    async fn usage(
        &self,
        ids: &[&str],
        parameters: &str,
    ) -> anyhow::Result<BTreeMap<String, Metric>> {
        let mut all = BTreeMap::new();
        for ids in ids.chunks(MAX_SANDBOXES_PER_REQUEST) {
            let path = format!(
                "/sandboxes/metrics?{parameters}sandbox_ids={}",
                ids.join(",")
            );
            let metrics: AllMetrics = self.call(Method::GET, &path, &()).await?;
            all.extend(metrics.sandboxes);
        }
        Ok(all)
    }

    /// Removes data that was unused for `unused`. With `dry_run`, only returns the data that would
    /// be removed.
    pub async fn prune(&self, unused: Duration, dry_run: bool) -> anyhow::Result<PrunedHost> {
        let body = PruneHost {
            dry_run,
            unused_seconds: unused.as_secs(),
        };
        self.call(Method::POST, "/prune", &body).await
    }
}
