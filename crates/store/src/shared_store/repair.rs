//! Repair: rewrites damaged chunks from copies and updates the locations in snapshots. Pushes do
//! not reuse packs with damage, which are listed in `gc/distrusted`.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *pack* is an object in the store with many
//! compressed and encrypted chunks.

use crate::data_keys::{DataKeys, Hash};
use crate::locations::{Location, Locations};
use crate::pack::{MAX_FRAME_BYTES, PackWriter, decode_frame, encode_frame};
use crate::remote::RemoteSnapshot;
use crate::shared_store::SharedStore;
use crate::shared_store::collection::{GC_LOCK_TIME, OnProgress};
use crate::shared_store::verify::{DamagedFrame, DamagedSnapshot, VerifyReport};
use crate::source::SnapshotSource;
use crate::tenant::Tenant;
use crate::{CHUNK_BYTES, LayerCache, StoreError};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// Size in bytes of the packs that a repair writes.
pub(crate) const REPAIR_PACK_BYTES: usize = 8 << 20;

/// Source of copies of chunks on this host. The caller verifies each copy against the chunk's hash.
pub trait ChunkCopies: Send + Sync {
    /// Reads chunk `chunk` of part number `part` into `buffer`. Returns its length.
    fn read_chunk(
        &self,
        snapshot: &RemoteSnapshot,
        part: usize,
        chunk: u64,
        buffer: &mut [u8],
    ) -> Option<usize>;
}

impl ChunkCopies for SnapshotSource {
    fn read_chunk(
        &self,
        snapshot: &RemoteSnapshot,
        part: usize,
        chunk: u64,
        buffer: &mut [u8],
    ) -> Option<usize> {
        let name = &snapshot.manifest.parts.get(part)?.name;
        let part = self.parts.iter().find(|part| part.name == *name)?;
        let bytes = part.file.metadata().ok()?.len();
        part.read(chunk, bytes, buffer).ok().map(<[u8]>::len)
    }
}

impl ChunkCopies for LayerCache {
    fn read_chunk(
        &self,
        snapshot: &RemoteSnapshot,
        part: usize,
        chunk: u64,
        buffer: &mut [u8],
    ) -> Option<usize> {
        let root = snapshot.part_root(part).ok()?;
        let range = snapshot.manifest.parts.get(part)?.chunk_range(chunk);
        let length = usize::try_from(range.end.checked_sub(range.start)?).ok()?;
        let chunk = buffer.get_mut(..length)?;
        self.read_at(&root, range.start, chunk).then_some(length)
    }
}

/// Writer of a repair's packs, which records the new locations of chunks.
struct Rewriter<'a> {
    store: &'a SharedStore,
    tenant: &'a Tenant,
    keys: &'a DataKeys,
    /// New locations by hash of the chunk. The hash depends on the data keys, so a location is
    /// valid in all snapshots that contain the hash.
    moved: &'a mut HashMap<Hash, Location>,
    writer: PackWriter,
}

impl SharedStore {
    /// Rewrites the damaged chunks of a snapshot from copies. Returns the chunks without a copy.
    pub async fn repair(
        &self,
        snapshot: &RemoteSnapshot,
        damages: &[DamagedFrame],
        copies: &dyn ChunkCopies,
    ) -> Result<Vec<DamagedFrame>, StoreError> {
        let damaged = DamagedSnapshot {
            id: snapshot.manifest.attributes.id.clone(),
            root: snapshot.root.to_string(),
            chunks: damages.to_vec(),
            snapshot: snapshot.clone(),
        };
        let lost = self
            .repair_all(&snapshot.tenant, &[damaged], copies, &|_, _, _| {})
            .await?;
        Ok(lost.into_iter().flat_map(|lost| lost.chunks).collect())
    }

    /// Repairs the damaged chunks of a tenant's snapshots, from copies or from valid chunks of
    /// other snapshots. Returns the chunks without a copy. Holds the collection lock.
    pub async fn repair_all(
        &self,
        tenant: &Arc<Tenant>,
        damaged: &[DamagedSnapshot],
        copies: &dyn ChunkCopies,
        progress: OnProgress<'_>,
    ) -> Result<Vec<DamagedSnapshot>, StoreError> {
        let lock = self.lock_collection(tenant, GC_LOCK_TIME).await?;
        let work = async {
            let mut moved = HashMap::new();
            let total = damaged.len() as u64;
            for (at, damaged) in (0..).zip(damaged) {
                progress("snapshots", at, total);
                self.check_lock(&lock).await?;
                self.rewrite_chunks(damaged, copies, &mut moved).await?;
            }
            self.add_other_places(tenant, damaged, &mut moved).await?;
            // A chunk that several snapshots share is repaired in all if one of them has a copy.
            let mut lost = Vec::new();
            for damaged in damaged {
                self.check_lock(&lock).await?;
                let root = damaged.snapshot.root;
                self.relocate(tenant, root, |hash, _| moved.get(hash).copied())
                    .await?;
                let all = damaged.hashes().into_iter();
                let remaining = all.filter(|(_, _, hash)| !moved.contains_key(hash));
                let chunks: Vec<DamagedFrame> =
                    remaining.map(|(frame, ..)| frame.clone()).collect();
                if !chunks.is_empty() {
                    let damaged = damaged.clone();
                    lost.push(DamagedSnapshot { chunks, ..damaged });
                }
            }
            Ok(lost)
        };
        let repaired = work.await;
        let unlocked = self.unlock_collection(&lock).await;
        // Report the error of the work rather than a failure to unlock, which the work may have
        // caused.
        repaired.and_then(|lost| unlocked.map(|()| lost))
    }

    /// Adds undamaged copies of damaged chunks to `moved`: packs of other snapshots may contain the
    /// same chunks.
    async fn add_other_places(
        &self,
        tenant: &Arc<Tenant>,
        damaged: &[DamagedSnapshot],
        moved: &mut HashMap<Hash, Location>,
    ) -> Result<(), StoreError> {
        let all = damaged.iter().flat_map(DamagedSnapshot::hashes);
        let mut remaining: HashSet<Hash> = all.map(|(_, _, hash)| hash).collect();
        remaining.retain(|hash| !moved.contains_key(hash));
        if remaining.is_empty() {
            return Ok(());
        }
        let mut tried = HashSet::new();
        for root in self.snapshots(tenant).await? {
            let Some(snapshot) = unless_damaged(self.open(tenant, root).await)? else {
                continue;
            };
            let hashes = snapshot.manifest.parts.iter().flat_map(|part| &part.hashes);
            for (hash, &place) in hashes.zip(&snapshot.locations.0) {
                if !remaining.contains(hash) || !tried.insert((place.pack, place.offset)) {
                    continue;
                }
                let key = tenant.pack_key(snapshot.keys.generation(), &place.pack);
                let range =
                    u64::from(place.offset)..u64::from(place.offset) + u64::from(place.length);
                let frame = unless_damaged(self.backend.get_range(&key, range).await)?;
                if frame.is_some_and(|frame| decode_frame(&snapshot.keys, hash, &frame).is_ok()) {
                    remaining.remove(hash);
                    moved.insert(*hash, place);
                }
            }
        }
        Ok(())
    }

    /// Writes damaged chunks that have a copy to new packs.
    async fn rewrite_chunks(
        &self,
        damaged: &DamagedSnapshot,
        copies: &dyn ChunkCopies,
        moved: &mut HashMap<Hash, Location>,
    ) -> Result<(), StoreError> {
        let snapshot = &damaged.snapshot;
        let mut rewriter = Rewriter {
            store: self,
            tenant: &snapshot.tenant,
            keys: &snapshot.keys,
            writer: PackWriter::new(&snapshot.keys, snapshot.tenant.id()).map_err(full)?,
            moved,
        };
        let mut buffer = vec![0; CHUNK_BYTES as usize];
        for (frame, part, hash) in damaged.hashes() {
            // Another damaged snapshot shares the chunk.
            if rewriter.moved.contains_key(&hash) {
                continue;
            }
            let read = copies.read_chunk(snapshot, part, frame.chunk, &mut buffer);
            let chunk = read.and_then(|length| buffer.get(..length));
            if let Some(chunk) = chunk.filter(|chunk| snapshot.keys.chunk_hash(chunk) == hash) {
                rewriter.add(hash, chunk).await?;
            }
        }
        rewriter.flush().await
    }

    /// Changes the locations of a snapshot's chunks to the locations that `moved` returns. A chunk
    /// retains its location if `moved` returns `None`. The caller must hold the collection lock.
    pub(crate) async fn relocate(
        &self,
        tenant: &Tenant,
        root: Hash,
        moved: impl Fn(&Hash, &Location) -> Option<Location>,
    ) -> Result<(), StoreError> {
        let (keys, manifest) = self.manifest(tenant, root).await?;
        let old = self.locations(tenant, &keys, root).await?;
        let hashes = manifest.parts.iter().flat_map(|part| &part.hashes);
        let places = hashes.zip(&old.0);
        let new = Locations(
            places
                .map(|(hash, place)| moved(hash, place).unwrap_or(*place))
                .collect(),
        );
        if new == old {
            return Ok(());
        }
        let key = tenant.locations_key(&root);
        let encoded = new
            .encode(&keys, tenant.id(), root)
            .map_err(StoreError::damaged(&key))?;
        self.backend.put(&key, encoded.into()).await
    }

    /// Excludes packs that a verification found damaged from reuse. A later push of a snapshot
    /// uploads their chunks again, and a collection moves their undamaged chunks to other packs.
    pub async fn distrust(
        &self,
        tenant: &Tenant,
        verified: &VerifyReport,
    ) -> Result<(), StoreError> {
        let packs = verified.packs();
        if packs.is_empty() {
            return Ok(());
        }
        let lock = self.lock_collection(tenant, GC_LOCK_TIME).await?;
        let work = async {
            let mut all = self.distrusted(tenant).await?;
            all.extend(packs);
            self.write_distrusted(tenant, &all).await
        };
        let written = work.await;
        let unlocked = self.unlock_collection(&lock).await;
        // Report the error of the work rather than a failure to unlock, which the work may have
        // caused.
        written.and(unlocked)
    }

    /// Returns the keys of the packs with known damage.
    pub(crate) async fn distrusted(&self, tenant: &Tenant) -> Result<BTreeSet<String>, StoreError> {
        let packs = self.read_list(tenant, &distrusted_key(tenant)).await?;
        Ok(packs.unwrap_or_default())
    }

    /// Replaces the list of packs with known damage. The caller must hold the collection lock.
    pub(crate) async fn write_distrusted(
        &self,
        tenant: &Tenant,
        packs: &BTreeSet<String>,
    ) -> Result<(), StoreError> {
        let key = distrusted_key(tenant);
        self.write_list(tenant, &key, packs).await
    }

    /// Writes a pack. Returns its size in bytes.
    pub(crate) async fn write_pack(
        &self,
        tenant: &Tenant,
        keys: &DataKeys,
        writer: PackWriter,
    ) -> Result<u64, StoreError> {
        let key = tenant.pack_key(keys.generation(), &writer.id());
        let (object, _) = writer.finish(keys).map_err(StoreError::damaged(&key))?;
        let bytes = object.len() as u64;
        // An existing pack is this pack: its id is random, so an earlier attempt wrote it.
        self.backend.create(&key, object).await?;
        Ok(bytes)
    }
}

impl Rewriter<'_> {
    /// Adds a chunk to the new pack, and uploads the pack if it is full.
    async fn add(&mut self, hash: Hash, chunk: &[u8]) -> Result<(), StoreError> {
        let frame = encode_frame(self.keys, &hash, chunk).map_err(full)?;
        let entry = self.writer.push(hash, &frame, chunk.len()).map_err(full)?;
        let location = Location {
            pack: self.writer.id(),
            offset: entry.offset,
            length: entry.length,
        };
        self.moved.insert(hash, location);
        if self.writer.len() + MAX_FRAME_BYTES > REPAIR_PACK_BYTES {
            self.flush().await
        } else {
            Ok(())
        }
    }

    /// Writes the pack that is being built, if it has chunks, and begins the next one.
    async fn flush(&mut self) -> Result<(), StoreError> {
        if self.writer.is_empty() {
            return Ok(());
        }
        let next = PackWriter::new(self.keys, self.tenant.id()).map_err(full)?;
        let writer = std::mem::replace(&mut self.writer, next);
        self.store
            .write_pack(self.tenant, self.keys, writer)
            .await
            .map(drop)
    }
}

/// Converts the result of a read. `None` if the object is missing or damaged.
fn unless_damaged<T>(read: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
    match read {
        Err(StoreError::Missing { .. } | StoreError::Damaged { .. }) => Ok(None),
        other => other.map(Some),
    }
}

fn distrusted_key(tenant: &Tenant) -> String {
    tenant.key("gc/distrusted")
}

/// Converts an error of writing a pack.
pub(crate) fn full(reason: crate::FormatError) -> StoreError {
    StoreError::Source(format!("cannot write one of its packs: {reason}"))
}
