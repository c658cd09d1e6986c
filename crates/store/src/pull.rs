//! Pull: fetches chunks of a snapshot from a store into the cache of a host.

mod fill;

pub use fill::CachedPart;

use crate::cache::{CachedLayer, LayerCache};
use crate::fetch_plan::ChunkRequest;
use crate::layer::{Layer, LayerKind};
use crate::remote::RemoteSnapshot;
use crate::tenant::SharedStore;
use crate::{DataKeys, FormatError, Hash, StoreError};
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
    /// These chunks, in this order.
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
    /// Number of ranges read.
    pub ranges: u64,
    /// Bytes of the ranges.
    pub range_bytes: u64,
    /// Duration in seconds.
    pub seconds: f64,
}

impl RemoteSnapshot {
    /// Returns the keys that its chunks are hashed and encrypted with.
    pub fn keys(&self) -> &DataKeys {
        &self.keys
    }

    /// Returns index and layer of the part named `name`.
    pub fn part(&self, name: &str) -> Option<(usize, &Layer)> {
        let mut parts = self.manifest.parts.iter().enumerate();
        parts.find(|(_, part)| part.name == name)
    }

    /// Returns the root of part `number`, which names the part in the cache.
    pub fn part_root(&self, number: usize) -> Result<Hash, StoreError> {
        let missing = FormatError::Damaged("it has no such part");
        let part = self.manifest.parts.get(number).ok_or(missing);
        let root = part.and_then(|part| part.root(&self.keys));
        root.map_err(StoreError::damaged(&self.tenant.manifest_key(&self.root)))
    }

    /// Returns the stored chunks of part `number` with their locations.
    pub(crate) fn wanted(&self, number: usize) -> Vec<ChunkRequest> {
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
            .map(|((number, hash), &location)| ChunkRequest {
                number,
                hash,
                location,
            })
            .collect()
    }
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
        // Other parts are always read completely.
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
