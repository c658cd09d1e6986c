//! [`StoreStats`]: storage usage of a tenant, from listings of its objects.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *tenant* is an owner of snapshots in the store,
//! usually an API key. The objects of a tenant are encrypted with its keys. A *pack* is an object
//! in the store with many compressed and encrypted chunks. A *lease* is an object that protects the
//! objects of a push in progress. The *manifest* of a snapshot lists its chunks.

use crate::shared_store::SharedStore;
use crate::shared_store::collection::OnProgress;
use crate::tenant::Tenant;
use crate::{Hash, Listed, StoreError};
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::HashSet;

/// Sizes of a tenant's objects, from listings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct StoreStats {
    /// Number of snapshots.
    pub snapshots: u64,
    /// Number of packs.
    pub packs: u64,
    /// Bytes of packs.
    pub pack_bytes: u64,
    /// Bytes of manifests and locations.
    pub manifest_bytes: u64,
    /// Number of leases of pushes.
    pub leases: u64,
    /// Number of objects that a collection may remove.
    pub condemned: u64,
}

/// Chunks of a tenant's snapshots, from their manifests.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ChunkUsage {
    /// Bytes of the files of all snapshots, including holes and inherited ranges.
    pub file_bytes: u64,
    /// Number of chunks of all snapshots, counting each occurrence.
    pub snapshot_chunks: u64,
    /// Bytes of these chunks.
    pub snapshot_bytes: u64,
    /// Number of distinct chunks that snapshots use.
    pub chunks: u64,
    /// Bytes of the distinct chunks before compression.
    pub chunk_bytes: u64,
    /// Bytes of the distinct chunks in packs.
    pub stored_bytes: u64,
    /// Number of unreadable snapshots.
    pub unreadable: u64,
}

impl ChunkUsage {
    /// Returns the ratio of snapshot bytes to bytes of distinct chunks.
    pub fn deduplication(&self) -> f64 {
        ratio(self.snapshot_bytes, self.chunk_bytes)
    }

    /// Returns the ratio of chunk bytes before compression to bytes in packs.
    pub fn compression(&self) -> f64 {
        ratio(self.chunk_bytes, self.stored_bytes)
    }

    /// Adds the figures of another tenant.
    pub fn add(&mut self, other: &Self) {
        for (sum, more) in [
            (&mut self.file_bytes, other.file_bytes),
            (&mut self.snapshot_chunks, other.snapshot_chunks),
            (&mut self.snapshot_bytes, other.snapshot_bytes),
            (&mut self.chunks, other.chunks),
            (&mut self.chunk_bytes, other.chunk_bytes),
            (&mut self.stored_bytes, other.stored_bytes),
            (&mut self.unreadable, other.unreadable),
        ] {
            *sum += more;
        }
    }
}

fn ratio(of: u64, to: u64) -> f64 {
    match to {
        0 => 1.0,
        to => of as f64 / to as f64,
    }
}

impl SharedStore {
    /// Returns the sizes of a tenant's objects, from listings.
    pub async fn stats(&self, tenant: &Tenant) -> Result<StoreStats, StoreError> {
        let list = async |kind: &str| self.backend.list(&tenant.key(kind)).await;
        let (manifests, locations, packs) = (
            list("manifests").await?,
            list("locations").await?,
            list("packs").await?,
        );
        let bytes = |objects: &[Listed]| objects.iter().map(|object| object.bytes).sum::<u64>();
        // Earlier versions of Jiffy wrote two objects per lease: count them once.
        let leases = list("leases").await?;
        let leases: HashSet<&str> = leases
            .iter()
            .map(|lease| {
                lease
                    .key
                    .trim_end_matches(crate::shared_store::lease::REUSED)
            })
            .collect();
        Ok(StoreStats {
            snapshots: manifests.len() as u64,
            packs: packs.len() as u64,
            pack_bytes: bytes(&packs),
            manifest_bytes: bytes(&manifests) + bytes(&locations),
            leases: leases.len() as u64,
            condemned: self.condemned(tenant).await?.all.len() as u64,
        })
    }

    /// Returns the chunk usage of a tenant's snapshots. Reads all manifests.
    pub async fn chunk_usage(
        &self,
        tenant: &Tenant,
        progress: OnProgress<'_>,
    ) -> Result<ChunkUsage, StoreError> {
        let roots = self.snapshots(tenant).await?;
        let total = roots.len() as u64;
        let counted = Mutex::new((ChunkUsage::default(), HashSet::new(), 0));
        let count = async |root: Hash| {
            let read = async {
                let (keys, manifest) = self.manifest(tenant, root).await?;
                let locations = self.locations(tenant, &keys, root).await?;
                Ok((manifest, locations))
            };
            let read = read.await;
            let mut counted = counted.lock();
            let (usage, seen, done) = &mut *counted;
            *done += 1;
            progress("snapshots", *done, total);
            let (manifest, locations) = match read {
                Ok(read) => read,
                // The snapshot was removed concurrently or is damaged, which `verify` reports.
                Err(StoreError::Missing { .. } | StoreError::Damaged { .. }) => {
                    usage.unreadable += 1;
                    return Ok(());
                }
                Err(e) => return Err(e),
            };
            usage.file_bytes += manifest.parts.iter().map(|part| part.bytes).sum::<u64>();
            let chunks = manifest.parts.iter().flat_map(|part| {
                let ranges = part.stored().map(|(number, _)| part.chunk_range(number));
                ranges.map(|range| range.end - range.start)
            });
            for (bytes, location) in chunks.zip(&locations.0) {
                usage.snapshot_chunks += 1;
                usage.snapshot_bytes += bytes;
                // A chunk is counted twice if two packs contain it.
                if seen.insert((location.pack, location.offset)) {
                    usage.chunks += 1;
                    usage.chunk_bytes += bytes;
                    usage.stored_bytes += u64::from(location.length);
                }
            }
            Ok(())
        };
        self.backend.each(roots, count).await?;
        let (usage, _, _) = counted.into_inner();
        Ok(usage)
    }
}
