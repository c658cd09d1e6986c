//! Mark phase: finds the objects that a tenant needs and the live part of its packs.

use super::{Collector, root_of};
use crate::data_keys::Hash;
use crate::manifest::Scope;
use crate::shared_store::lease::{LEASE_TIME, REUSED};
use crate::tenant::{BUNDLES, SHARED_TENANT};
use crate::{Listed, StoreError};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

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

/// Live part of a pack.
#[derive(Debug, Default)]
pub(super) struct PackUse {
    /// Lengths of the live frames by their offsets.
    pub frames: HashMap<u32, u32>,
    /// Snapshots that use it.
    pub roots: BTreeSet<Hash>,
}

/// Objects in use.
#[derive(Debug, Default)]
pub(super) struct Marked {
    /// Keys of the objects.
    pub live: HashSet<String>,
    /// Live parts of packs by the packs' keys.
    pub packs: BTreeMap<String, PackUse>,
    /// Number of readers.
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
        for lease in &listed {
            let key = lease.key.strip_suffix(REUSED).unwrap_or(&lease.key);
            let start = starts.get(key).copied().unwrap_or(lease.modified_ms);
            if self.now - start > super::millis(LEASE_TIME) {
                self.delete(&lease.key).await?;
            } else if key == lease.key {
                leases.oldest = Some(leases.oldest.unwrap_or(start).min(start));
                leases.count += 1;
            }
        }
        for key in starts.keys().filter(|key| !key.ends_with(REUSED)) {
            let list = store.leased_keys(tenant, key).await?;
            leases.protected.extend(list.unwrap_or_default());
        }
        Ok(leases)
    }

    /// Marks the objects in use: snapshots that have a name or were not removed, modules that a
    /// host holds, snapshots that leases protect, and the ancestors of all of these.
    pub(super) async fn mark(
        &self,
        objects: &[Listed],
        protected: &HashSet<String>,
    ) -> Result<Marked, StoreError> {
        let prefix = self.tenant.key("manifests/");
        let manifests = objects
            .iter()
            .filter(|object| object.key.starts_with(&prefix));
        let roots: BTreeSet<Hash> = manifests
            .filter_map(|object| root_of(&object.key))
            .collect();
        let mut needed = self.needed_roots(&roots).await?;
        let readers = self.readers().await?;
        needed.extend(&readers);
        needed.extend(
            protected
                .iter()
                .filter(|key| key.starts_with(&prefix))
                .filter_map(|key| root_of(key)),
        );
        let resumable: HashSet<Hash> = needed.iter().copied().collect();
        let marked = Mutex::new(Marked {
            live: protected.clone(),
            readers: readers.len() as u64,
            ..Marked::default()
        });
        let mut seen = HashSet::new();
        // Traverse the lineages breadth-first. `seen` prevents repeated visits.
        while !needed.is_empty() {
            let wave: Vec<Hash> = std::mem::take(&mut needed)
                .into_iter()
                .filter(|root| roots.contains(root) && seen.insert(*root))
                .collect();
            self.report("snapshots", seen.len() as u64, roots.len() as u64);
            let ancestors = Mutex::new(Vec::new());
            let mark = async |root| {
                let lineage = self.mark_snapshot(root, &marked).await?;
                let mut ancestors = ancestors.lock();
                ancestors.extend(lineage);
                Ok(())
            };
            self.store.backend.each(wave, mark).await?;
            needed = ancestors.into_inner();
        }
        let mut marked = marked.into_inner();
        self.mark_bundles(objects, &resumable, &mut marked);
        Ok(marked)
    }

    /// Marks the resume bundles of the snapshots `resumable`. Bundles of their ancestors are not
    /// needed.
    fn mark_bundles(&self, objects: &[Listed], resumable: &HashSet<Hash>, marked: &mut Marked) {
        let prefix = self.tenant.key(&format!("{BUNDLES}/"));
        let bundles = objects
            .iter()
            .filter(|object| object.key.starts_with(&prefix));
        for bundle in bundles {
            let root = root_of(&bundle.key).filter(|root| resumable.contains(root));
            let manifest = root.map(|root| self.tenant.manifest_key(&root));
            if manifest.is_some_and(|manifest| marked.live.contains(&manifest)) {
                marked.live.insert(bundle.key.clone());
            }
        }
    }

    /// Returns the roots of snapshots that are needed independently of the tenant's other
    /// snapshots.
    async fn needed_roots(&self, roots: &BTreeSet<Hash>) -> Result<Vec<Hash>, StoreError> {
        let (store, tenant) = (self.store, self.tenant);
        let removed = store.backend.list(&tenant.key("removed")).await?;
        let removed: HashSet<Hash> = removed
            .iter()
            .filter_map(|object| root_of(&object.key))
            .collect();
        let referenced = store.backend.list(&tenant.key("references")).await?;
        let referenced = referenced.iter().filter_map(|object| {
            let mut parts = object.key.rsplit('/');
            parts.next();
            parts.next()?.parse::<Hash>().ok()
        });
        // Remove markers that an interrupted collection left after it had removed the snapshot.
        for root in removed.iter().filter(|root| !roots.contains(root)) {
            self.delete(&tenant.removed_key(root)).await?;
        }
        let retained = roots.iter().filter(|root| !removed.contains(root));
        let mut needed: Vec<Hash> = retained.copied().collect();
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
        marked: &Mutex<Marked>,
    ) -> Result<Vec<Hash>, StoreError> {
        let tenant = self.tenant;
        // An unreadable snapshot stops the collection: the objects that it needs are unknown.
        let (keys, manifest) = self.store.manifest(tenant, root).await?;
        let locations = self.store.locations(tenant, &keys, root).await?;
        let own = tenant.name() == SHARED_TENANT;
        let lineage = manifest.lineage.iter();
        let ancestors = lineage.filter(|name| own || name.scope == Scope::Tenant);
        let mut marked = marked.lock();
        marked
            .live
            .extend([tenant.manifest_key(&root), tenant.locations_key(&root)]);
        let mut by_pack: HashMap<_, HashMap<u32, u32>> = HashMap::new();
        for location in &locations.0 {
            let frames = by_pack.entry(location.pack).or_default();
            frames.insert(location.offset, location.length);
        }
        for (pack, frames) in by_pack {
            let key = tenant.pack_key(keys.generation(), &pack);
            marked.live.insert(key.clone());
            let used = marked.packs.entry(key).or_default();
            used.frames.extend(frames);
            used.roots.insert(root);
        }
        Ok(ancestors.map(|name| name.root).collect())
    }
}
