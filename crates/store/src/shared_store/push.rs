//! Push: copies a snapshot of a host to a store. Chunks that the store has are not uploaded, so
//! that a repeated push continues after an interrupted one.

use crate::data_keys::{DataKeys, Hash};
use crate::locations::{Location, Locations};
use crate::manifest::{CHUNK_BYTES, MANIFEST_MAGIC, Scope, SnapshotName, StoredManifest};
use crate::pack::{Entry, MAX_FRAME_BYTES, MAX_PACK_BYTES, PackId, PackWriter, encode_frame};
use crate::shared_store::SharedStore;
use crate::shared_store::lease::Lease;
use crate::shared_store::pack_index::PackIndex;
use crate::source::{ChunkPlace, PartSource, SnapshotSource, in_push_order};
use crate::tenant::{SHARED_TENANT, Tenant};
use crate::{FormatError, StoreError};
use bytes::Bytes;
use serde::Serialize;
use std::collections::{BTreeSet, HashSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

const UPLOADS_AT_ONCE: usize = 4;
/// Minimum number of new chunks (128 MiB) for compression with several threads.
const PARALLEL_CHUNKS: usize = 2048;
const MAX_BUILDERS: usize = 4;

/// Settings of a push.
#[derive(Debug, Clone)]
pub struct PushOptions {
    /// Directory of cached pack indexes.
    pub index_cache: PathBuf,
    /// Size of a pack in bytes, between 4 and 16 MiB.
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

    /// Waits until the push is cancelled.
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

struct BuiltPack {
    id: PackId,
    object: Bytes,
    entries: Vec<Entry>,
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
        let lease = self.take_lease(tenant).await?;
        let pushed = tokio::select! {
            pushed = self.push_under(tenant, source, options, &lease) => pushed,
            () = options.cancelled() => Err(StoreError::Source("the push was cancelled".into())),
        };
        // The next push reuses the packs of a failed push.
        self.end_lease(&lease).await;
        pushed
    }

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
        let places = in_push_order(&manifest.parts, &source.working_set);
        let (mut index, protected) = self
            .reuse(tenant, keys, &manifest, root, &places, options, lease)
            .await?;
        if self.is_whole(tenant, keys, root, &index).await? {
            report.existed = true;
        } else {
            self.upload(
                tenant,
                keys,
                source,
                options,
                &places,
                &mut index,
                &mut report,
            )
            .await?;
            self.recheck(&protected, lease).await?;
            self.commit(tenant, keys, &manifest, root, object.into(), &index)
                .await?;
        }
        report.seconds = start.elapsed().as_secs_f64();
        Ok((name, report))
    }

    /// Returns the chunks to reuse and the keys of the objects that contain them. Adds these
    /// objects to the lease.
    #[expect(
        clippy::too_many_arguments,
        reason = "all arguments affect the choice of reused chunks"
    )]
    async fn reuse(
        &self,
        tenant: &Tenant,
        keys: &DataKeys,
        manifest: &StoredManifest,
        root: Hash,
        places: &[ChunkPlace],
        options: &PushOptions,
        lease: &Lease,
    ) -> Result<(PackIndex, BTreeSet<String>), StoreError> {
        let mut lost = HashSet::new();
        loop {
            let index = self
                .pack_index(tenant, keys, &options.index_cache, &lost)
                .await?;
            let packs: HashSet<PackId> = places
                .iter()
                .filter_map(|place| index.chunks.get(&place.hash))
                .map(|location| location.pack)
                .collect();
            let packs = packs
                .iter()
                .map(|pack| tenant.pack_key(keys.generation(), pack));
            let own = manifest
                .lineage
                .iter()
                .filter(|name| name.scope == Scope::Tenant);
            let ancestors: BTreeSet<String> =
                own.map(|name| tenant.manifest_key(&name.root)).collect();
            let reused: BTreeSet<String> = packs.chain(ancestors.iter().cloned()).collect();
            let mut protected = reused.clone();
            protected.extend([tenant.manifest_key(&root), tenant.locations_key(&root)]);
            self.protect(tenant, lease, &protected).await?;
            // Must be read after the lease was written: see `lease`.
            let lost_now = self.lost(tenant).await?;
            let own = tenant.manifest_key(&root);
            let removed = ancestors
                .iter()
                .chain([&own])
                .find(|key| lost_now.contains(*key));
            if let Some(key) = removed {
                return Err(StoreError::Gone(key.clone()));
            }
            if reused.iter().all(|key| !lost_now.contains(key)) {
                return Ok((index, reused));
            }
            // Some of the packs are condemned: choose again without them.
            lost = lost_now;
        }
    }

    /// Returns true if the store has the snapshot and all of its packs.
    async fn is_whole(
        &self,
        tenant: &Tenant,
        keys: &DataKeys,
        root: Hash,
        index: &PackIndex,
    ) -> Result<bool, StoreError> {
        if self
            .backend
            .head(&tenant.manifest_key(&root))
            .await?
            .is_none()
        {
            return Ok(false);
        }
        match self.locations(tenant, keys, root).await {
            Ok(locations) => Ok(locations.packs().all(|pack| index.packs.contains(&pack))),
            Err(StoreError::Missing { .. } | StoreError::Damaged { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the uploads use all arguments of a push"
    )]
    async fn upload(
        &self,
        tenant: &Tenant,
        keys: &DataKeys,
        source: &SnapshotSource,
        options: &PushOptions,
        places: &[ChunkPlace],
        index: &mut PackIndex,
        report: &mut PushReport,
    ) -> Result<(), StoreError> {
        let mut seen = HashSet::new();
        let missing = places
            .iter()
            .filter(|place| !index.chunks.contains_key(&place.hash));
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
            index.add(id, &entries);
            std::future::ready(Ok(()))
        })
        .await
    }

    /// Checks that the reused objects still exist and that the lease is still valid.
    async fn recheck(&self, protected: &BTreeSet<String>, lease: &Lease) -> Result<(), StoreError> {
        self.backend
            .each(protected, |key| async move {
                let object = self.backend.head(key).await?;
                object
                    .map(drop)
                    .ok_or_else(|| StoreError::Gone(key.clone()))
            })
            .await?;
        self.check_lease(lease).await
    }

    async fn commit(
        &self,
        tenant: &Tenant,
        keys: &DataKeys,
        manifest: &StoredManifest,
        root: Hash,
        object: Bytes,
        index: &PackIndex,
    ) -> Result<(), StoreError> {
        let hashes = manifest.parts.iter().flat_map(|part| &part.hashes);
        let locations = hashes.map(|hash| index.chunks.get(hash).copied());
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
        for ancestor in manifest
            .lineage
            .iter()
            .filter(|name| name.scope == Scope::Shared)
        {
            // Refer to shared ancestors before the manifest exists, so that they are protected in
            // time.
            self.refer(tenant, &ancestor.root, &root).await?;
        }
        let key = tenant.manifest_key(&root);
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

/// Task that reads, compresses and encrypts chunks on a blocking thread.
struct PackBuilder {
    tenant: crate::envelope::TenantId,
    keys: DataKeys,
    parts: Vec<PartSource>,
    places: Vec<ChunkPlace>,
    pack_bytes: usize,
    sender: mpsc::Sender<Result<BuiltPack, StoreError>>,
}

impl PackBuilder {
    fn run(&self) {
        if let Err(e) = self.build() {
            let _ = self.sender.blocking_send(Err(e));
        }
    }

    fn build(&self) -> Result<(), StoreError> {
        let begin = || PackWriter::new(&self.keys, self.tenant).map_err(unwritable);
        let mut writer = begin()?;
        let mut buffer = vec![0; CHUNK_BYTES as usize];
        for place in &self.places {
            let part = self
                .parts
                .get(place.part)
                .ok_or_else(|| StoreError::Source("a part does not exist".into()))?;
            let bytes = part
                .file
                .metadata()
                .map_err(StoreError::io(part.name.as_ref()))?
                .len();
            let chunk = part.read(place.number, bytes, &mut buffer)?;
            if self.keys.chunk_hash(chunk) != place.hash {
                return Err(StoreError::Source(format!(
                    "{} changed during the push",
                    part.name
                )));
            }
            let frame = encode_frame(&self.keys, &place.hash, chunk).map_err(unwritable)?;
            writer
                .push(place.hash, &frame, chunk.len())
                .map_err(unwritable)?;
            if writer.len() + MAX_FRAME_BYTES > self.pack_bytes
                && !self.send(std::mem::replace(&mut writer, begin()?))?
            {
                return Ok(());
            }
        }
        if !writer.is_empty() {
            self.send(writer)?;
        }
        Ok(())
    }

    /// Queues a pack for upload. Returns false if the push has ended.
    fn send(&self, writer: PackWriter) -> Result<bool, StoreError> {
        let id = writer.id();
        let (object, entries) = writer.finish(&self.keys).map_err(unwritable)?;
        let built = BuiltPack {
            id,
            object,
            entries,
        };
        Ok(self.sender.blocking_send(Ok(built)).is_ok())
    }
}

/// Maximum duration of a push: a lease is considered expired after half of its lifetime.
pub const MAX_PUSH_TIME: Duration = Duration::from_secs(12 * 3600);
const _: () =
    assert!(MAX_PUSH_TIME.as_secs() * 2 == crate::shared_store::lease::LEASE_TIME.as_secs());
