//! Usage of sandboxes, and removal of unused data.

use super::Client;
use hyper::Method;
use jiffy_api_types::{AllMetrics, Metric, PruneHost, PrunedHost};
use std::collections::BTreeMap;
use std::time::Duration;

/// Most sandboxes of one look at what they use.
const MAX_SANDBOXES_PER_LOOK: usize = 100;

impl Client {
    /// Usage of these sandboxes now, by id; of those that do not run, the last sample.
    pub async fn metrics(&self, ids: &[&str]) -> anyhow::Result<BTreeMap<String, Metric>> {
        let mut all = BTreeMap::new();
        for some in ids.chunks(MAX_SANDBOXES_PER_LOOK) {
            let path = format!("/sandboxes/metrics?now=true&sandbox_ids={}", some.join(","));
            let found: AllMetrics = self.call(Method::GET, &path, &()).await?;
            all.extend(found.sandboxes);
        }
        Ok(all)
    }

    /// Removes what nothing needed for so long, or tells what that is.
    pub async fn prune(&self, unused: Duration, dry_run: bool) -> anyhow::Result<PrunedHost> {
        let body = PruneHost {
            dry_run,
            unused_seconds: unused.as_secs(),
        };
        self.call(Method::POST, "/prune", &body).await
    }
}
