//! Verification of a snapshot in a store, repair from a copy, and figures of a tenant.

use crate::data_keys::Hash;
use crate::fetch_plan::{PlannedRange, Wanted, plan};
use crate::locations::{Location, Locations};
use crate::pack::{MAX_FRAME_BYTES, PackWriter, decode_frame, encode_frame};
use crate::remote::RemoteSnapshot;
use crate::source::SnapshotSource;
use crate::tenant::{SharedStore, Tenant};
use crate::{CHUNK_BYTES, FormatError, StoreError};
use serde::Serialize;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

const REPAIR_PACK_BYTES: usize = 8 << 20;

/// Chunk that is not as it was written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct DamagedFrame {
    /// Part of the snapshot.
    pub part: String,
    /// Number of the chunk in it.
    pub chunk: u64,
    /// Key of its pack.
    pub pack: String,
    /// Defect.
    pub reason: String,
}

/// Size of what a tenant has in a store.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct StoreStats {
    /// Snapshots.
    pub snapshots: u64,
    /// Packs.
    pub packs: u64,
    /// Bytes of packs.
    pub pack_bytes: u64,
    /// Bytes of manifests and locations.
    pub manifest_bytes: u64,
    /// Leases of pushes.
    pub leases: u64,
    /// Objects that a collection may remove.
    pub condemned: u64,
}

impl SharedStore {
    /// Reads all chunks of a snapshot and names those that are not as they were written.
    pub async fn verify(&self, snapshot: &RemoteSnapshot) -> Result<Vec<DamagedFrame>, StoreError> {
        let damages = Mutex::new(Vec::new());
        for (number, part) in snapshot.manifest.parts.iter().enumerate() {
            let ranges = plan(&snapshot.wanted(number));
            self.backend
                .each(ranges, async |range: PlannedRange| {
                    let found = self.verify_range(snapshot, &part.name, range).await?;
                    damages
                        .lock()
                        .unwrap_or_else(|e| e.into_inner())
                        .extend(found);
                    Ok(())
                })
                .await?;
        }
        let mut damages = damages.into_inner().unwrap_or_else(|e| e.into_inner());
        damages.sort();
        Ok(damages)
    }

    async fn verify_range(
        &self,
        snapshot: &RemoteSnapshot,
        part: &str,
        range: PlannedRange,
    ) -> Result<Vec<DamagedFrame>, StoreError> {
        let key = snapshot
            .tenant
            .pack_key(snapshot.keys.generation(), &range.pack);
        let bytes = match self.backend.get_range(&key, range.start..range.end).await {
            Ok(bytes) => Ok(bytes),
            // Shorter than it was, or gone; one that does not answer is no damage.
            Err(e) => match self.backend.head(&key).await? {
                Some(found) if found.bytes >= range.end => return Err(e),
                Some(_) => Err("the pack is cut short"),
                None => Err("the pack is gone"),
            },
        };
        let mut damages = Vec::new();
        for frame in &range.frames {
            let at = (u64::from(frame.location.offset) - range.start) as usize;
            let checked = match &bytes {
                Ok(bytes) => bytes
                    .get(at..at + frame.location.length as usize)
                    .ok_or(FormatError::Damaged("the pack is cut short"))
                    .and_then(|bytes| decode_frame(&snapshot.keys, &frame.hash, bytes).map(drop)),
                Err(reason) => Err(FormatError::Damaged(reason)),
            };
            if let Err(reason) = checked {
                damages.extend(frame.numbers.iter().map(|&chunk| DamagedFrame {
                    part: part.to_owned(),
                    chunk,
                    pack: key.clone(),
                    reason: reason.to_string(),
                }));
            }
        }
        Ok(damages)
    }

    /// Writes the damaged chunks of a snapshot anew, from a copy of it. Returns the chunks that the
    /// copy does not have either.
    pub async fn repair(
        &self,
        snapshot: &RemoteSnapshot,
        damages: &[DamagedFrame],
        copy: &SnapshotSource,
    ) -> Result<Vec<DamagedFrame>, StoreError> {
        let tenant: &Arc<Tenant> = &snapshot.tenant;
        let lease = self.take_lease(tenant).await?;
        let repaired = self.repair_under(snapshot, damages, copy).await;
        self.end_lease(&lease).await;
        repaired
    }

    async fn repair_under(
        &self,
        snapshot: &RemoteSnapshot,
        damages: &[DamagedFrame],
        copy: &SnapshotSource,
    ) -> Result<Vec<DamagedFrame>, StoreError> {
        let (tenant, keys) = (&snapshot.tenant, &snapshot.keys);
        let full = |reason| StoreError::Source(format!("a pack of it cannot be written: {reason}"));
        let mut moved: HashMap<Hash, Location> = HashMap::new();
        let mut lost = Vec::new();
        let mut writer = PackWriter::new(keys, tenant.id()).map_err(full)?;
        let mut buffer = vec![0; CHUNK_BYTES as usize];
        for damage in damages {
            let Some(hash) = self.hash_of(snapshot, damage) else {
                continue;
            };
            if moved.contains_key(&hash) {
                continue;
            }
            let part = copy.parts.iter().find(|part| part.name == damage.part);
            let read = part.and_then(|part| {
                let bytes = part.file.metadata().ok()?.len();
                part.read(damage.chunk, bytes, &mut buffer).ok()
            });
            let Some(chunk) = read.filter(|chunk| keys.chunk_hash(chunk) == hash) else {
                lost.push(damage.clone());
                continue;
            };
            let frame = encode_frame(keys, &hash, chunk).map_err(full)?;
            let entry = writer.push(hash, &frame, chunk.len()).map_err(full)?;
            let location = Location {
                pack: writer.id(),
                offset: entry.offset,
                length: entry.length,
            };
            moved.insert(hash, location);
            if writer.len() + MAX_FRAME_BYTES > REPAIR_PACK_BYTES {
                let next = PackWriter::new(keys, tenant.id()).map_err(full)?;
                self.write_pack(snapshot, std::mem::replace(&mut writer, next))
                    .await?;
            }
        }
        if !writer.is_empty() {
            self.write_pack(snapshot, writer).await?;
        }
        if !moved.is_empty() {
            self.relocate(snapshot, &moved).await?;
        }
        Ok(lost)
    }

    fn hash_of(&self, snapshot: &RemoteSnapshot, damage: &DamagedFrame) -> Option<Hash> {
        let (number, _) = snapshot.part(&damage.part)?;
        let wanted: Vec<Wanted> = snapshot.wanted(number);
        let at = wanted
            .binary_search_by_key(&damage.chunk, |wanted| wanted.number)
            .ok()?;
        Some(wanted[at].hash)
    }

    async fn write_pack(
        &self,
        snapshot: &RemoteSnapshot,
        writer: PackWriter,
    ) -> Result<(), StoreError> {
        let key = snapshot
            .tenant
            .pack_key(snapshot.keys.generation(), &writer.id());
        let (object, _) = writer
            .finish(&snapshot.keys)
            .map_err(StoreError::damaged(&key))?;
        self.backend.create(&key, object).await.map(drop)
    }

    async fn relocate(
        &self,
        snapshot: &RemoteSnapshot,
        moved: &HashMap<Hash, Location>,
    ) -> Result<(), StoreError> {
        let hashes = snapshot.manifest.parts.iter().flat_map(|part| &part.hashes);
        let old = snapshot.locations.0.iter();
        let locations = hashes
            .zip(old)
            .map(|(hash, old)| *moved.get(hash).unwrap_or(old));
        let locations = Locations(locations.collect());
        let key = snapshot.tenant.locations_key(&snapshot.root);
        let encoded = locations.encode(&snapshot.keys, snapshot.tenant.id(), snapshot.root);
        self.backend
            .put(&key, encoded.map_err(StoreError::damaged(&key))?.into())
            .await
    }

    /// Sizes of what a tenant has, from listings.
    pub async fn stats(&self, tenant: &Tenant) -> Result<StoreStats, StoreError> {
        let list = async |kind: &str| self.backend.list(&tenant.key(kind)).await;
        let (manifests, locations, packs) = (
            list("manifests").await?,
            list("locations").await?,
            list("packs").await?,
        );
        let bytes =
            |objects: &[crate::Listed]| objects.iter().map(|object| object.bytes).sum::<u64>();
        let leases = list("leases").await?;
        let leases: HashSet<&str> = leases
            .iter()
            .map(|lease| lease.key.trim_end_matches(crate::lease::REUSED))
            .collect();
        Ok(StoreStats {
            snapshots: manifests.len() as u64,
            packs: packs.len() as u64,
            pack_bytes: bytes(&packs),
            manifest_bytes: bytes(&manifests) + bytes(&locations),
            leases: leases.len() as u64,
            condemned: self.condemned(tenant).await?.len() as u64,
        })
    }
}
