//! Push: copies a snapshot of a host to a store. Chunks that the store has in packs of the
//! snapshot's ancestors, or in the packs that this host wrote last, are not uploaded. The number of
//! requests does not depend on the tenant's other snapshots.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *pack* is an object in the store with many
//! compressed and encrypted chunks. A *tenant* is an owner of snapshots in the store, usually an
//! API key. The objects of a tenant are encrypted with its keys. The *shared tenant* owns the stock
//! templates, which all tenants may read.
//!
//! The order of writes protects a push from a garbage collection at the same time. The lease comes
//! first: it lists the packs to reuse, which a collection then does not remove. New packs follow.
//! The locations of the chunks and the manifest are last, so that a manifest never names missing
//! chunks.

mod pack_builder;

use crate::data_keys::{DataKeys, Hash};
use crate::locations::{Location, Locations};
use crate::manifest::{MANIFEST_MAGIC, Scope, SnapshotName, StoredManifest};
use crate::pack::{MAX_PACK_BYTES, PackId};
use crate::shared_store::SharedStore;
use crate::shared_store::known_chunks::{ChunkPlaces, KnownChunks};
use crate::shared_store::lease::Lease;
use crate::shared_store::recent_packs::RecentPacks;
use crate::source::{ChunkPlace, SnapshotSource, in_push_order};
use crate::tenant::{SHARED_TENANT, Tenant};
use crate::{FormatError, StoreError};
use bytes::Bytes;
use pack_builder::{BuiltPack, PackBuilder};
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::{BTreeSet, HashSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Maximum number of packs that are uploaded concurrently.
const UPLOADS_AT_ONCE: usize = 4;
/// Minimum number of new chunks (128 MiB) for compression with several threads.
const PARALLEL_CHUNKS: usize = 2048;
/// Maximum number of threads that compress chunks.
const MAX_BUILDERS: usize = 4;

/// Settings of a push.
#[derive(Debug, Clone)]
pub struct PushOptions {
    /// Directory with the indexes of the packs that this host wrote last.
    pub index_cache: PathBuf,
    /// Target size of a pack in bytes, at most 32 MiB.
    pub pack_bytes: usize,
    /// Becomes true when the push is cancelled. `None` if the push cannot be cancelled.
    pub cancelled: Option<watch::Receiver<bool>>,
}

impl PushOptions {
    /// Returns options with packs of 8 MiB.
    pub fn new(index_cache: PathBuf) -> Self {
        Self {
            index_cache,
            pack_bytes: 8 << 20,
            cancelled: None,
        }
    }

    /// Waits until the push is cancelled. Waits forever if no sender can cancel the push.
    async fn cancelled(&self) {
        if let Some(mut cancelled) = self.cancelled.clone()
            && cancelled.wait_for(|cancelled| *cancelled).await.is_ok()
        {
            return;
        }
        std::future::pending().await
    }
}

/// Result of a push.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PushReport {
    /// Root of the snapshot in hexadecimal.
    pub root: String,
    /// True if the store already had the snapshot.
    pub existed: bool,
    /// Number of stored chunks of the snapshot.
    pub chunks: u64,
    /// Number of chunks that the store lacked.
    pub new_chunks: u64,
    /// Bytes of the new chunks before compression.
    pub new_bytes: u64,
    /// Number of packs written.
    pub packs: u64,
    /// Bytes of these packs.
    pub pack_bytes: u64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Chunks that a push reuses.
struct Reuse {
    chosen: ChunkPlaces,
    /// Keys of the objects that contain these chunks, and of the manifests of the ancestors. They
    /// must exist until the commit.
    required_keys: BTreeSet<String>,
    /// Packs that cannot be reused.
    lost: HashSet<PackId>,
}

/// Snapshot whose chunks are in the store.
struct Commit<'a> {
    manifest: &'a StoredManifest,
    root: Hash,
    /// Encoded manifest.
    object: Bytes,
    /// Locations of all chunks.
    chunks: &'a ChunkPlaces,
    /// Ancestors of the nearest ancestor, which already protects the shared ones among them from
    /// removal.
    inherited: &'a HashSet<SnapshotName>,
}

impl SharedStore {
    /// Returns the root that a push of `source` has unless the keys of `tenant` are rotated before
    /// it.
    pub async fn root(&self, tenant: &Tenant, source: &SnapshotSource) -> Result<Hash, StoreError> {
        let keys = tenant.current()?;
        let root = hash_source(source, keys).await?.root(keys);
        root.map_err(unwritable)
    }

    /// Pushes a snapshot of `tenant`. Returns its name.
    pub async fn push(
        &self,
        tenant: &Tenant,
        source: &SnapshotSource,
        options: &PushOptions,
    ) -> Result<(SnapshotName, PushReport), StoreError> {
        let lease = self.new_lease(tenant)?;
        let pushed = tokio::select! {
            pushed = self.push_under(tenant, source, options, &lease) => pushed,
            () = options.cancelled() => Err(StoreError::Source("the push was cancelled".into())),
        };
        // End the lease of a failed push as well: the next push finds its packs in the index of
        // recent packs, and protects the packs that still exist.
        self.end_lease(&lease).await;
        pushed
    }

    /// Pushes a snapshot under the protection of `lease`: hashes the source, reuses chunks of the
    /// store, uploads the others, and commits.
    async fn push_under(
        &self,
        tenant: &Tenant,
        source: &SnapshotSource,
        options: &PushOptions,
        lease: &Lease,
    ) -> Result<(SnapshotName, PushReport), StoreError> {
        let start = Instant::now();
        let keys = tenant.current()?;
        let manifest = hash_source(source, keys).await?;
        let (root, object) = manifest.encode(keys, tenant.id()).map_err(unwritable)?;
        let name = SnapshotName {
            scope: if tenant.name() == SHARED_TENANT {
                Scope::Shared
            } else {
                Scope::Tenant
            },
            root,
        };
        let mut report = PushReport {
            root: root.to_string(),
            existed: false,
            chunks: manifest
                .parts
                .iter()
                .map(|part| part.hashes.len() as u64)
                .sum(),
            new_chunks: 0,
            new_bytes: 0,
            packs: 0,
            pack_bytes: 0,
            seconds: 0.0,
        };
        let recent = RecentPacks::new(&options.index_cache, tenant, keys);
        let known = self
            .known_chunks(tenant, keys, &manifest, root, &recent)
            .await?;
        let reuse = self
            .reuse(tenant, keys, &manifest, root, &known, lease)
            .await?;
        let is_whole = self.is_whole(tenant, root, &known, &reuse.lost).await?;
        for pack in &reuse.lost {
            recent.forget(pack);
        }
        if is_whole {
            report.existed = true;
        } else {
            let mut chosen = reuse.chosen;
            let places = in_push_order(&manifest.parts, &source.working_set);
            self.upload(
                tenant,
                keys,
                source,
                options,
                &places,
                &mut chosen,
                &mut report,
            )
            .await?;
            self.recheck(&reuse.required_keys, lease).await?;
            let commit = Commit {
                manifest: &manifest,
                root,
                object: object.into(),
                chunks: &chosen,
                inherited: &known.inherited,
            };
            self.commit(tenant, keys, commit).await?;
        }
        report.seconds = start.elapsed().as_secs_f64();
        Ok((name, report))
    }

    /// Chooses the chunks to reuse, and adds the objects that contain them to the lease.
    async fn reuse(
        &self,
        tenant: &Tenant,
        keys: &DataKeys,
        manifest: &StoredManifest,
        root: Hash,
        known: &KnownChunks,
        lease: &Lease,
    ) -> Result<Reuse, StoreError> {
        let own = manifest.lineage.iter();
        let ancestors: Vec<Hash> = own
            .filter(|name| name.scope == Scope::Tenant)
            .map(|name| name.root)
            .collect();
        let pack_key = |pack: &PackId| tenant.pack_key(keys.generation(), pack);
        let mut lost = HashSet::new();
        // The loop ends, because each repetition excludes at least one more pack.
        loop {
            let chosen = known.choose(&lost);
            let packs = chosen.packs();
            let manifests = ancestors.iter().map(|root| tenant.manifest_key(root));
            let required_keys: BTreeSet<String> =
                packs.iter().map(pack_key).chain(manifests).collect();
            // Also protect the objects that the commit writes. They may exist from an earlier push.
            let mut protected = required_keys.clone();
            protected.extend([tenant.manifest_key(&root), tenant.locations_key(&root)]);
            self.protect(tenant, lease, &protected).await?;
            // The list must be read after the lease was written: see `lease`.
            let unusable = self.unusable(tenant, &protected).await?;
            let retained = ancestors.iter().copied().chain([root]);
            self.check_retained(tenant, retained, &unusable).await?;
            let new = self
                .lost_packs(tenant, keys, &packs, known, &unusable)
                .await?;
            if new.is_empty() {
                // `is_whole` also requires the packs that only the snapshot's stored locations use.
                let whole = known.own.iter().flat_map(Locations::packs);
                let others: HashSet<PackId> = whole.filter(|pack| !packs.contains(pack)).collect();
                if !others.is_empty() {
                    let keys_of_others = others.iter().map(pack_key).collect();
                    let unusable = self.unusable(tenant, &keys_of_others).await?;
                    let checking = self.lost_packs(tenant, keys, &others, known, &unusable);
                    lost.extend(checking.await?);
                }
                return Ok(Reuse {
                    chosen,
                    required_keys,
                    lost,
                });
            }
            lost.extend(new);
        }
    }

    /// Returns the packs that cannot be reused: they are condemned by a garbage collection, known
    /// to have damage, missing or truncated.
    async fn lost_packs(
        &self,
        tenant: &Tenant,
        keys: &DataKeys,
        packs: &HashSet<PackId>,
        known: &KnownChunks,
        unusable: &HashSet<String>,
    ) -> Result<HashSet<PackId>, StoreError> {
        let lost = Mutex::new(HashSet::new());
        let check = async |pack: &PackId| {
            let key = tenant.pack_key(keys.generation(), pack);
            let required = known.sizes.get(pack).copied().unwrap_or(0);
            let is_usable = !unusable.contains(&key)
                && (self.backend.head(&key).await?).is_some_and(|object| object.bytes >= required);
            if !is_usable {
                lost.lock().insert(*pack);
            }
            Ok(())
        };
        self.backend.each(packs, check).await?;
        Ok(lost.into_inner())
    }

    /// Returns true if the store has the snapshot and all of its packs.
    async fn is_whole(
        &self,
        tenant: &Tenant,
        root: Hash,
        known: &KnownChunks,
        lost: &HashSet<PackId>,
    ) -> Result<bool, StoreError> {
        let Some(own) = &known.own else {
            return Ok(false);
        };
        if own.packs().any(|pack| lost.contains(&pack)) {
            return Ok(false);
        }
        // The manifest must be looked up after the lease was written: a collection may have removed
        // the snapshot.
        let manifest = self.backend.head(&tenant.manifest_key(&root)).await?;
        Ok(manifest.is_some())
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the uploads use all arguments of a push"
    )]
    /// Uploads the chunks that the store lacks, in new packs. Several threads compress and encrypt
    /// them. Adds their locations to `chosen`.
    async fn upload(
        &self,
        tenant: &Tenant,
        keys: &DataKeys,
        source: &SnapshotSource,
        options: &PushOptions,
        places: &[ChunkPlace],
        chosen: &mut ChunkPlaces,
        report: &mut PushReport,
    ) -> Result<(), StoreError> {
        let mut seen = HashSet::new();
        let missing = places
            .iter()
            .filter(|place| !chosen.0.contains_key(&place.hash));
        let missing: Vec<ChunkPlace> = missing
            .filter(|place| seen.insert(place.hash))
            .copied()
            .collect();
        let builders = match missing.len() {
            0..PARALLEL_CHUNKS => 1,
            _ => std::thread::available_parallelism()
                .map_or(1, usize::from)
                .min(MAX_BUILDERS),
        };
        // The channel is bounded, so that few finished packs are in memory.
        let (sender, mut receiver) = mpsc::channel(1);
        for part in missing.chunks(missing.len().div_ceil(builders).max(1)) {
            let builder = PackBuilder {
                tenant: tenant.id(),
                keys: keys.clone(),
                parts: source.parts.clone(),
                places: part.to_vec(),
                pack_bytes: options.pack_bytes.min(MAX_PACK_BYTES as usize / 2),
                sender: sender.clone(),
            };
            tokio::task::spawn_blocking(move || builder.run());
        }
        // The stream ends when all builders have dropped their senders.
        drop(sender);
        let built = futures_util::stream::poll_fn(move |context| receiver.poll_recv(context));
        let send = |built: Result<BuiltPack, StoreError>| async {
            let pack = built?;
            let key = tenant.pack_key(keys.generation(), &pack.id);
            let bytes = pack.object.len() as u64;
            // Add the pack to the index before writing it, so that the next push finds it if this
            // one is killed. A push reuses a pack only if it exists.
            RecentPacks::new(&options.index_cache, tenant, keys).add(&pack.id, &pack.object);
            // An existing pack is this pack: its id is random, so an earlier attempt wrote it.
            self.backend.create(&key, pack.object).await?;
            Ok::<_, StoreError>((pack.id, pack.entries, bytes))
        };
        use futures_util::{StreamExt, TryStreamExt};
        let sent = built.map(send).buffer_unordered(UPLOADS_AT_ONCE);
        sent.try_for_each(|(id, entries, bytes)| {
            report.packs += 1;
            report.pack_bytes += bytes;
            report.new_chunks += entries.len() as u64;
            report.new_bytes += entries
                .iter()
                .map(|entry| u64::from(entry.chunk))
                .sum::<u64>();
            chosen.add(id, &entries);
            std::future::ready(Ok(()))
        })
        .await
    }

    /// Checks that the required objects still exist and that the lease is still valid.
    async fn recheck(
        &self,
        required_keys: &BTreeSet<String>,
        lease: &Lease,
    ) -> Result<(), StoreError> {
        self.backend
            .each(required_keys, |key| async move {
                let object = self.backend.head(key).await?;
                object
                    .map(drop)
                    .ok_or_else(|| StoreError::Gone(key.clone()))
            })
            .await?;
        self.check_lease(lease).await
    }

    /// Writes the locations, the references to shared ancestors, and then the manifest. The store
    /// has the snapshot once the manifest exists.
    async fn commit(
        &self,
        tenant: &Tenant,
        keys: &DataKeys,
        commit: Commit<'_>,
    ) -> Result<(), StoreError> {
        let Commit { manifest, root, .. } = commit;
        let hashes = manifest.parts.iter().flat_map(|part| &part.hashes);
        let locations = hashes.map(|hash| commit.chunks.0.get(hash).copied());
        let locations: Option<Vec<Location>> = locations.collect();
        let unplaced = || StoreError::Source("one of its chunks was not written".to_owned());
        let locations = Locations(locations.ok_or_else(unplaced)?);
        // Write the locations before the manifest: a manifest must not exist without them.
        let encoded = locations
            .encode(keys, tenant.id(), root)
            .map_err(unwritable)?;
        self.backend
            .put(&tenant.locations_key(&root), encoded.into())
            .await?;
        let shared = manifest.lineage.iter();
        let shared = shared.filter(|name| name.scope == Scope::Shared);
        // Skip the shared ancestors of the nearest ancestor. The references of the nearest ancestor
        // protect them while it exists, and this snapshot prevents its removal.
        for ancestor in shared.filter(|name| !commit.inherited.contains(name)) {
            // Refer to shared ancestors before the manifest exists, so that they are protected in
            // time.
            self.refer(tenant, &ancestor.root, &root).await?;
        }
        let key = tenant.manifest_key(&root);
        let object = commit.object;
        if !self.backend.create(&key, object.clone()).await? {
            // Another host pushed the same snapshot. Replace its manifest if that is damaged.
            let existing = self.backend.get(&key, crate::MAX_MANIFEST_BYTES).await?;
            let sound = crate::envelope::Header::decode(MANIFEST_MAGIC, &existing).is_ok()
                && StoredManifest::decode(&existing, keys, root).is_ok();
            if !sound {
                self.backend.put(&key, object).await?;
            }
        }
        Ok(())
    }
}

fn unwritable(reason: FormatError) -> StoreError {
    StoreError::Source(reason.to_string())
}

/// Hashes the chunks of all parts of a snapshot. Returns its manifest.
async fn hash_source(
    source: &SnapshotSource,
    keys: &DataKeys,
) -> Result<StoredManifest, StoreError> {
    let hashing = source.parts.iter().map(|part| {
        let (part, keys) = (part.clone(), keys.clone());
        tokio::task::spawn_blocking(move || part.hash(&keys))
    });
    let mut parts = Vec::with_capacity(source.parts.len());
    for hashed in hashing.collect::<Vec<_>>() {
        parts.push(
            hashed
                .await
                .map_err(|e| StoreError::Source(e.to_string()))??,
        );
    }
    Ok(StoredManifest {
        engine: source.engine,
        created_ms: source.created_ms,
        attributes: source.attributes.clone(),
        lineage: source.lineage.clone(),
        parts,
        working_set: source.working_set.clone(),
    })
}

/// Maximum duration of a push: a lease is considered expired after half of its lifetime.
pub const MAX_PUSH_TIME: Duration = Duration::from_secs(12 * 3600);
const _: () =
    assert!(MAX_PUSH_TIME.as_secs() * 2 == crate::shared_store::lease::LEASE_TIME.as_secs());
