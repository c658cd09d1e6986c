//! Chunks of a snapshot to be pushed that the store already has. A push reuses the chunks of the
//! snapshot's ancestors and of the packs that this host wrote last, so that its cost does not
//! depend on the tenant's other snapshots.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *pack* is an object in the store with many
//! compressed and encrypted chunks. A *tenant* is an owner of snapshots in the store, usually an
//! API key. The objects of a tenant are encrypted with its keys. The *manifest* of a snapshot lists
//! its chunks.

use crate::StoreError;
use crate::data_keys::{DataKeys, Hash};
use crate::locations::{Location, Locations};
use crate::manifest::{Scope, SnapshotName, StoredManifest};
use crate::pack::{Entry, PackId};
use crate::shared_store::SharedStore;
use crate::shared_store::recent_packs::RecentPacks;
use crate::tenant::Tenant;
use futures_util::{StreamExt, TryStreamExt};
use std::collections::{HashMap, HashSet};

/// Maximum number of packs to choose from for a chunk.
const MAX_PLACES: usize = 4;
/// Maximum number of ancestors that are read concurrently.
const ANCESTORS_AT_ONCE: usize = 8;

/// Locations of a snapshot's chunks in the store.
#[derive(Debug, Default)]
pub(crate) struct KnownChunks {
    /// Locations of each chunk of the snapshot.
    places: HashMap<Hash, Vec<Location>>,
    /// Minimum sizes in bytes of the packs. A smaller pack is damaged.
    pub sizes: HashMap<PackId, u64>,
    /// Locations that the snapshot itself has in the store. `None` if the store lacks it.
    pub own: Option<Locations>,
    /// Ancestors of the snapshot's nearest ancestor in the tenant. They are protected together with
    /// that ancestor.
    pub inherited: HashSet<SnapshotName>,
}

/// Location of each chunk of a snapshot. A push encodes them as the locations of the snapshot.
#[derive(Debug, Default)]
pub(crate) struct ChunkPlaces(pub HashMap<Hash, Location>);

impl ChunkPlaces {
    /// Adds the chunks of a pack that was written.
    pub fn add(&mut self, pack: PackId, entries: &[Entry]) {
        for entry in entries {
            self.0
                .entry(entry.hash)
                .or_insert_with(|| location(pack, entry));
        }
    }

    /// Returns the packs.
    pub fn packs(&self) -> HashSet<PackId> {
        self.0.values().map(|location| location.pack).collect()
    }
}

fn location(pack: PackId, entry: &Entry) -> Location {
    Location {
        pack,
        offset: entry.offset,
        length: entry.length,
    }
}

impl KnownChunks {
    fn new(manifest: &StoredManifest) -> Self {
        let hashes = manifest.parts.iter().flat_map(|part| &part.hashes);
        Self {
            places: hashes.map(|&hash| (hash, Vec::new())).collect(),
            ..Self::default()
        }
    }

    /// Adds a location of a chunk, unless the snapshot lacks the chunk.
    fn add(&mut self, hash: &Hash, location: Location) {
        let Some(places) = self.places.get_mut(hash) else {
            return;
        };
        if places.len() < MAX_PLACES && places.iter().all(|place| place.pack != location.pack) {
            places.push(location);
            self.require(
                location.pack,
                u64::from(location.offset) + u64::from(location.length),
            );
        }
    }

    fn require(&mut self, pack: PackId, bytes: u64) {
        let size = self.sizes.entry(pack).or_default();
        *size = bytes.max(*size);
    }

    fn add_snapshot(&mut self, manifest: &StoredManifest, locations: &Locations) {
        let hashes = manifest.parts.iter().flat_map(|part| &part.hashes);
        for (hash, location) in hashes.zip(&locations.0) {
            self.add(hash, *location);
        }
    }

    /// Chooses a location for each chunk that is in a pack outside of `lost`.
    pub fn choose(&self, lost: &HashSet<PackId>) -> ChunkPlaces {
        let chosen = self.places.iter().filter_map(|(hash, places)| {
            let place = places.iter().find(|place| !lost.contains(&place.pack))?;
            Some((*hash, *place))
        });
        ChunkPlaces(chosen.collect())
    }
}

impl SharedStore {
    /// Finds the chunks of the snapshot `root` that the store has in packs of its ancestors and in
    /// the packs of `recent`. Does not check that these packs exist.
    ///
    /// # Errors
    /// [`StoreError::Gone`] if the store lacks an ancestor.
    pub(crate) async fn known_chunks(
        &self,
        tenant: &Tenant,
        keys: &DataKeys,
        manifest: &StoredManifest,
        root: Hash,
        recent: &RecentPacks<'_>,
    ) -> Result<KnownChunks, StoreError> {
        let mut known = KnownChunks::new(manifest);
        // A new snapshot has no locations: do not read them, because a failure is logged as a
        // warning.
        if self
            .backend
            .head(&tenant.manifest_key(&root))
            .await?
            .is_some()
        {
            known.own = self.sound_locations(tenant, keys, root).await?;
        }
        if let Some(own) = known.own.take() {
            known.add_snapshot(manifest, &own);
            known.own = Some(own);
        }
        for pack in recent.read() {
            for entry in &pack.entries {
                known.add(&entry.hash, location(pack.id, entry));
            }
            // The size of this pack is known exactly. Require it if the pack has a chunk of the
            // snapshot.
            if known.sizes.contains_key(&pack.id) {
                known.require(pack.id, pack.bytes);
            }
        }
        let lineage = manifest.lineage.iter();
        let roots: Vec<Hash> = lineage
            .filter(|name| name.scope == Scope::Tenant)
            .map(|name| name.root)
            .collect();
        let reading = roots.iter().map(|&root| self.ancestor(tenant, keys, root));
        let reading: Vec<_> = reading.collect();
        let mut ancestors = futures_util::stream::iter(reading).buffered(ANCESTORS_AT_ONCE);
        let mut is_nearest = true;
        while let Some(ancestor) = ancestors.try_next().await? {
            if let Some((ancestor, locations)) = ancestor {
                known.add_snapshot(&ancestor, &locations.unwrap_or_default());
                if is_nearest {
                    known.inherited = ancestor.lineage.into_iter().collect();
                }
            }
            is_nearest = false;
        }
        Ok(known)
    }

    /// Reads manifest and locations of an ancestor. Returns `None` if the manifest is damaged. The
    /// locations are `None` if they are missing or damaged, or if the ancestor has other data keys.
    async fn ancestor(
        &self,
        tenant: &Tenant,
        keys: &DataKeys,
        root: Hash,
    ) -> Result<Option<(StoredManifest, Option<Locations>)>, StoreError> {
        let (of, manifest) = match self.manifest(tenant, root).await {
            Ok(read) => read,
            Err(StoreError::Missing { object }) => return Err(StoreError::Gone(object)),
            Err(e @ StoreError::Damaged { .. }) => {
                tracing::warn!(error = %e, "cannot reuse the chunks of an ancestor");
                return Ok(None);
            }
            Err(e) => return Err(e),
        };
        if of.generation() != keys.generation() {
            return Ok(Some((manifest, None)));
        }
        let locations = self.sound_locations(tenant, keys, root).await?;
        Ok(Some((manifest, locations)))
    }

    /// Reads the locations of a snapshot. `None` if they are missing or damaged.
    async fn sound_locations(
        &self,
        tenant: &Tenant,
        keys: &DataKeys,
        root: Hash,
    ) -> Result<Option<Locations>, StoreError> {
        match self.locations(tenant, keys, root).await {
            Ok(locations) => Ok(Some(locations)),
            Err(e @ (StoreError::Missing { .. } | StoreError::Damaged { .. })) => {
                tracing::warn!(error = %e, "cannot reuse the chunks of a snapshot");
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }
}
