//! Writing and reading of resume bundles ([`crate::resume_bundle`]).
//!
//! A *chunk* is 64 KiB of memory or of a disk. The *root* of a snapshot is the hash that identifies
//! it in the store. A *pack* is an object in the store with many compressed and encrypted chunks.
//! The *shared tenant* owns the stock templates, which all tenants may read. A *frame* is a
//! compressed and encrypted chunk in a pack.
//!
//! A bundle is a cache: it is written after the manifest, and a missing, old or damaged bundle is
//! ignored. Its locations may be older than the locations of the snapshot. A fetch that does not
//! find a pack reads the current locations. A collection removes a bundle together with its
//! snapshot.

use crate::cache::LayerCache;
use crate::data_keys::Hash;
use crate::fetch_plan::{ChunkRequest, plan};
use crate::layer::{LayerKind, RunKind};
use crate::locations::MAX_LOCATIONS_BYTES;
use crate::manifest::{MAX_MANIFEST_BYTES, Scope};
use crate::pack::decode_frame;
use crate::remote::RemoteSnapshot;
use crate::resume_bundle::{
    BundledChunk, BundledSnapshot, MAX_BUNDLE_BYTES, MAX_BUNDLED_BYTES, MAX_BUNDLED_CHUNKS,
    MAX_BUNDLED_DOCUMENTS, ResumeBundle,
};
use crate::shared_store::SharedStore;
use crate::shared_store::snapshots::decode_snapshot;
use crate::tenant::Tenant;
use crate::{CHUNK_BYTES, FormatError, StoreError};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// Maximum number of ancestors that are read concurrently.
const SNAPSHOTS_AT_ONCE: usize = 8;

/// Chunks of a snapshot that were verified and written to the cache: index of the part, and number
/// in the part.
pub type WrittenChunks = HashSet<(usize, u64)>;

/// Chunk to put into a bundle.
struct Chosen {
    snapshot: usize,
    part: usize,
    request: ChunkRequest,
}

impl SharedStore {
    /// Writes the bundle of the pushed snapshot `root`. Returns its size in bytes; `None` if the
    /// manifests are too large for a bundle.
    pub async fn write_resume_bundle(
        &self,
        tenant: &Arc<Tenant>,
        root: Hash,
    ) -> Result<Option<u64>, StoreError> {
        let (newest, first) = self.bundled_snapshot(tenant, root).await?;
        let shared = if has_shared(&newest) {
            Some(self.shared_tenant().await?)
        } else {
            None
        };
        let lineage = newest.manifest.lineage.clone();
        let reading = lineage.iter().map(|name| {
            let of = tenant_of(tenant, shared.as_ref(), name.scope);
            async move { self.bundled_snapshot(of?, name.root).await }
        });
        let reading: Vec<_> = reading.collect();
        let reading = futures_util::stream::iter(reading).buffered(SNAPSHOTS_AT_ONCE);
        let ancestors: Vec<(RemoteSnapshot, BundledSnapshot)> = reading.try_collect().await?;
        let all = std::iter::once((newest, first)).chain(ancestors);
        let (snapshots, objects): (Vec<RemoteSnapshot>, Vec<BundledSnapshot>) = all.unzip();
        let documents = objects.iter();
        let documents = documents.map(|object| object.manifest.len() + object.locations.len());
        if documents.sum::<usize>() > MAX_BUNDLED_DOCUMENTS {
            return Ok(None);
        }
        let chosen = choose(&snapshots);
        let bundle = ResumeBundle {
            chunks: self.bundled_chunks(&snapshots, &chosen).await?,
            snapshots: objects,
        };
        let keys = tenant.current()?;
        let key = tenant.bundle_key(&root);
        let object = bundle.encode(keys, tenant.id(), root);
        let object = object.map_err(StoreError::damaged(&key))?;
        let bytes = object.len() as u64;
        self.backend.put(&key, object.into()).await?;
        Ok(Some(bytes))
    }

    /// Removes the bundle of the snapshot `root`, which is no longer resumed.
    pub async fn remove_resume_bundle(
        &self,
        tenant: &Tenant,
        root: Hash,
    ) -> Result<(), StoreError> {
        self.backend.delete(&tenant.bundle_key(&root)).await
    }

    /// Reads the objects of a snapshot for its bundle.
    async fn bundled_snapshot(
        &self,
        tenant: &Arc<Tenant>,
        root: Hash,
    ) -> Result<(RemoteSnapshot, BundledSnapshot), StoreError> {
        let (manifest, locations) = (tenant.manifest_key(&root), tenant.locations_key(&root));
        let (manifest, locations) = tokio::try_join!(
            self.backend.get(&manifest, MAX_MANIFEST_BYTES),
            self.backend.get(&locations, MAX_LOCATIONS_BYTES),
        )?;
        let objects = BundledSnapshot {
            manifest,
            locations,
        };
        Ok((remote(tenant, root, &objects)?, objects))
    }

    /// Reads the frames of the chosen chunks, in their order.
    async fn bundled_chunks(
        &self,
        snapshots: &[RemoteSnapshot],
        chosen: &[Chosen],
    ) -> Result<Vec<BundledChunk>, StoreError> {
        let mut by_snapshot: BTreeMap<usize, Vec<ChunkRequest>> = BTreeMap::new();
        // Number the requests by their index in `chosen`, so that the frames can be stored in its
        // order.
        for (number, chosen) in (0..).zip(chosen) {
            by_snapshot
                .entry(chosen.snapshot)
                .or_default()
                .push(ChunkRequest {
                    number,
                    ..chosen.request
                });
        }
        let ranges = by_snapshot.iter().flat_map(|(&number, requests)| {
            let ranges = plan(requests).into_iter();
            ranges.filter_map(move |range| Some((snapshots.get(number)?, range)))
        });
        let frames = Mutex::new(vec![Bytes::new(); chosen.len()]);
        let read = async |(snapshot, range): (&RemoteSnapshot, crate::fetch_plan::PlannedRange)| {
            let generation = snapshot.keys.generation();
            let key = snapshot.tenant.pack_key(generation, &range.pack);
            let bytes = self.backend.get_range(&key, range.start..range.end).await?;
            let mut frames = frames.lock();
            for frame in &range.frames {
                let at = (u64::from(frame.location.offset) - range.start) as usize;
                let frame_bytes = bytes.slice(at..at + frame.location.length as usize);
                for &number in &frame.numbers {
                    if let Some(frame) = frames.get_mut(number as usize) {
                        *frame = frame_bytes.clone();
                    }
                }
            }
            Ok(())
        };
        self.backend.each(ranges, read).await?;
        let chunks = chosen.iter().zip(frames.into_inner());
        Ok(chunks
            .map(|(chosen, frame)| BundledChunk {
                snapshot: chosen.snapshot as u32,
                part: chosen.part as u32,
                number: chosen.request.number as u32,
                frame,
            })
            .collect())
    }

    /// Reads the bundle of the snapshot `root`, and writes its chunks to `cache`. `shared` is the
    /// shared tenant, which a bundle with shared ancestors requires. Returns the snapshot and its
    /// ancestors, nearest first, each with the chunks that were verified and written. `None` if the
    /// store has no sound bundle.
    pub async fn resume_bundle(
        &self,
        tenant: &Arc<Tenant>,
        shared: Option<&Arc<Tenant>>,
        root: Hash,
        cache: &Arc<LayerCache>,
    ) -> Result<Option<Vec<(RemoteSnapshot, WrittenChunks)>>, StoreError> {
        let key = tenant.bundle_key(&root);
        let object = match self.backend.get(&key, MAX_BUNDLE_BYTES).await {
            Err(StoreError::Missing { .. }) => return Ok(None),
            Err(e @ StoreError::TooLarge { .. }) => {
                tracing::warn!(error = %e, "ignoring a resume bundle");
                return Ok(None);
            }
            other => other?,
        };
        let (tenant, shared) = (tenant.clone(), shared.cloned());
        let opening = tokio::task::spawn_blocking(move || {
            open(&tenant, shared.as_ref(), root, &object).map_err(StoreError::damaged(&key))
        });
        let opened = opening.await;
        let (bundle, snapshots) = match opened.map_err(|e| StoreError::Task(e.to_string()))? {
            Ok(opened) => opened,
            Err(e) => {
                tracing::warn!(error = %e, "ignoring a resume bundle");
                return Ok(None);
            }
        };
        let seeded = self.seed(&bundle, &snapshots, cache).await;
        let mut written = seeded.unwrap_or_else(|e| {
            // The chunks are fetched from packs instead.
            tracing::warn!(error = %e, "cannot write the chunks of a resume bundle to the cache");
            HashMap::new()
        });
        let snapshots = snapshots.into_iter().enumerate();
        Ok(Some(
            snapshots
                .map(|(at, snapshot)| (snapshot, written.remove(&at).unwrap_or_default()))
                .collect(),
        ))
    }

    /// Writes the chunks of a bundle to the cache. Returns the written chunks by the index of their
    /// snapshot.
    async fn seed(
        &self,
        bundle: &ResumeBundle,
        snapshots: &[RemoteSnapshot],
        cache: &Arc<LayerCache>,
    ) -> Result<HashMap<usize, WrittenChunks>, StoreError> {
        cache.make_place(bundle.chunks.len() as u64 * u64::from(CHUNK_BYTES))?;
        let mut by_part: BTreeMap<(u32, u32), Vec<BundledChunk>> = BTreeMap::new();
        for chunk in &bundle.chunks {
            let of = by_part.entry((chunk.snapshot, chunk.part)).or_default();
            of.push(chunk.clone());
        }
        let mut writing = Vec::new();
        for ((number, part), chunks) in by_part {
            let snapshot_number = number as usize;
            let Some(snapshot) = snapshots.get(snapshot_number) else {
                continue;
            };
            let layer = self.cached_part(snapshot, part as usize, cache)?;
            let layer = layer.layer().clone();
            let (wanted, keys) = (snapshot.wanted(part as usize), snapshot.keys.clone());
            writing.push(tokio::task::spawn_blocking(move || {
                let mut written = Vec::new();
                for chunk in chunks {
                    let number = u64::from(chunk.number);
                    let found = wanted.binary_search_by_key(&number, |wanted| wanted.number);
                    let hash = found
                        .ok()
                        .and_then(|at| wanted.get(at))
                        .map(|found| found.hash);
                    let chunk = hash.and_then(|hash| decode_frame(&keys, &hash, &chunk.frame).ok());
                    // Skip damaged chunks, which are fetched from packs, and chunks that the cache
                    // already has.
                    let Some(chunk) = chunk.filter(|_| !layer.knows(number)) else {
                        continue;
                    };
                    layer.write(number, &chunk)?;
                    written.push(number);
                }
                layer.mark(&written)?;
                layer.persist_in_background();
                let written = written.into_iter().map(|number| (part as usize, number));
                Ok::<_, StoreError>((snapshot_number, written.collect::<Vec<_>>()))
            }));
        }
        let mut all: HashMap<usize, WrittenChunks> = HashMap::new();
        for written in futures_util::future::join_all(writing).await {
            let (snapshot, chunks) = written.map_err(|e| StoreError::Task(e.to_string()))??;
            all.entry(snapshot).or_default().extend(chunks);
        }
        Ok(all)
    }
}

fn has_shared(snapshot: &RemoteSnapshot) -> bool {
    let mut lineage = snapshot.manifest.lineage.iter();
    lineage.any(|name| name.scope == Scope::Shared)
}

/// Returns the tenant whose keys encrypt an ancestor with this scope.
fn tenant_of<'a>(
    tenant: &'a Arc<Tenant>,
    shared: Option<&'a Arc<Tenant>>,
    scope: Scope,
) -> Result<&'a Arc<Tenant>, StoreError> {
    match scope {
        Scope::Tenant => Ok(tenant),
        Scope::Shared => {
            shared.ok_or_else(|| StoreError::Source("it has no shared ancestor".to_owned()))
        }
    }
}

/// Decodes and verifies the objects of a snapshot.
fn remote(
    tenant: &Arc<Tenant>,
    root: Hash,
    objects: &BundledSnapshot,
) -> Result<RemoteSnapshot, StoreError> {
    decode_snapshot(tenant, root, &objects.manifest, &objects.locations)
}

/// Decrypts the bundle of the snapshot `root`, and verifies its manifests and locations.
fn open(
    tenant: &Arc<Tenant>,
    shared: Option<&Arc<Tenant>>,
    root: Hash,
    object: &[u8],
) -> Result<(ResumeBundle, Vec<RemoteSnapshot>), FormatError> {
    let unreadable = |_| FormatError::Damaged("one of its snapshots is unreadable");
    let generation = ResumeBundle::generation(object, tenant.id())?;
    let keys = tenant.generation(generation).map_err(unreadable)?;
    let bundle = ResumeBundle::decode(object, keys, tenant.id(), root)?;
    let Some((newest, ancestors)) = bundle.snapshots.split_first() else {
        return Err(FormatError::Damaged("it has no snapshot"));
    };
    let newest = remote(tenant, root, newest).map_err(unreadable)?;
    let lineage = newest.manifest.lineage.clone();
    if lineage.len() != ancestors.len() {
        return Err(FormatError::Damaged("it lacks an ancestor"));
    }
    let mut snapshots = vec![newest];
    for (name, objects) in lineage.iter().zip(ancestors) {
        let of = tenant_of(tenant, shared, name.scope).map_err(unreadable)?;
        snapshots.push(remote(of, name.root, objects).map_err(unreadable)?);
    }
    Ok((bundle, snapshots))
}

/// Chooses chunks in the order of use: records and device states, memory of the working set, disks.
fn choose(snapshots: &[RemoteSnapshot]) -> Vec<Chosen> {
    let mut chosen = Vec::new();
    let whole = |chosen: &mut Vec<Chosen>, of: fn(LayerKind) -> bool| {
        for (snapshot, remote) in snapshots.iter().enumerate() {
            let parts = remote.manifest.parts.iter().enumerate();
            for (part, _) in parts.filter(|(_, part)| of(part.kind)) {
                let requests = remote.wanted(part).into_iter();
                chosen.extend(requests.map(|request| Chosen {
                    snapshot,
                    part,
                    request,
                }));
            }
        }
    };
    whole(&mut chosen, |kind| {
        matches!(kind, LayerKind::DeviceState | LayerKind::File)
    });
    chosen.extend(working_set(snapshots));
    whole(&mut chosen, |kind| matches!(kind, LayerKind::Disk(_)));
    let mut bytes = 0;
    chosen.retain(|chosen| {
        let length = chosen.request.location.length as usize;
        let fits = bytes + length <= MAX_BUNDLED_BYTES;
        bytes += if fits { length } else { 0 };
        fits
    });
    chosen.truncate(MAX_BUNDLED_CHUNKS);
    chosen
}

/// Returns the chunks of the newest snapshot's working set, each from the nearest layer that
/// determines its content.
fn working_set(snapshots: &[RemoteSnapshot]) -> Vec<Chosen> {
    let mut layers = Vec::new();
    for (snapshot, remote) in snapshots.iter().enumerate() {
        let mut parts = remote.manifest.parts.iter().enumerate();
        let memory = parts.find(|(_, part)| part.kind == LayerKind::Memory);
        if let Some((part, layer)) = memory {
            let zero: Vec<Range<u64>> = layer.ranges(RunKind::Zero).collect();
            layers.push((snapshot, part, remote.wanted(part), zero));
        }
    }
    let touched = snapshots.first().map(|newest| &newest.manifest.working_set);
    let mut seen = HashSet::new();
    let touched = touched.into_iter().flatten().map(|&chunk| u64::from(chunk));
    let find = |number: u64| {
        for (snapshot, part, wanted, zero) in &layers {
            let position = wanted.binary_search_by_key(&number, |wanted| wanted.number);
            if let Ok(at) = position {
                return Some(Chosen {
                    snapshot: *snapshot,
                    part: *part,
                    request: *wanted.get(at)?,
                });
            }
            let after = zero.partition_point(|run| run.end <= number);
            // This layer sets the chunk to zero and hides the chunk of farther layers.
            if zero.get(after).is_some_and(|run| run.contains(&number)) {
                return None;
            }
        }
        None
    };
    touched
        .filter(|number| seen.insert(*number))
        .filter_map(find)
        .collect()
}
