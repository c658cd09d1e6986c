//! Garbage collection: removes objects that no snapshot needs, safely during pushes from any host.
//!
//! A *pack* is an object in the store with many compressed and encrypted chunks. A *lease* protects
//! the objects of a push in progress from garbage collection.
//!
//! A collection marks the objects that manifests and leases refer to. An unmarked object that is
//! older than the oldest lease and the grace period is condemned: later pushes do not reuse it. A
//! later collection removes the object if it is still unmarked after having been condemned for the
//! grace period. All times come from the store's clock, so that the clocks of hosts do not matter.
//!
//! Live chunks of packs that are mostly dead are moved to new packs ([`repack`]).

mod lock;
mod mark;
mod objects;
mod repack;

use crate::StoreError;
use crate::data_keys::Hash;
use crate::manifest::Scope;
use crate::shared_store::SharedStore;
use crate::shared_store::condemned::{Condemned, ReadCondemned};
use crate::shared_store::lease::LEASE_TIME;
use crate::shared_store::readers::READER_TIME;
use crate::tenant::{BUNDLES, SHARED_TENANT, Tenant};
use lock::CollectionLock;
use objects::StoredObjects;
use serde::Serialize;
use std::time::Duration;

pub use lock::GC_LOCK_TIME;

/// Kinds of objects that are collected.
const COLLECTED: [&str; 4] = ["manifests", "locations", "packs", BUNDLES];
/// Object whose modification time is the time of the last collection.
const LAST: &str = "gc/last";

/// Callback that receives the current step, the number of finished items and their total.
pub type OnProgress<'a> = &'a (dyn Fn(&'static str, u64, u64) + Send + Sync);

/// Settings of a collection.
#[derive(Debug, Clone, Copy)]
pub struct GcOptions {
    /// Minimum age at which an object is condemned, and minimum time from its condemnation to its
    /// removal.
    pub grace: Duration,
    /// Age at which the lock of another collection is considered abandoned.
    pub lock_time: Duration,
    /// Age at which the record of a host that reads a snapshot expires unless it is renewed.
    pub reader_time: Duration,
    /// Packs of which less than this percentage is live are repacked. 0 disables repacking.
    pub repack_percent: u8,
    /// Maximum number of bytes that are moved from such packs.
    pub repack_bytes: u64,
    /// Computes the report without changing the store.
    pub dry_run: bool,
}

impl Default for GcOptions {
    fn default() -> Self {
        Self {
            grace: LEASE_TIME,
            lock_time: GC_LOCK_TIME,
            reader_time: READER_TIME,
            repack_percent: 50,
            repack_bytes: 1 << 30,
            dry_run: false,
        }
    }
}

/// Result of a collection.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct GcReport {
    /// Number of objects in use.
    pub live: u64,
    /// Number of objects that a later collection may remove.
    pub condemned: u64,
    /// Bytes of these objects.
    pub condemned_bytes: u64,
    /// Objects removed.
    pub removed: u64,
    /// Bytes of the removed objects.
    pub removed_bytes: u64,
    /// Number of packs whose live chunks were moved to other packs.
    pub repacked: u64,
    /// Bytes of the repacked packs.
    pub repacked_bytes: u64,
    /// Bytes of the packs written in their place.
    pub rewritten_bytes: u64,
    /// Number of leases of pushes in progress.
    pub leases: u64,
    /// Number of hosts that still have to fetch a part of a snapshot.
    pub readers: u64,
}

/// Collection in progress.
struct Collector<'a> {
    store: &'a SharedStore,
    tenant: &'a Tenant,
    options: GcOptions,
    /// `None` in a dry run.
    lock: Option<CollectionLock>,
    /// Time of the store when the collection started, in milliseconds since 1970.
    now: i64,
    progress: OnProgress<'a>,
}

/// Object that a collection removes.
struct Doomed {
    key: String,
    bytes: u64,
}

impl SharedStore {
    /// Marks a snapshot for removal. A collection removes it when no snapshot is based on it, no id
    /// names it and no host holds it as a module.
    pub async fn remove(&self, tenant: &Tenant, root: Hash) -> Result<(), StoreError> {
        let removed = bytes::Bytes::from_static(b"removed");
        self.backend.put(&tenant.removed_key(&root), removed).await
    }

    /// Removes the objects that `tenant` does not need.
    pub async fn collect(
        &self,
        tenant: &Tenant,
        options: GcOptions,
    ) -> Result<GcReport, StoreError> {
        self.collect_with(tenant, options, &|_, _, _| {}).await
    }

    /// Like [`Self::collect`], and reports progress.
    pub async fn collect_with(
        &self,
        tenant: &Tenant,
        options: GcOptions,
        progress: OnProgress<'_>,
    ) -> Result<GcReport, StoreError> {
        let lock = if options.dry_run {
            None
        } else {
            Some(self.lock_collection(tenant, options.lock_time).await?)
        };
        let now = match &lock {
            Some(lock) => lock.now,
            None => self.store_time(tenant).await?,
        };
        let collector = Collector {
            store: self,
            tenant,
            options,
            lock,
            now,
            progress,
        };
        let collected = collector.run().await;
        if let Some(lock) = &collector.lock {
            self.unlock_collection(lock).await?;
        }
        collected
    }

    /// Collects garbage. `None` if a host did so within `interval` or is doing so now.
    pub async fn collect_if_due(
        &self,
        tenant: &Tenant,
        options: GcOptions,
        interval: Duration,
    ) -> Result<Option<GcReport>, StoreError> {
        if let Some(last) = self.backend.head(&tenant.key(LAST)).await? {
            let now = self.store_time(tenant).await?;
            if now - last.modified_ms < millis(interval) {
                return Ok(None);
            }
        }
        match self.collect(tenant, options).await {
            Err(StoreError::Collecting(_)) => Ok(None),
            other => other.map(Some),
        }
    }
}

impl Collector<'_> {
    fn report(&self, step: &'static str, done: u64, total: u64) {
        (self.progress)(step, done, total);
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        if self.options.dry_run {
            Ok(())
        } else {
            self.store.backend.delete(key).await
        }
    }

    /// Replaces the list `before`.
    async fn write_condemned(
        &self,
        before: &mut ReadCondemned,
        condemned: &Condemned,
    ) -> Result<(), StoreError> {
        let Some(lock) = &self.lock else {
            return Ok(());
        };
        self.store.check_lock(lock).await?;
        let writing = self.store.write_condemned(self.tenant, before, condemned);
        writing.await
    }

    /// Performs one collection: marks the objects that are needed, condemns the others, removes
    /// objects that an earlier collection has condemned, and repacks packs that are mostly dead.
    async fn run(&self) -> Result<GcReport, StoreError> {
        let (store, tenant) = (self.store, self.tenant);
        // The list of earlier collections. Only objects in that list may be removed now: an object
        // that this collection condemns is removed by a later one at the earliest.
        let mut before = store.condemned(tenant).await?;
        // List leases before manifests: a push that ends in between is then seen as a lease, a
        // manifest or both.
        let leases = self.leases().await?;
        let mut objects = StoredObjects::default();
        for kind in COLLECTED {
            objects.add(tenant, store.backend.list(&tenant.key(kind)).await?);
        }
        objects.sort();
        let marked = self.mark(&mut objects, &leases.protected).await?;
        // An object modified at this time or later may belong to a push in progress, or is younger
        // than the grace period.
        let young = leases
            .oldest
            .unwrap_or(self.now)
            .min(self.now - millis(self.options.grace));
        let (mut condemned, mut doomed) = (Condemned::new(), Vec::new());
        let mut condemned_bytes = 0;
        for object in objects.iter() {
            if object.is_live || object.modified_ms >= young {
                continue;
            }
            let key = object.name.key(tenant);
            let since = before.all.get(&key).copied();
            condemned.insert(key.clone(), since.unwrap_or(self.now));
            condemned_bytes += object.bytes;
            // Remove an object only if an earlier collection condemned it at least the grace period
            // ago. With the default period, all pushes that read the list before the condemnation
            // have ended.
            let grace = millis(self.options.grace);
            if since.is_some_and(|since| self.now - since >= grace && since < self.now) {
                doomed.push(Doomed {
                    key,
                    bytes: object.bytes,
                });
            }
        }
        // First write a list that contains the doomed objects, so that no push reuses them during
        // their removal.
        self.write_condemned(&mut before, &condemned).await?;
        self.sweep(&doomed).await?;
        let removed_bytes = doomed.iter().map(|object| object.bytes).sum();
        for object in &doomed {
            condemned.remove(&object.key);
        }
        if !doomed.is_empty() {
            self.write_condemned(&mut before, &condemned).await?;
        }
        let mut report = GcReport {
            live: objects.live(),
            condemned: condemned.len() as u64,
            condemned_bytes: condemned_bytes - removed_bytes,
            removed: doomed.len() as u64,
            removed_bytes,
            leases: leases.count,
            readers: marked.readers,
            ..GcReport::default()
        };
        self.repack(
            &objects,
            &marked,
            &leases,
            young,
            (&mut before, &mut condemned),
            &mut report,
        )
        .await?;
        if self.lock.is_some() {
            let last = bytes::Bytes::from_static(b"collected");
            store.backend.put(&tenant.key(LAST), last).await?;
        }
        Ok(report)
    }

    /// Removes objects. Manifests come first, so that no manifest refers to a removed object.
    async fn sweep(&self, doomed: &[Doomed]) -> Result<(), StoreError> {
        let (store, tenant) = (self.store, self.tenant);
        let Some(lock) = &self.lock else {
            return Ok(());
        };
        let prefix = tenant.key("manifests/");
        let (manifests, others): (Vec<&Doomed>, Vec<&Doomed>) = doomed
            .iter()
            .partition(|object| object.key.starts_with(&prefix));
        for object in manifests {
            let Some(root) = root_of(&object.key) else {
                continue;
            };
            store.check_lock(lock).await?;
            let lineage = match store.manifest(tenant, root).await {
                Ok((_, manifest)) => manifest.lineage,
                // The ancestors of this manifest are unknown, so references to them remain.
                Err(StoreError::Damaged { .. } | StoreError::Missing { .. }) => Vec::new(),
                Err(e) => return Err(e),
            };
            let shared = lineage.iter().filter(|name| name.scope == Scope::Shared);
            for ancestor in shared.filter(|_| tenant.name() != SHARED_TENANT) {
                store.unrefer(tenant, &ancestor.root, &root).await?;
            }
            // The marker comes last: without a marker, an existing manifest counts as needed.
            store.backend.delete(&object.key).await?;
            store.backend.delete(&tenant.removed_key(&root)).await?;
        }
        let (total, removed) = (others.len() as u64, std::sync::atomic::AtomicU64::new(0));
        let remove = async |object: &Doomed| {
            store.check_lock(lock).await?;
            store.backend.delete(&object.key).await?;
            let removed = removed.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            self.report("objects removed", removed + 1, total);
            Ok(())
        };
        store.backend.each(others, remove).await
    }
}

fn root_of(key: &str) -> Option<Hash> {
    key.rsplit('/').next()?.parse().ok()
}

fn millis(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}
