//! Divides the working set of a snapshot among its layers: selects the chunks of memory to fetch
//! before a guest runs.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *layer* is the part of a memory or disk that one
//! snapshot stores: the content that differs from its ancestors.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors. The *working set* of
//! a snapshot is the memory that a restored guest touches first.

use crate::host::FoundSnapshot;
use crate::{Layer, LayerKind, RunKind};
use std::collections::BTreeSet;

/// Maximum size of stored memory that is fetched completely if no working set was recorded. Reading
/// so little memory in large ranges takes few requests.
const SMALL_MEMORY_BYTES: u64 = 64 << 20;

/// Returns the chunks of memory to fetch before a guest runs, for each snapshot of `lineage`,
/// nearest first. `None` if all chunks are to be fetched.
pub fn first_chunks(lineage: &[FoundSnapshot]) -> Option<Vec<Vec<u64>>> {
    let newest = lineage.first()?;
    let wanted = newest.remote.manifest.working_set.iter();
    let wanted: BTreeSet<u64> = wanted.copied().map(u64::from).collect();
    let memory: Vec<Option<&Layer>> = lineage.iter().map(memory_of).collect();
    if wanted.is_empty() && stored_bytes(&memory) <= SMALL_MEMORY_BYTES {
        return None;
    }
    Some(divide(&memory, wanted))
}

fn memory_of(found: &FoundSnapshot) -> Option<&Layer> {
    let mut parts = found.remote.manifest.parts.iter();
    parts.find(|part| part.kind == LayerKind::Memory)
}

fn stored_bytes(memory: &[Option<&Layer>]) -> u64 {
    let chunks = memory.iter().flatten().map(|part| part.hashes.len() as u64);
    let chunks: u64 = chunks.sum();
    chunks.saturating_mul(crate::CHUNK_BYTES.into())
}

/// Assigns each chunk of `wanted` to the nearest layer that stores it. A chunk that a nearer layer
/// stores or zeroes is not read from older layers.
fn divide(memory: &[Option<&Layer>], mut wanted: BTreeSet<u64>) -> Vec<Vec<u64>> {
    let mut divided = Vec::new();
    for layer in memory {
        let of_kind = |kind| {
            let runs = layer.iter().flat_map(move |layer| layer.ranges(kind));
            let chunks = runs.flat_map(|run| wanted.range(run).copied());
            chunks.collect::<Vec<u64>>()
        };
        let (stored, zero) = (of_kind(RunKind::Stored), of_kind(RunKind::Zero));
        for chunk in stored.iter().chain(&zero) {
            wanted.remove(chunk);
        }
        divided.push(stored);
    }
    divided
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hash, Run};

    fn layer(runs: &[(RunKind, u32)]) -> Layer {
        let stored = runs.iter().filter(|(kind, _)| *kind == RunKind::Stored);
        let stored: u32 = stored.map(|(_, chunks)| chunks).sum();
        let runs = runs.iter().map(|&(kind, chunks)| Run { kind, chunks });
        Layer {
            kind: LayerKind::Memory,
            name: "memory.layer".to_owned(),
            bytes: 8 * u64::from(crate::CHUNK_BYTES),
            runs: runs.collect(),
            hashes: vec![Hash([0; 32]); stored as usize],
        }
    }

    #[test]
    fn a_chunk_is_fetched_from_the_nearest_layer_that_decides_it() {
        use RunKind::{Inherited, Stored, Zero};
        let newest = layer(&[(Stored, 2), (Zero, 1), (Inherited, 5)]);
        let oldest = layer(&[(Stored, 6), (Zero, 2)]);
        let wanted = [1, 2, 3, 5, 7].into();
        let divided = divide(&[Some(&newest), None, Some(&oldest)], wanted);
        assert_eq!(divided, [vec![1], vec![], vec![3, 5]]);
        assert_eq!(stored_bytes(&[Some(&newest), None]), 2 << 16);
    }
}
