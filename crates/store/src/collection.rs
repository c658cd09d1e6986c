//! Collection: removal of what no snapshot needs, safe beside pushes of any host.
//!
//! A collection marks what manifests and leases need. An object that is not marked, and older than
//! the oldest lease and the grace period, is condemned: a push does not count on it any more. A
//! later collection that finds it condemned for the grace period and still unmarked removes it. All
//! times are the store's own: the clock of no host matters.

use crate::data_keys::Hash;
use crate::lease::{Condemned, LEASE_TIME, REUSED};
use crate::manifest::Scope;
use crate::tenant::{SHARED_TENANT, SharedStore, Tenant};
use crate::{Listed, StoreError};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

/// Kinds of objects that are collected.
const COLLECTED: [&str; 3] = ["manifests", "locations", "packs"];

/// Settings of a collection.
#[derive(Debug, Clone, Copy)]
pub struct GcOptions {
    /// Age below which nothing is condemned, and time from that to the removal.
    pub grace: Duration,
    /// Age from which on the lock of another collection counts as left behind.
    pub lock_time: Duration,
}

impl Default for GcOptions {
    fn default() -> Self {
        Self {
            grace: LEASE_TIME,
            lock_time: Duration::from_secs(3600),
        }
    }
}

/// Result of a collection.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct GcReport {
    /// Objects that are needed.
    pub live: u64,
    /// Objects that a later collection may remove.
    pub condemned: u64,
    /// Objects removed.
    pub removed: u64,
    /// Their bytes.
    pub removed_bytes: u64,
    /// Leases of pushes that are under way.
    pub leases: u64,
}

impl SharedStore {
    /// Gives a snapshot up. A collection removes it when no other snapshot is based on it
    /// and no id names it.
    pub async fn remove(&self, tenant: &Tenant, root: Hash) -> Result<(), StoreError> {
        let removed = bytes::Bytes::from_static(b"removed");
        self.backend.put(&tenant.removed_key(&root), removed).await
    }

    /// Collects what `tenant` does not need any more.
    pub async fn collect(
        &self,
        tenant: &Tenant,
        options: GcOptions,
    ) -> Result<GcReport, StoreError> {
        let lock = tenant.key("gc/lock");
        let content = bytes::Bytes::from(
            crate::data_keys::random::<16>()
                .map_err(StoreError::damaged(&lock))?
                .to_vec(),
        );
        // The time at which it is written is the store's time.
        let probe = tenant.key("gc/clock");
        self.backend.put(&probe, content.clone()).await?;
        let gone = || StoreError::Gone(probe.clone());
        let now = self
            .backend
            .head(&probe)
            .await?
            .ok_or_else(gone)?
            .modified_ms;
        if !self.backend.create(&lock, content.clone()).await?
            && self.backend.get(&lock, 64).await? != content
        {
            let held = self.backend.head(&lock).await?;
            if held.is_some_and(|held| now - held.modified_ms < millis(options.lock_time)) {
                return Err(StoreError::Collecting(options.lock_time));
            }
            // Left by a collection that was cut off.
            self.backend.delete(&lock).await?;
            if !self.backend.create(&lock, content).await? {
                return Err(StoreError::Collecting(options.lock_time));
            }
        }
        let collected = self.collect_at(tenant, options, now).await;
        self.backend.delete(&lock).await?;
        collected
    }

    async fn collect_at(
        &self,
        tenant: &Tenant,
        options: GcOptions,
        now: i64,
    ) -> Result<GcReport, StoreError> {
        let before = self.condemned(tenant).await?;
        // Leases before manifests: a push that ends in between is seen as the one or the other.
        let (oldest, protected, leases) = self.leases(tenant, now).await?;
        let mut objects = Vec::new();
        for kind in COLLECTED {
            objects.extend(self.backend.list(&tenant.key(kind)).await?);
        }
        let live = self.mark(tenant, &objects, protected).await?;
        let young = oldest.unwrap_or(now).min(now - millis(options.grace));
        let mut condemned = Condemned::new();
        let mut doomed = Vec::new();
        for object in &objects {
            if live.contains(&object.key) || object.modified_ms >= young {
                continue;
            }
            let since = before.get(&object.key).copied();
            condemned.insert(object.key.clone(), since.unwrap_or(now));
            // Condemned by an earlier collection, and long enough for each push to have seen it.
            if since.is_some_and(|since| now - since >= millis(options.grace) && since < now) {
                doomed.push(object);
            }
        }
        // An object stays condemned until it is gone.
        self.write_list(tenant, &tenant.key("gc/condemned"), &condemned)
            .await?;
        self.sweep(tenant, &doomed).await?;
        for object in &doomed {
            condemned.remove(&object.key);
        }
        if !doomed.is_empty() {
            self.write_list(tenant, &tenant.key("gc/condemned"), &condemned)
                .await?;
        }
        Ok(GcReport {
            live: live.len() as u64,
            condemned: condemned.len() as u64,
            removed: doomed.len() as u64,
            removed_bytes: doomed.iter().map(|object| object.bytes).sum(),
            leases,
        })
    }

    /// Start of the oldest lease, keys that leases protect, and number of leases. Removes those
    /// that have ended.
    async fn leases(
        &self,
        tenant: &Tenant,
        now: i64,
    ) -> Result<(Option<i64>, HashSet<String>, u64), StoreError> {
        let listed = self.backend.list(&tenant.key("leases")).await?;
        let starts: BTreeMap<&str, i64> = listed
            .iter()
            .map(|lease| (lease.key.as_str(), lease.modified_ms))
            .collect();
        let (mut oldest, mut protected, mut leases) = (None, HashSet::new(), 0);
        for lease in &listed {
            let key = lease.key.strip_suffix(REUSED).unwrap_or(&lease.key);
            let start = starts.get(key).copied().unwrap_or(lease.modified_ms);
            if now - start > millis(LEASE_TIME) {
                self.backend.delete(&lease.key).await?;
            } else if key == lease.key {
                oldest = Some(oldest.unwrap_or(start).min(start));
                leases += 1;
            }
        }
        // Each lease that was listed, whether its list was too: the list may have come meanwhile.
        for key in starts.keys().filter(|key| !key.ends_with(REUSED)) {
            let list: Option<BTreeSet<String>> =
                self.read_list(tenant, &format!("{key}{REUSED}")).await?;
            protected.extend(list.unwrap_or_default());
        }
        Ok((oldest, protected, leases))
    }

    /// Returns the keys of what is needed: of snapshots that were not removed or have a name, of
    /// those that they are based on, and of those that leases protect.
    async fn mark(
        &self,
        tenant: &Tenant,
        objects: &[Listed],
        protected: HashSet<String>,
    ) -> Result<HashSet<String>, StoreError> {
        let removed = self.backend.list(&tenant.key("removed")).await?;
        let removed: HashSet<Hash> = removed
            .iter()
            .filter_map(|found| root_of(&found.key))
            .collect();
        let referenced = self.backend.list(&tenant.key("references")).await?;
        let referenced = referenced.iter().filter_map(|found| {
            let mut parts = found.key.rsplit('/');
            parts.next();
            parts.next()?.parse::<Hash>().ok()
        });
        let prefix = tenant.key("manifests/");
        let manifests = objects
            .iter()
            .filter(|object| object.key.starts_with(&prefix));
        let roots: BTreeSet<Hash> = manifests
            .filter_map(|object| root_of(&object.key))
            .collect();
        // Left by a collection that was cut off when the snapshot was gone.
        for root in removed.difference(&roots.iter().copied().collect()) {
            self.backend.delete(&tenant.removed_key(root)).await?;
        }
        let mut needed: Vec<Hash> = roots
            .iter()
            .filter(|root| !removed.contains(root))
            .copied()
            .collect();
        needed.extend(referenced);
        needed.extend(self.named_roots(tenant).await?);
        needed.extend(
            protected
                .iter()
                .filter(|key| key.starts_with(&prefix))
                .filter_map(|key| root_of(key)),
        );
        let mut live = protected;
        let mut seen = HashSet::new();
        while let Some(root) = needed.pop() {
            if !seen.insert(root) || !roots.contains(&root) {
                continue;
            }
            // A snapshot that cannot be read stops the collection: what it needs is unknown.
            let (keys, manifest) = self.manifest(tenant, root).await?;
            let own = tenant.name() == SHARED_TENANT;
            let lineage = manifest.lineage.iter();
            needed.extend(
                lineage
                    .filter(|name| own || name.scope == Scope::Tenant)
                    .map(|name| name.root),
            );
            live.extend([tenant.manifest_key(&root), tenant.locations_key(&root)]);
            let locations = self.locations(tenant, &keys, root).await?;
            live.extend(
                locations
                    .packs()
                    .map(|pack| tenant.pack_key(keys.generation(), &pack)),
            );
        }
        Ok(live)
    }

    /// Removes objects: manifests first, so that none is left without what it needs.
    async fn sweep(&self, tenant: &Tenant, doomed: &[&Listed]) -> Result<(), StoreError> {
        let prefix = tenant.key("manifests/");
        let (manifests, others): (Vec<&Listed>, Vec<&Listed>) = doomed
            .iter()
            .partition(|object| object.key.starts_with(&prefix));
        for object in manifests {
            let Some(root) = root_of(&object.key) else {
                continue;
            };
            let lineage = match self.manifest(tenant, root).await {
                Ok((_, manifest)) => manifest.lineage,
                // References to its ancestors then stay.
                Err(StoreError::Damaged { .. } | StoreError::Missing { .. }) => Vec::new(),
                Err(e) => return Err(e),
            };
            let shared = lineage.iter().filter(|name| name.scope == Scope::Shared);
            for ancestor in shared.filter(|_| tenant.name() != SHARED_TENANT) {
                self.unrefer(tenant, &ancestor.root, &root).await?;
            }
            self.backend.delete(&object.key).await?;
            self.backend.delete(&tenant.removed_key(&root)).await?;
        }
        self.backend
            .each(others, |object| self.backend.delete(&object.key))
            .await
    }
}

fn root_of(key: &str) -> Option<Hash> {
    key.rsplit('/').next()?.parse().ok()
}

fn millis(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}
