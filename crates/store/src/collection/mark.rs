//! Marking: objects that a tenant needs, and what of its packs is in use.

use super::{Collector, root_of};
use crate::data_keys::Hash;
use crate::lease::{LEASE_TIME, REUSED};
use crate::manifest::Scope;
use crate::tenant::SHARED_TENANT;
use crate::{Listed, StoreError};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Leases of a tenant.
#[derive(Debug, Default)]
pub(super) struct Leases {
    /// Start of the oldest one, in milliseconds since 1970 by the store's clock.
    pub oldest: Option<i64>,
    /// Keys of objects that they protect.
    pub protected: HashSet<String>,
    /// Their number.
    pub count: u64,
}

/// Part of a pack that snapshots use.
#[derive(Debug, Default)]
pub(super) struct PackUse {
    /// Lengths of its frames in use, by their offsets.
    pub frames: HashMap<u32, u32>,
    /// Snapshots that use it.
    pub roots: BTreeSet<Hash>,
}

/// Objects that are needed.
#[derive(Debug, Default)]
pub(super) struct Marked {
    /// Their keys.
    pub live: HashSet<String>,
    /// Use of packs, by their keys.
    pub packs: BTreeMap<String, PackUse>,
    /// Number of readers.
    pub readers: u64,
}

impl Collector<'_> {
    /// Reads the leases. Removes those that have ended.
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
        // Each lease that was listed, whether its list was too: the list may have come meanwhile.
        for key in starts.keys().filter(|key| !key.ends_with(REUSED)) {
            let list: Option<BTreeSet<String>> =
                store.read_list(tenant, &format!("{key}{REUSED}")).await?;
            leases.protected.extend(list.unwrap_or_default());
        }
        Ok(leases)
    }

    /// Marks what is needed: by snapshots that were not removed or have a name, by modules that a
    /// host holds, by those that they are based on, and by those that leases protect.
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
        let marked = Mutex::new(Marked {
            live: protected.clone(),
            readers: readers.len() as u64,
            ..Marked::default()
        });
        let mut seen = HashSet::new();
        while !needed.is_empty() {
            let wave: Vec<Hash> = std::mem::take(&mut needed)
                .into_iter()
                .filter(|root| roots.contains(root) && seen.insert(*root))
                .collect();
            self.report("snapshots", seen.len() as u64, roots.len() as u64);
            let ancestors = Mutex::new(Vec::new());
            let mark = async |root| {
                let found = self.mark_snapshot(root, &marked).await?;
                let mut ancestors = ancestors.lock();
                ancestors.extend(found);
                Ok(())
            };
            self.store.backend.each(wave, mark).await?;
            needed = ancestors.into_inner();
        }
        Ok(marked.into_inner())
    }

    /// Roots of snapshots that something but another snapshot of the tenant needs.
    async fn needed_roots(&self, roots: &BTreeSet<Hash>) -> Result<Vec<Hash>, StoreError> {
        let (store, tenant) = (self.store, self.tenant);
        let removed = store.backend.list(&tenant.key("removed")).await?;
        let removed: HashSet<Hash> = removed
            .iter()
            .filter_map(|found| root_of(&found.key))
            .collect();
        let referenced = store.backend.list(&tenant.key("references")).await?;
        let referenced = referenced.iter().filter_map(|found| {
            let mut parts = found.key.rsplit('/');
            parts.next();
            parts.next()?.parse::<Hash>().ok()
        });
        // Left by a collection that was cut off when the snapshot was gone.
        for root in removed.iter().filter(|root| !roots.contains(root)) {
            self.delete(&tenant.removed_key(root)).await?;
        }
        let kept = roots.iter().filter(|root| !removed.contains(root));
        let mut needed: Vec<Hash> = kept.copied().collect();
        needed.extend(referenced);
        needed.extend(store.named_roots(tenant).await?);
        needed.extend(store.held_modules(tenant).await?);
        Ok(needed)
    }

    /// Roots of snapshots that hosts have not fetched whole. Removes readers that have ended.
    async fn readers(&self) -> Result<Vec<Hash>, StoreError> {
        let (store, time) = (self.store, self.options.reader_time);
        let readers = store.readers(self.tenant, self.now, time).await?;
        for ended in &readers.ended {
            self.delete(ended).await?;
        }
        Ok(readers.roots)
    }

    /// Marks what a snapshot needs; returns the roots that it is based on.
    async fn mark_snapshot(
        &self,
        root: Hash,
        marked: &Mutex<Marked>,
    ) -> Result<Vec<Hash>, StoreError> {
        let tenant = self.tenant;
        // A snapshot that cannot be read stops the collection: what it needs is unknown.
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
