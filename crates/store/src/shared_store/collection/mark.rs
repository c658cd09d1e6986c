//! Mark phase: finds the objects that a tenant needs and the live part of its packs.
//!
//! The *root* of a snapshot is the hash that identifies it in the store. A *pack* is an object in
//! the store with many compressed and encrypted chunks, and a *frame* is such a chunk in its pack.
//! A *lease* is an object that protects the objects of a push in progress. A *resume bundle* is an
//! object with copies of the content that a host reads first to resume a snapshot. A *generation*
//! is a set of data keys of a tenant, which a rotation of the keys replaces for new objects.

use super::objects::{ObjectName, StoredObjects, number};
use super::{Collector, root_of};
use crate::StoreError;
use crate::data_keys::Hash;
use crate::manifest::Scope;
use crate::pack::PackId;
use crate::shared_store::lease::{LEASE_TIME, REUSED};
use crate::tenant::SHARED_TENANT;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Leases of a tenant.
#[derive(Debug, Default)]
pub(super) struct Leases {
    /// Start of the oldest lease, in milliseconds since 1970 by the store's clock.
    pub oldest: Option<i64>,
    /// Keys of the objects that leases protect.
    pub protected: HashSet<String>,
    /// Number of leases.
    pub count: u64,
}

/// Maximum number of snapshots per call of `Backend::each`, which creates the futures of all its
/// items first.
const MARKED_AT_ONCE: usize = 1024;

/// Live part of a pack.
#[derive(Debug, Default)]
pub(super) struct PackUse {
    /// Offsets and lengths of the live frames, in ascending order.
    frames: Vec<(u32, u32)>,
    /// Indexes in [`Marked::roots`] of the snapshots that use the pack.
    pub roots: Vec<u32>,
}

impl PackUse {
    /// Returns the number of live bytes.
    pub fn bytes(&self) -> u64 {
        self.frames
            .iter()
            .map(|(_, length)| u64::from(*length))
            .sum()
    }

    fn add(&mut self, frames: Vec<(u32, u32)>, root: u32) {
        self.frames.extend(frames);
        self.frames.sort_unstable();
        self.frames.dedup_by_key(|(offset, _)| *offset);
        self.frames.shrink_to_fit();
        self.roots.push(root);
    }
}

/// Objects in use.
#[derive(Debug, Default)]
pub(super) struct Marked {
    /// Snapshots in use.
    pub roots: Vec<Hash>,
    /// Live parts of packs by generation and id.
    pub packs: BTreeMap<(u32, PackId), PackUse>,
    /// Number of readers: hosts that have not fetched a snapshot completely.
    pub readers: u64,
}

impl Collector<'_> {
    /// Reads the leases and removes expired ones.
    pub(super) async fn leases(&self) -> Result<Leases, StoreError> {
        let (store, tenant) = (self.store, self.tenant);
        let listed = store.backend.list(&tenant.key("leases")).await?;
        let starts: BTreeMap<&str, i64> = listed
            .iter()
            .map(|lease| (lease.key.as_str(), lease.modified_ms))
            .collect();
        let mut leases = Leases::default();
        let mut expired = HashSet::new();
        for lease in &listed {
            // Earlier versions of Jiffy wrote two objects per lease: `<lease>`, and the list of
            // keys `<lease>.reused` (`REUSED`). The list starts and expires with its lease.
            let key = lease.key.strip_suffix(REUSED).unwrap_or(&lease.key);
            let start = starts.get(key).copied().unwrap_or(lease.modified_ms);
            if self.now - start > super::millis(LEASE_TIME) {
                // An expired lease protects nothing. In a dry run, `delete` has no effect, and the
                // lease is treated like a removed lease.
                self.delete(&lease.key).await?;
                expired.insert(lease.key.as_str());
            } else if key == lease.key {
                leases.oldest = Some(leases.oldest.unwrap_or(start).min(start));
                leases.count += 1;
            }
        }
        // `leased_keys` reads the second object of a lease itself.
        let is_lease = |key: &&&str| !key.ends_with(REUSED) && !expired.contains(**key);
        for key in starts.keys().filter(is_lease) {
            let list = store.leased_keys(tenant, key).await?;
            leases.protected.extend(list.unwrap_or_default());
        }
        Ok(leases)
    }

    /// Marks the objects in use: needed snapshots with their ancestors. A snapshot is needed if it
    /// has a name, was not removed, or contains a module of a function that a host holds. A module
    /// is stored as a snapshot of one file. A snapshot is also needed while a lease protects it, a
    /// snapshot of another tenant is based on it, or a host has not fetched it completely.
    pub(super) async fn mark(
        &self,
        objects: &mut StoredObjects,
        protected: &HashSet<String>,
    ) -> Result<Marked, StoreError> {
        let total = objects.roots().count() as u64;
        let mut needed = self.needed_roots(objects).await?;
        let readers = self.readers().await?;
        needed.extend(&readers);
        for key in protected {
            let Some(name) = ObjectName::parse(self.tenant, key) else {
                continue;
            };
            if let ObjectName::Manifest(root) = name {
                needed.push(root);
            }
            objects.mark(name);
        }
        let resumable: HashSet<Hash> = needed.iter().copied().collect();
        let marked = Marked {
            readers: readers.len() as u64,
            ..Marked::default()
        };
        let marking = Mutex::new((objects, marked));
        let mut seen = HashSet::new();
        // Traverse the snapshots and their ancestors breadth-first. `seen` prevents repeated
        // visits.
        while !needed.is_empty() {
            let wave: Vec<Hash> = {
                let marking = marking.lock();
                let all = std::mem::take(&mut needed).into_iter();
                let listed = all.filter(|root| {
                    marking.0.get(&ObjectName::Manifest(*root)).is_some() && seen.insert(*root)
                });
                listed.collect()
            };
            let ancestors = Mutex::new(Vec::new());
            let mark = async |root| {
                let lineage = self.mark_snapshot(root, &marking).await?;
                let mut ancestors = ancestors.lock();
                ancestors.extend(lineage);
                Ok(())
            };
            for roots in wave.chunks(MARKED_AT_ONCE) {
                self.store.backend.each(roots.iter().copied(), mark).await?;
                self.report("snapshots", marking.lock().1.roots.len() as u64, total);
            }
            needed = ancestors.into_inner();
        }
        let (objects, marked) = marking.into_inner();
        // Resume bundles of snapshots that are only ancestors are not needed: a host resumes from
        // the bundle of the needed snapshot.
        objects.mark_bundles(&resumable);
        Ok(marked)
    }

    /// Returns the roots of snapshots that are needed independently of the tenant's other
    /// snapshots.
    async fn needed_roots(&self, objects: &StoredObjects) -> Result<Vec<Hash>, StoreError> {
        let (store, tenant) = (self.store, self.tenant);
        let removed = store.backend.list(&tenant.key("removed")).await?;
        let removed: HashSet<Hash> = removed
            .iter()
            .filter_map(|object| root_of(&object.key))
            .collect();
        // Keys: `references/<root of the needed snapshot>/<dependent tenant>-<dependent root>`.
        let referenced = store.backend.list(&tenant.key("references")).await?;
        let referenced = referenced.iter().filter_map(|object| {
            let mut parts = object.key.rsplit('/');
            parts.next();
            parts.next()?.parse::<Hash>().ok()
        });
        // Remove markers that an interrupted collection left after it had removed the snapshot.
        let is_listed = |root: &Hash| objects.get(&ObjectName::Manifest(*root)).is_some();
        for root in removed.iter().filter(|root| !is_listed(root)) {
            self.delete(&tenant.removed_key(root)).await?;
        }
        let retained = objects.roots().filter(|root| !removed.contains(root));
        let mut needed: Vec<Hash> = retained.collect();
        needed.extend(referenced);
        needed.extend(store.named_roots(tenant).await?);
        needed.extend(store.held_modules(tenant).await?);
        Ok(needed)
    }

    /// Returns the roots of snapshots that hosts have not fetched completely. Removes expired
    /// readers.
    async fn readers(&self) -> Result<Vec<Hash>, StoreError> {
        let (store, time) = (self.store, self.options.reader_time);
        let readers = store.readers(self.tenant, self.now, time).await?;
        for ended in &readers.ended {
            self.delete(ended).await?;
        }
        Ok(readers.roots)
    }

    /// Marks the objects of a snapshot. Returns the roots of its ancestors.
    async fn mark_snapshot(
        &self,
        root: Hash,
        marking: &Mutex<(&mut StoredObjects, Marked)>,
    ) -> Result<Vec<Hash>, StoreError> {
        let tenant = self.tenant;
        // An unreadable snapshot stops the collection: the objects that it needs are unknown.
        let (keys, manifest) = self.store.manifest(tenant, root).await?;
        let locations = self.store.locations(tenant, &keys, root).await?;
        // All ancestors of the shared tenant's snapshots are in that tenant. For other tenants,
        // `references` in the shared tenant protect the shared ancestors.
        let is_shared = tenant.name() == SHARED_TENANT;
        let lineage = manifest.lineage.iter();
        let ancestors = lineage.filter(|name| is_shared || name.scope == Scope::Tenant);
        let mut by_pack: HashMap<PackId, Vec<(u32, u32)>> = HashMap::new();
        for location in &locations.0 {
            let frames = by_pack.entry(location.pack).or_default();
            frames.push((location.offset, location.length));
        }
        let mut marking = marking.lock();
        let (objects, marked) = &mut *marking;
        let number = number(marked.roots.len())?;
        marked.roots.push(root);
        objects.mark(ObjectName::Manifest(root));
        objects.mark(ObjectName::Locations(root));
        for (pack, frames) in by_pack {
            objects.mark(ObjectName::Pack(keys.generation(), pack));
            let used = marked.packs.entry((keys.generation(), pack)).or_default();
            used.add(frames, number);
        }
        Ok(ancestors.map(|name| name.root).collect())
    }
}
