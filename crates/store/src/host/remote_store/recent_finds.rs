//! Snapshots that were found with a resume bundle shortly before. A resume finds its snapshot
//! twice: to describe it and to fetch it.
//!
//! A *tenant* is an owner of snapshots in the store, usually an API key. The objects of a tenant
//! are encrypted with its keys.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors. The *resume bundle*
//! of a snapshot is an object with copies of the content that a host reads first to resume it.

use crate::host::FoundSnapshot;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Maximum number of snapshots.
const MAX_FINDS: usize = 8;
/// Time after which a snapshot is read again.
const FIND_TIME: Duration = Duration::from_secs(10);

/// Result of a search for a snapshot, for the operation that follows.
#[derive(Debug)]
struct RecentFind {
    tenant: String,
    id: String,
    at: Instant,
    lineage: Vec<FoundSnapshot>,
}

/// Snapshots that were found shortly before.
#[derive(Debug, Default)]
pub(crate) struct RecentFinds(Mutex<VecDeque<RecentFind>>);

impl RecentFinds {
    /// Returns the lineage of snapshot `id` of `tenant` if it was found recently.
    pub fn get(&self, tenant: &str, id: &str) -> Option<Vec<FoundSnapshot>> {
        let mut finds = self.0.lock();
        finds.retain(|find| find.at.elapsed() < FIND_TIME);
        let mut finds = finds.iter();
        let find = finds.find(|find| find.tenant == tenant && find.id == id)?;
        Some(find.lineage.clone())
    }

    /// Adds a snapshot. Removes the oldest one beyond the limit.
    pub fn add(&self, tenant: &str, id: &str, lineage: &[FoundSnapshot]) {
        self.forget(tenant, id);
        let mut finds = self.0.lock();
        finds.push_back(RecentFind {
            tenant: tenant.to_owned(),
            id: id.to_owned(),
            at: Instant::now(),
            lineage: lineage.to_vec(),
        });
        if finds.len() > MAX_FINDS {
            finds.pop_front();
        }
    }

    /// Removes snapshot `id` of `tenant`, which is being retracted or added again.
    pub fn forget(&self, tenant: &str, id: &str) {
        let mut finds = self.0.lock();
        finds.retain(|find| find.tenant != tenant || find.id != id);
    }
}
