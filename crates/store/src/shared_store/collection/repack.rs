//! Repacking: moves live chunks of mostly dead or damaged packs to new packs.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *collection* removes objects that no snapshot
//! needs. It first *condemns* an object, and a later collection removes the object. A *pack* is an
//! object in the store with many compressed and encrypted chunks. A *frame* is a compressed and
//! encrypted chunk in a pack. A *lease* is an object that protects the objects of a push in
//! progress.
//!
//! New packs are written first, then the locations of the snapshots that used the old packs. Both
//! sets of locations are valid throughout: an interrupted collection leaves only packs that the
//! next one collects. An old pack without users is condemned, so that no push reuses it. If a push
//! in progress already reuses the pack, its lease lists the pack and protects it.

use super::mark::{Leases, Marked, PackUse};
use super::objects::{ObjectName, StoredObjects};
use super::{Collector, GcReport};
use crate::StoreError;
use crate::data_keys::{DataKeys, Hash};
use crate::fetch_plan::{ChunkRequest, PlannedRange, plan};
use crate::locations::Location;
use crate::pack::{MAX_FRAME_BYTES, PackId, PackWriter, decode_frame};
use crate::shared_store::condemned::{Condemned, ReadCondemned};
use crate::shared_store::repair::{REPAIR_PACK_BYTES, full};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Pack whose chunks are to move.
struct Candidate<'a> {
    key: String,
    generation: u32,
    id: PackId,
    /// Size of the pack in bytes.
    bytes: u64,
    /// Number of live bytes.
    live: u64,
    used: &'a PackUse,
}

impl Candidate<'_> {
    /// Returns the roots of the snapshots that use the pack.
    fn roots(&self, marked: &Marked) -> impl Iterator<Item = Hash> {
        let roots = self.used.roots.iter();
        roots.filter_map(|&number| marked.roots.get(number as usize).copied())
    }
}

/// Result of moving chunks.
#[derive(Default)]
struct Moved {
    /// New locations by old pack and offset.
    places: HashMap<(PackId, u32), Location>,
    /// New locations by hash of the chunk, so that equal chunks are copied once.
    by_hash: HashMap<Hash, Location>,
    /// Packs in which a chunk had to remain.
    retained: HashSet<PackId>,
    /// Bytes of the packs that were written.
    written: u64,
}

impl Collector<'_> {
    /// Moves chunks out of packs that are worth repacking, and condemns those packs. Packs modified
    /// at the store's time `young` (milliseconds since 1970) or later are not repacked.
    pub(super) async fn repack(
        &self,
        objects: &StoredObjects,
        marked: &Marked,
        leases: &Leases,
        young: i64,
        (before, condemned): (&mut ReadCondemned, &mut Condemned),
        report: &mut GcReport,
    ) -> Result<(), StoreError> {
        let distrusted = self.distrusted_packs(objects).await?;
        let chosen = self.candidates(objects, marked, leases, young, &distrusted);
        let mut generations: BTreeMap<u32, Vec<Candidate<'_>>> = BTreeMap::new();
        for candidate in chosen {
            let of = generations.entry(candidate.generation).or_default();
            of.push(candidate);
        }
        for (generation, packs) in &generations {
            let retained = if self.options.dry_run {
                HashSet::new()
            } else {
                let keys = self.tenant.generation(*generation)?;
                let moved = self.move_chunks(keys, packs, marked).await?;
                report.rewritten_bytes += moved.written;
                moved.retained
            };
            for pack in packs.iter().filter(|pack| !retained.contains(&pack.id)) {
                condemned.insert(pack.key.clone(), self.now);
                report.repacked += 1;
                report.repacked_bytes += pack.bytes;
            }
        }
        match report.repacked {
            0 => Ok(()),
            _ => self.write_condemned(before, condemned).await,
        }
    }

    /// Returns the existing packs with known damage. Except in a dry run, removes missing packs
    /// from the store's list of packs with damage.
    async fn distrusted_packs(
        &self,
        objects: &StoredObjects,
    ) -> Result<BTreeSet<String>, StoreError> {
        let all = self.store.distrusted(self.tenant).await?;
        let exists = |key: &str| {
            let name = ObjectName::parse(self.tenant, key);
            name.is_some_and(|name| objects.get(&name).is_some())
        };
        let remaining: BTreeSet<String> = all.iter().filter(|key| exists(key)).cloned().collect();
        if remaining != all && !self.options.dry_run {
            self.store.write_distrusted(self.tenant, &remaining).await?;
        }
        Ok(remaining)
    }

    /// Returns the packs worth repacking, those with the smallest live part first.
    fn candidates<'a>(
        &self,
        objects: &StoredObjects,
        marked: &'a Marked,
        leases: &Leases,
        young: i64,
        distrusted: &BTreeSet<String>,
    ) -> Vec<Candidate<'a>> {
        let object =
            |&(generation, id): &(u32, PackId)| objects.get(&ObjectName::Pack(generation, id));
        // If a snapshot uses a missing pack, do not change the snapshot's locations: a push of the
        // snapshot writes the missing chunks to new packs.
        let missing = marked
            .packs
            .iter()
            .filter(|(name, _)| object(name).is_none());
        let broken: HashSet<u32> = missing.flat_map(|(_, used)| &used.roots).copied().collect();
        let mut candidates: Vec<Candidate<'a>> = Vec::new();
        for (name, used) in &marked.packs {
            let Some(object) = object(name) else {
                continue;
            };
            let (generation, id) = *name;
            let live = used.bytes();
            let percent = u64::from(self.options.repack_percent);
            let is_empty_enough = live * 100 < object.bytes * percent;
            if !is_empty_enough && distrusted.is_empty() {
                continue;
            }
            let key = self.tenant.pack_key(generation, &id);
            let is_worth_it = is_empty_enough || distrusted.contains(&key);
            // A push in progress may refer to young and protected packs.
            let is_free = object.modified_ms < young && !leases.protected.contains(&key);
            let is_whole = used.roots.iter().all(|root| !broken.contains(root));
            if is_worth_it && is_free && is_whole {
                candidates.push(Candidate {
                    key,
                    generation,
                    id,
                    bytes: object.bytes,
                    live,
                    used,
                });
            }
        }
        // Order by the live part of the pack, in thousandths.
        candidates.sort_by_key(|pack| (pack.live * 1000 / pack.bytes.max(1), pack.id));
        let mut sum = 0;
        candidates.retain(|pack| {
            sum += pack.live;
            sum <= self.options.repack_bytes
        });
        candidates
    }

    /// Moves the live chunks of `packs`.
    async fn move_chunks(
        &self,
        keys: &DataKeys,
        packs: &[Candidate<'_>],
        marked: &Marked,
    ) -> Result<Moved, StoreError> {
        let roots = packs.iter().flat_map(|pack| pack.roots(marked));
        let roots: BTreeSet<Hash> = roots.collect();
        let ids: HashSet<PackId> = packs.iter().map(|pack| pack.id).collect();
        let frames = self.frames(&roots, &ids).await?;
        let mut moved = Moved::default();
        self.write_packs(keys, &frames, &mut moved).await?;
        for root in roots {
            self.check().await?;
            // A push in progress may overwrite the locations of this snapshot.
            let protected = self.leases().await?.protected;
            if protected.contains(&self.tenant.locations_key(&root)) {
                let users = packs.iter();
                let users = users.filter(|pack| pack.roots(marked).any(|user| user == root));
                moved.retained.extend(users.map(|pack| pack.id));
                continue;
            }
            let place =
                |_: &Hash, old: &Location| moved.places.get(&(old.pack, old.offset)).copied();
            self.store.relocate(self.tenant, root, place).await?;
        }
        Ok(moved)
    }

    /// Returns the frames of the packs `ids` that the snapshots use, ordered by pack.
    async fn frames(
        &self,
        roots: &BTreeSet<Hash>,
        ids: &HashSet<PackId>,
    ) -> Result<Vec<ChunkRequest>, StoreError> {
        let mut frames: BTreeMap<(PackId, u32), (Hash, Location)> = BTreeMap::new();
        for &root in roots {
            let (keys, manifest) = self.store.manifest(self.tenant, root).await?;
            let locations = self.store.locations(self.tenant, &keys, root).await?;
            let hashes = manifest.parts.iter().flat_map(|part| &part.hashes);
            for (&hash, &place) in hashes.zip(&locations.0) {
                if ids.contains(&place.pack) {
                    frames.insert((place.pack, place.offset), (hash, place));
                }
            }
        }
        let wanted = (0..).zip(frames.into_values());
        Ok(wanted
            .map(|(number, (hash, location))| ChunkRequest {
                number,
                hash,
                location,
            })
            .collect())
    }

    /// Copies live frames into new packs, and records their new locations in `moved`.
    async fn write_packs(
        &self,
        keys: &DataKeys,
        frames: &[ChunkRequest],
        moved: &mut Moved,
    ) -> Result<(), StoreError> {
        let begin = || PackWriter::new(keys, self.tenant.id()).map_err(full);
        let mut writer = begin()?;
        let (mut done, total) = (0, frames.len() as u64);
        for range in plan(frames) {
            done += range.frames.len() as u64;
            self.move_range(keys, &range, &mut writer, moved).await?;
            self.report("chunks moved", done, total);
            // Finish the pack if another range of this size may exceed the limit.
            if writer.len() + range_bytes(&range) > REPAIR_PACK_BYTES {
                let full = std::mem::replace(&mut writer, begin()?);
                moved.written += self.write_pack(keys, full).await?;
            }
        }
        moved.written += self.write_pack(keys, writer).await?;
        Ok(())
    }

    async fn write_pack(&self, keys: &DataKeys, writer: PackWriter) -> Result<u64, StoreError> {
        if writer.is_empty() {
            return Ok(0);
        }
        self.check().await?;
        self.store.write_pack(self.tenant, keys, writer).await
    }

    /// Copies the frames of a range to the pack that is being written.
    async fn move_range(
        &self,
        keys: &DataKeys,
        range: &PlannedRange,
        writer: &mut PackWriter,
        moved: &mut Moved,
    ) -> Result<(), StoreError> {
        let key = self.tenant.pack_key(keys.generation(), &range.pack);
        let read = self.store.backend.get_range(&key, range.start..range.end);
        let bytes = read.await?;
        for frame in &range.frames {
            let at = (u64::from(frame.location.offset) - range.start) as usize;
            let frame_bytes = bytes.get(at..at + frame.location.length as usize);
            let chunk = frame_bytes.and_then(|bytes| decode_frame(keys, &frame.hash, bytes).ok());
            let (Some(bytes), Some(chunk)) = (frame_bytes, chunk) else {
                // Leave a damaged chunk in place: `verify` reports it and `repair` repairs it.
                tracing::warn!(pack = %key, "found a damaged chunk; run `jiffy store verify`");
                moved.retained.insert(range.pack);
                continue;
            };
            let place = match moved.by_hash.get(&frame.hash) {
                Some(place) => *place,
                None => {
                    let entry = writer.push(frame.hash, bytes, chunk.len()).map_err(full)?;
                    Location {
                        pack: writer.id(),
                        offset: entry.offset,
                        length: entry.length,
                    }
                }
            };
            moved.by_hash.insert(frame.hash, place);
            let old = (frame.location.pack, frame.location.offset);
            moved.places.insert(old, place);
        }
        Ok(())
    }

    /// Fails if another process may hold the lock.
    async fn check(&self) -> Result<(), StoreError> {
        match &self.lock {
            Some(lock) => self.store.check_lock(lock).await,
            None => Ok(()),
        }
    }
}

fn range_bytes(range: &PlannedRange) -> usize {
    range.frames.len() * MAX_FRAME_BYTES
}
