//! Fill of a cached layer. Chunks are locked while they are fetched. Thus concurrent fills of a
//! layer, also in other processes, share the work. A fill of few chunks does not wait for a fill of
//! many.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *pack* is an object in the store with many
//! compressed and encrypted chunks.

use super::{PullReport, Selection, select};
use crate::cache::{CachedLayer, ChunkLocks, LayerCache};
use crate::fetch_plan::{ChunkRequest, PlannedRange, plan};
use crate::pack::decode_frame;
use crate::remote::RemoteSnapshot;
use crate::shared_store::SharedStore;
use crate::{CHUNK_BYTES, StoreError};
use bytes::Bytes;
use futures_util::StreamExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

/// Number of ranges that a fill reads at the same time.
const RANGES_AT_ONCE: usize = 8;
/// Maximum number of chunks of an urgent selection. A guest waits for such a selection.
const MAX_URGENT_CHUNKS: usize = 64;
/// Minimum number of bytes for which the cache frees space when an urgent fetch requires space.
/// Later urgent fetches use the rest.
const URGENT_PLACE_BYTES: u64 = 4 << 20;
/// Number of urgently fetched chunks after which the written chunks are persisted.
const URGENT_CHUNKS_PER_SYNC: u64 = 512;
/// Time that an urgent fill waits for a chunk fetched by another fill before fetching it as well.
const URGENT_PATIENCE: Duration = Duration::from_millis(20);
/// Like [`URGENT_PATIENCE`], for other fills.
const BULK_PATIENCE: Duration = Duration::from_secs(10);
/// Interval between checks for chunks that fills of other processes have written. Fills of this
/// process notify each other.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Part of a snapshot in the cache of a host, with the locations of its absent chunks in the store.
#[derive(Debug)]
pub struct CachedPart {
    /// Index of the part in the snapshot.
    number: usize,
    layer: Arc<CachedLayer>,
    cache: Arc<LayerCache>,
    source: RwLock<Arc<Source>>,
    /// Number of chunks fetched by [`SharedStore::fetch_chunk`].
    urgent_chunks: AtomicU64,
}

/// Snapshot from which a layer is filled.
#[derive(Debug)]
struct Source {
    snapshot: RemoteSnapshot,
    /// Stored chunks of the part, ascending by number.
    wanted: Vec<ChunkRequest>,
}

/// Result of fetching a range.
#[derive(Default)]
struct Arrived {
    /// Number of chunks that were written.
    chunks: u64,
    bytes: u64,
    /// Size of the range that was requested from the store. 0 without a request.
    range_bytes: u64,
    /// Chunks that other fills are fetching.
    busy: Vec<u64>,
}

/// Mode of a fill.
#[derive(Debug, Clone, Copy)]
struct Manner {
    /// True if a guest waits for the chunk.
    urgent: bool,
    /// True if chunks are fetched even if another fill is fetching them.
    anyway: bool,
}

/// Chunks that this fill has locked. Dropping this value unlocks them.
struct Claim(Arc<ChunkLocks>, Vec<u64>);

impl Drop for Claim {
    fn drop(&mut self) {
        for &number in &self.1 {
            self.0.unlock(number);
        }
    }
}

impl CachedPart {
    /// Returns the layer in the cache.
    pub fn layer(&self) -> &Arc<CachedLayer> {
        &self.layer
    }

    /// Returns true if chunk `number` can be read from the layer's file. Reads at most one byte of
    /// a file.
    pub fn has(&self, number: u64) -> bool {
        self.layer.has(number)
    }

    fn source(&self) -> Arc<Source> {
        self.source
            .read()
            .unwrap_or_else(|e| e.into_inner())
            .clone()
    }

    /// Makes room in the cache. For a guest that waits, reserves room for later chunks as well.
    /// `urgent` states that a guest waits.
    fn make_place(&self, bytes: u64, urgent: bool) -> Result<(), StoreError> {
        if !urgent {
            return self.cache.make_place(bytes).map(drop);
        }
        if self.layer.take_reserved(bytes) {
            return Ok(());
        }
        let place = URGENT_PLACE_BYTES.max(bytes);
        match self.cache.make_place(place) {
            // Exceed the maximum size rather than fail a running guest.
            Err(StoreError::CacheFull { .. }) => {}
            other => drop(other?),
        }
        self.layer.add_reserved(place - bytes);
        Ok(())
    }
}

impl SharedStore {
    /// Opens part `number` of a snapshot in `cache`. The layer is not evicted while the part is
    /// open.
    pub fn cached_part(
        &self,
        snapshot: &RemoteSnapshot,
        number: usize,
        cache: &Arc<LayerCache>,
    ) -> Result<CachedPart, StoreError> {
        let root = snapshot.part_root(number)?;
        let layer = cache.layer(&root, &snapshot.manifest.parts[number])?;
        Ok(CachedPart {
            number,
            layer: Arc::new(layer),
            cache: cache.clone(),
            source: RwLock::new(Arc::new(Source {
                wanted: snapshot.wanted(number),
                snapshot: snapshot.clone(),
            })),
            urgent_chunks: AtomicU64::new(0),
        })
    }

    /// Fetches chunk `number` if it is absent, ahead of bulk fetches. Returns false if the part
    /// does not store this chunk, which is then zero or inherited.
    pub async fn fetch_chunk(&self, part: &CachedPart, number: u64) -> Result<bool, StoreError> {
        if part.has(number) {
            return Ok(true);
        }
        let position = part
            .source()
            .wanted
            .binary_search_by_key(&number, |wanted| wanted.number);
        if position.is_err() {
            return Ok(false);
        }
        self.fill_numbers(part, vec![number], true, &mut PullReport::default())
            .await?;
        let fetched = part.urgent_chunks.fetch_add(1, Ordering::Relaxed) + 1;
        if fetched.is_multiple_of(URGENT_CHUNKS_PER_SYNC) {
            part.layer.persist_in_background();
        }
        Ok(true)
    }

    /// Fetches the absent chunks of `selection`. A selection of few chunks is fetched ahead of bulk
    /// fetches.
    pub async fn fill(
        &self,
        part: &CachedPart,
        selection: Selection<'_>,
    ) -> Result<PullReport, StoreError> {
        let start = Instant::now();
        let mut report = PullReport::default();
        part.layer.refresh()?;
        let source = part.source();
        let wanted = select(&source.snapshot, part.number, &source.wanted, selection);
        report.chunks = wanted.len() as u64;
        let missing = wanted.iter().map(|wanted| wanted.number);
        let missing: Vec<u64> = missing
            .filter(|&number| !part.layer.knows(number))
            .collect();
        if !missing.is_empty() {
            let urgent =
                matches!(selection, Selection::Chunks(chunks) if chunks.len() <= MAX_URGENT_CHUNKS);
            let filled = self.fill_numbers(part, missing, urgent, &mut report).await;
            part.layer.persist_in_background();
            filled?;
        }
        report.seconds = start.elapsed().as_secs_f64();
        Ok(report)
    }

    /// Fetches chunks. Retries once if the chunks have new locations, and once after evicting
    /// unused layers if the file system is full. `urgent` states that a guest waits.
    async fn fill_numbers(
        &self,
        part: &CachedPart,
        mut missing: Vec<u64>,
        urgent: bool,
        report: &mut PullReport,
    ) -> Result<(), StoreError> {
        let (mut moved, mut freed) = (false, false);
        let bytes = |missing: &[u64]| missing.len() as u64 * u64::from(CHUNK_BYTES);
        part.make_place(bytes(&missing), urgent)?;
        loop {
            match self.share(part, missing.clone(), urgent, report).await {
                // The chunks were moved, or a repair replaced a damaged pack.
                Err(failed @ (StoreError::Missing { .. } | StoreError::Damaged { .. }))
                    if !moved =>
                {
                    moved = true;
                    self.reload_locations(part, failed).await?;
                }
                Err(full @ StoreError::DiskFull { .. }) if !freed => {
                    freed = true;
                    if part.cache.evict_unused(bytes(&missing))? == 0 {
                        return Err(full);
                    }
                }
                other => return other,
            }
            // Retry only the chunks that are still absent.
            missing.retain(|&number| !part.layer.knows(number));
        }
    }

    /// Reads the locations of a snapshot again after a read from a pack `failed`. Returns
    /// `failed` if the locations have not changed.
    async fn reload_locations(
        &self,
        part: &CachedPart,
        failed: StoreError,
    ) -> Result<(), StoreError> {
        let before = &part.source().snapshot;
        let now = self.open(&before.tenant, before.root).await?;
        if now.locations == before.locations {
            return Err(failed);
        }
        let now = Source {
            wanted: now.wanted(part.number),
            snapshot: now,
        };
        *part.source.write().unwrap_or_else(|e| e.into_inner()) = Arc::new(now);
        Ok(())
    }

    /// Fetches the chunks of `missing` that no other fill is fetching, and waits for the others.
    /// `urgent` states that a guest waits.
    async fn share(
        &self,
        part: &CachedPart,
        mut missing: Vec<u64>,
        urgent: bool,
        report: &mut PullReport,
    ) -> Result<(), StoreError> {
        let locks = Arc::new(part.layer.locks()?);
        let patience = if urgent {
            URGENT_PATIENCE
        } else {
            BULK_PATIENCE
        };
        let mut since = tokio::time::Instant::now();
        loop {
            let manner = Manner {
                urgent,
                anyway: since.elapsed() > patience,
            };
            // Register before checking the chunks, so that no notification is lost.
            let arrived = part.layer.arrived().notified();
            let before = missing.len();
            let mut busy = self
                .fetch_all(part, &missing, &locks, manner, report)
                .await?;
            busy.retain(|&number| !part.has(number));
            if busy.is_empty() {
                return Ok(());
            }
            // Other fills make progress: restart the timeout.
            if busy.len() < before {
                since = tokio::time::Instant::now();
            }
            missing = busy;
            let _ = tokio::time::timeout(POLL_INTERVAL, arrived).await;
        }
    }

    /// Fetches the chunks that no other fill is fetching. Returns the other chunks.
    async fn fetch_all(
        &self,
        part: &CachedPart,
        missing: &[u64],
        locks: &Arc<ChunkLocks>,
        manner: Manner,
        report: &mut PullReport,
    ) -> Result<Vec<u64>, StoreError> {
        let source = part.source();
        let of = |number: &u64| {
            let position = source
                .wanted
                .binary_search_by_key(number, |wanted| wanted.number);
            position.ok().map(|at| source.wanted[at])
        };
        let ranges = plan(&missing.iter().filter_map(of).collect::<Vec<_>>());
        // After a failure, start no further fetches but wait for those in flight.
        let failed = AtomicBool::new(false);
        let started = ranges
            .into_iter()
            .take_while(|_| !failed.load(Ordering::Relaxed));
        let fetched = futures_util::stream::iter(started)
            .map(|range| self.fetch(&source.snapshot, range, &part.layer, locks, manner))
            .buffer_unordered(RANGES_AT_ONCE);
        let mut fetched = std::pin::pin!(fetched);
        let mut busy = Vec::new();
        let mut failure = None;
        while let Some(arrived) = fetched.next().await {
            match arrived {
                Ok(arrived) => {
                    report.fetched += arrived.chunks;
                    report.fetched_bytes += arrived.bytes;
                    report.ranges += u64::from(arrived.range_bytes > 0);
                    report.range_bytes += arrived.range_bytes;
                    busy.extend(arrived.busy);
                }
                Err(e) => {
                    failed.store(true, Ordering::Relaxed);
                    failure.get_or_insert(e);
                }
            }
        }
        failure.map_or(Ok(busy), Err)
    }

    /// Fetches one range of a pack, and writes its chunks to the layer. Chunks that another fill
    /// has locked are left out.
    async fn fetch(
        &self,
        snapshot: &RemoteSnapshot,
        range: PlannedRange,
        layer: &Arc<CachedLayer>,
        locks: &Arc<ChunkLocks>,
        manner: Manner,
    ) -> Result<Arrived, StoreError> {
        let key = snapshot
            .tenant
            .pack_key(snapshot.keys.generation(), &range.pack);
        let (range, busy, claim) = claim(range, layer, locks, manner)?;
        let mut arrived = Arrived {
            busy,
            ..Arrived::default()
        };
        let Some(range) = range else {
            return Ok(arrived);
        };
        arrived.range_bytes = range.end - range.start;
        let mut attempts = 0;
        loop {
            attempts += 1;
            let bytes = if manner.urgent {
                self.backend
                    .get_urgent(&key, range.start..range.end)
                    .await?
            } else {
                self.backend.get_range(&key, range.start..range.end).await?
            };
            let written = tokio::task::spawn_blocking({
                let (keys, range) = (snapshot.keys.clone(), range.clone());
                let (layer, key) = (layer.clone(), key.clone());
                move || write_range(&keys, &range, &bytes, &layer, &key)
            });
            match written.await.map_err(|e| StoreError::Task(e.to_string()))? {
                // Fetch the range once more: it may have been corrupted in transit.
                Err(StoreError::Damaged { .. }) if attempts == 1 => {}
                other => {
                    drop(claim);
                    (arrived.chunks, arrived.bytes) = other?;
                    return Ok(arrived);
                }
            }
        }
    }
}

/// Locks the chunks of a range. Returns the range of the chunks to fetch, the chunks that other
/// fills are fetching, and the locks.
fn claim(
    mut range: PlannedRange,
    layer: &CachedLayer,
    locks: &Arc<ChunkLocks>,
    manner: Manner,
) -> Result<(Option<PlannedRange>, Vec<u64>, Claim), StoreError> {
    let mut busy = Vec::new();
    let mut claim = Claim(locks.clone(), Vec::new());
    let mut failed = Ok(());
    for frame in &mut range.frames {
        frame.numbers.retain(|&number| {
            if layer.knows(number) {
                return false;
            }
            match locks.try_lock(number) {
                Ok(true) => claim.1.push(number),
                Ok(false) if manner.anyway => {}
                Ok(false) => {
                    busy.push(number);
                    return false;
                }
                Err(e) => failed = Err(StoreError::io(layer.path())(e)),
            }
            // Another fill may have written the chunk just before it was locked.
            !layer.has(number)
        });
    }
    failed?;
    range.frames.retain(|frame| !frame.numbers.is_empty());
    let starts = range.frames.iter().map(|frame| frame.location.offset);
    let ends = range
        .frames
        .iter()
        .map(|frame| u64::from(frame.location.offset) + u64::from(frame.location.length));
    let (Some(start), Some(end)) = (starts.min(), ends.max()) else {
        return Ok((None, busy, claim));
    };
    (range.start, range.end) = (start.into(), end);
    Ok((Some(range), busy, claim))
}

/// Verifies the frames of a range and writes their chunks. Returns the number of chunks and bytes.
fn write_range(
    keys: &crate::DataKeys,
    range: &PlannedRange,
    bytes: &Bytes,
    layer: &CachedLayer,
    key: &str,
) -> Result<(u64, u64), StoreError> {
    let mut written = Vec::new();
    let mut length = 0;
    let mut failed = Ok(());
    for frame in &range.frames {
        let at = (u64::from(frame.location.offset) - range.start) as usize;
        let bytes = bytes
            .get(at..at + frame.location.length as usize)
            .unwrap_or_default();
        let decoded = decode_frame(keys, &frame.hash, bytes);
        let chunk = match decoded {
            Ok(chunk) => chunk,
            // Write the valid chunks of the range before reporting the error.
            Err(reason) => {
                let object = format!("{key}, chunk {}", frame.hash);
                failed = Err(StoreError::damaged(&object)(reason));
                continue;
            }
        };
        for &number in &frame.numbers {
            if let Err(e) = layer.write(number, &chunk) {
                failed = Err(e);
                break;
            }
            written.push(number);
            length += chunk.len() as u64;
        }
    }
    layer.mark(&written)?;
    failed.map(|()| (written.len() as u64, length))
}
