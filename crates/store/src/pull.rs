//! Pull: chunks of a snapshot in a store into the cache of a host.

use crate::cache::{CachedLayer, LayerCache};
use crate::fetch_plan::{PlannedRange, Wanted, plan};
use crate::layer::{Layer, LayerKind};
use crate::pack::decode_frame;
use crate::remote::RemoteSnapshot;
use crate::tenant::SharedStore;
use crate::{CHUNK_BYTES, FormatError, Hash, StoreError};
use bytes::Bytes;
use futures_util::StreamExt;
use serde::Serialize;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

const RANGES_AT_ONCE: usize = 8;
/// Chunks after which the presence of those before is written down: 32 MiB.
const CHUNKS_PER_SYNC: usize = 512;

/// Chunks to pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selection<'a> {
    /// Those of the working set.
    WorkingSet,
    /// All of them, those of the working set first.
    All,
    /// These, in this order.
    Chunks(&'a [u64]),
}

/// Result of a pull.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PullReport {
    /// Chunks that were selected.
    pub chunks: u64,
    /// Chunks that were fetched.
    pub fetched: u64,
    /// Their bytes before compression.
    pub fetched_bytes: u64,
    /// Ranges that were read.
    pub ranges: u64,
    /// Bytes of these ranges.
    pub range_bytes: u64,
    /// Time it took.
    pub seconds: f64,
}

impl RemoteSnapshot {
    /// Part `name`.
    pub fn part(&self, name: &str) -> Option<(usize, &Layer)> {
        let mut parts = self.manifest.parts.iter().enumerate();
        parts.find(|(_, part)| part.name == name)
    }

    /// Root of part `number`, which names it in the cache.
    pub fn part_root(&self, number: usize) -> Result<Hash, StoreError> {
        let missing = FormatError::Damaged("it has no such part");
        let part = self.manifest.parts.get(number).ok_or(missing);
        let root = part.and_then(|part| part.root(&self.keys));
        root.map_err(StoreError::damaged(&self.tenant.manifest_key(&self.root)))
    }

    /// Stored chunks of part `number` with their locations.
    pub(crate) fn wanted(&self, number: usize) -> Vec<Wanted> {
        let before: usize = self
            .manifest
            .parts
            .iter()
            .take(number)
            .map(|part| part.hashes.len())
            .sum();
        let stored = self
            .manifest
            .parts
            .get(number)
            .into_iter()
            .flat_map(Layer::stored);
        let located = stored.zip(self.locations.0.iter().skip(before));
        located
            .map(|((number, hash), &location)| Wanted {
                number,
                hash,
                location,
            })
            .collect()
    }

    /// Wanted chunks of part `number` in the order of `selection`.
    fn select(&self, number: usize, selection: Selection<'_>) -> Vec<Wanted> {
        let all = self.wanted(number);
        let find = |chunk: u64| {
            all.binary_search_by_key(&chunk, |wanted| wanted.number)
                .ok()
                .map(|at| all[at])
        };
        let is_memory = self
            .manifest
            .parts
            .get(number)
            .is_some_and(|part| part.kind == LayerKind::Memory);
        let touched = self
            .manifest
            .working_set
            .iter()
            .map(|&chunk| u64::from(chunk));
        match selection {
            Selection::Chunks(chunks) => chunks.iter().filter_map(|&chunk| find(chunk)).collect(),
            Selection::WorkingSet if is_memory => touched.filter_map(find).collect(),
            Selection::All if is_memory => {
                let mut seen = HashSet::new();
                let first: Vec<Wanted> = touched.filter_map(find).collect();
                first
                    .into_iter()
                    .chain(all)
                    .filter(|wanted| seen.insert(wanted.number))
                    .collect()
            }
            // Other parts are read as a whole.
            Selection::WorkingSet | Selection::All => all,
        }
    }
}

impl SharedStore {
    /// Pulls chunks of part `number` of a snapshot into `cache`. The layer stays in the cache while
    /// what is returned exists.
    pub async fn pull(
        &self,
        snapshot: &RemoteSnapshot,
        number: usize,
        selection: Selection<'_>,
        cache: &Arc<LayerCache>,
    ) -> Result<(Arc<CachedLayer>, PullReport), StoreError> {
        let start = Instant::now();
        let root = snapshot.part_root(number)?;
        let layer = &snapshot.manifest.parts[number];
        let cached = Arc::new(cache.layer(&root, layer)?);
        let mut report = PullReport::default();
        let wanted = snapshot.select(number, selection);
        report.chunks = wanted.len() as u64;
        if wanted.iter().any(|chunk| !cached.has(chunk.number)) {
            let locked = {
                let cache = cache.clone();
                tokio::task::spawn_blocking(move || cache.lock_fill(&root))
            };
            let _fill = locked
                .await
                .map_err(|e| StoreError::Source(e.to_string()))??;
            cached.refresh()?;
            let missing: Vec<Wanted> = wanted
                .into_iter()
                .filter(|chunk| !cached.has(chunk.number))
                .collect();
            cache.make_place(missing.len() as u64 * u64::from(CHUNK_BYTES))?;
            self.fill(snapshot, number, &missing, &cached, &mut report)
                .await?;
        }
        report.seconds = start.elapsed().as_secs_f64();
        Ok((cached, report))
    }

    /// Fetches chunks; if a pack went away, once more from where they are now.
    async fn fill(
        &self,
        snapshot: &RemoteSnapshot,
        number: usize,
        missing: &[Wanted],
        cached: &Arc<CachedLayer>,
        report: &mut PullReport,
    ) -> Result<(), StoreError> {
        match self.fill_from(snapshot, missing, cached, report).await {
            Err(StoreError::Missing { object }) => {
                let now = self.open(&snapshot.tenant, snapshot.root).await?;
                if now.locations == snapshot.locations {
                    return Err(StoreError::Missing { object });
                }
                let moved = now.wanted(number).into_iter();
                let rest: HashSet<u64> = missing
                    .iter()
                    .map(|chunk| chunk.number)
                    .filter(|&chunk| !cached.has(chunk))
                    .collect();
                let rest: Vec<Wanted> =
                    moved.filter(|chunk| rest.contains(&chunk.number)).collect();
                self.fill_from(&now, &rest, cached, report).await
            }
            other => other,
        }
    }

    async fn fill_from(
        &self,
        snapshot: &RemoteSnapshot,
        missing: &[Wanted],
        cached: &Arc<CachedLayer>,
        report: &mut PullReport,
    ) -> Result<(), StoreError> {
        let ranges = plan(missing);
        report.ranges += ranges.len() as u64;
        report.range_bytes += ranges
            .iter()
            .map(|range| range.end - range.start)
            .sum::<u64>();
        // After a failure those that are under way are waited for, and no more are begun.
        let failed = std::cell::Cell::new(None);
        let begun = ranges.into_iter().take_while(|_| {
            let failure = failed.take();
            let go_on = failure.is_none();
            failed.set(failure);
            go_on
        });
        let fetched = futures_util::stream::iter(begun)
            .map(|range| self.fetch(snapshot, range, cached.clone()))
            .buffer_unordered(RANGES_AT_ONCE);
        let mut fetched = std::pin::pin!(fetched);
        let mut written = Vec::new();
        while let Some(arrived) = fetched.next().await {
            match arrived {
                Ok((numbers, bytes)) => {
                    report.fetched += numbers.len() as u64;
                    report.fetched_bytes += bytes;
                    written.extend(numbers);
                }
                Err(e) => failed.set(Some(failed.take().unwrap_or(e))),
            }
            if written.len() >= CHUNKS_PER_SYNC {
                mark(cached, std::mem::take(&mut written)).await?;
            }
        }
        mark(cached, written).await?;
        failed.take().map_or(Ok(()), Err)
    }

    async fn fetch(
        &self,
        snapshot: &RemoteSnapshot,
        range: PlannedRange,
        cached: Arc<CachedLayer>,
    ) -> Result<(Vec<u64>, u64), StoreError> {
        let key = snapshot
            .tenant
            .pack_key(snapshot.keys.generation(), &range.pack);
        let mut attempts = 0;
        loop {
            attempts += 1;
            let bytes = self.backend.get_range(&key, range.start..range.end).await?;
            let (keys, range, cached) = (snapshot.keys.clone(), range.clone(), cached.clone());
            let written = tokio::task::spawn_blocking({
                let key = key.clone();
                move || write_range(&keys, &range, &bytes, &cached, &key)
            });
            match written
                .await
                .map_err(|e| StoreError::Source(e.to_string()))?
            {
                // It may have been changed on the way.
                Err(StoreError::Damaged { .. }) if attempts == 1 => {}
                other => return other,
            }
        }
    }
}

async fn mark(cached: &Arc<CachedLayer>, numbers: Vec<u64>) -> Result<(), StoreError> {
    if numbers.is_empty() {
        return Ok(());
    }
    let cached = cached.clone();
    let marked = tokio::task::spawn_blocking(move || cached.mark(&numbers));
    marked
        .await
        .map_err(|e| StoreError::Source(e.to_string()))?
}

/// Checks the frames of a range and writes their chunks. Returns the chunks and their bytes.
fn write_range(
    keys: &crate::DataKeys,
    range: &PlannedRange,
    bytes: &Bytes,
    cached: &CachedLayer,
    key: &str,
) -> Result<(Vec<u64>, u64), StoreError> {
    let mut written = Vec::new();
    let mut length = 0;
    for frame in &range.frames {
        let at = (u64::from(frame.location.offset) - range.start) as usize;
        let bytes = bytes
            .get(at..at + frame.location.length as usize)
            .unwrap_or_default();
        let object = || format!("{key}, chunk {}", frame.hash);
        let chunk =
            decode_frame(keys, &frame.hash, bytes).map_err(|reason| StoreError::Damaged {
                object: object(),
                reason,
            })?;
        for &number in &frame.numbers {
            cached.write(number, &chunk)?;
            written.push(number);
            length += chunk.len() as u64;
        }
    }
    Ok((written, length))
}
