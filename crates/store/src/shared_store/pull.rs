//! Pull: fetches chunks of a snapshot from a store into the cache of this host.
//!
//! A *chunk* is 64 KiB of memory or of a disk. The *working set* of a snapshot is the memory that a
//! restored guest touches first. It is recorded, and prefetched by later restores.

mod fill;

pub use fill::CachedPart;

use crate::StoreError;
use crate::cache::{CachedLayer, LayerCache};
use crate::fetch_plan::ChunkRequest;
use crate::layer::LayerKind;
use crate::remote::RemoteSnapshot;
use crate::shared_store::SharedStore;
use serde::Serialize;
use std::collections::HashSet;
use std::sync::Arc;

/// Chunks to pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selection<'a> {
    /// Chunks of the working set.
    WorkingSet,
    /// All chunks, starting with the working set.
    All,
    /// The listed chunks, in this order.
    Chunks(&'a [u64]),
}

/// Result of a pull.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PullReport {
    /// Number of selected chunks.
    pub chunks: u64,
    /// Number of fetched chunks.
    pub fetched: u64,
    /// Bytes of the fetched chunks before compression.
    pub fetched_bytes: u64,
    /// Number of ranges that were read from packs, objects with many compressed chunks.
    pub ranges: u64,
    /// Bytes of the ranges.
    pub range_bytes: u64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Selects from `all`, the stored chunks of part `number`, in the order of `selection`.
fn select(
    snapshot: &RemoteSnapshot,
    number: usize,
    all: &[ChunkRequest],
    selection: Selection<'_>,
) -> Vec<ChunkRequest> {
    let find = |chunk: u64| {
        let position = all.binary_search_by_key(&chunk, |wanted| wanted.number);
        position.ok().map(|at| all[at])
    };
    let part = snapshot.manifest.parts.get(number);
    let is_memory = part.is_some_and(|part| part.kind == LayerKind::Memory);
    let touched = snapshot.manifest.working_set.iter();
    let touched = touched.filter_map(|&chunk| find(chunk.into()));
    match selection {
        Selection::Chunks(chunks) => chunks.iter().filter_map(|&chunk| find(chunk)).collect(),
        Selection::WorkingSet if is_memory => touched.collect(),
        Selection::All if is_memory => {
            let mut seen = HashSet::new();
            touched
                .chain(all.iter().copied())
                .filter(|wanted| seen.insert(wanted.number))
                .collect()
        }
        // Only memory has a working set. Other parts are always read completely.
        Selection::WorkingSet | Selection::All => all.to_vec(),
    }
}

impl SharedStore {
    /// Pulls chunks of part `number` of a snapshot into `cache`. The layer stays in the cache while
    /// the returned layer exists.
    pub async fn pull(
        &self,
        snapshot: &RemoteSnapshot,
        number: usize,
        selection: Selection<'_>,
        cache: &Arc<LayerCache>,
    ) -> Result<(Arc<CachedLayer>, PullReport), StoreError> {
        let part = self.cached_part(snapshot, number, cache)?;
        let report = self.fill(&part, selection).await?;
        Ok((part.layer().clone(), report))
    }
}
