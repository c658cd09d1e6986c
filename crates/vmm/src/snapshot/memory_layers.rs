//! Memory layers below a VM: the files of its earlier snapshots. A layer contains the chunks that
//! had changed since the layer before. For each chunk, this module determines the layer with the
//! last saved content.
//!
//! A *chunk* is 64 KiB of memory or of a disk.

use super::chunk_hashes::{ChunkHash, ChunkHashes};
use super::linear_memory::CHUNK_SIZE;
use crate::error::VmmError;
use crate::machine::adjacent;
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK, UnitSet};
use jiffy_proto::snapshot::{FileIdentity, MAX_LAYERS};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};

/// Memory layer: a file and its index.
#[derive(Debug)]
pub struct MemoryLayer {
    /// File that contains each stored chunk at the chunk's offset.
    pub file: File,
    /// Index of stored and zero chunks.
    pub index: LayerIndex,
    /// Hashes of the stored chunks. `None` if the chunks are compared by reading the file.
    pub hashes: Option<ChunkHashes>,
}

impl MemoryLayer {
    /// Creates a layer without hashes, which is compared by reading it.
    pub fn new(file: File, index: LayerIndex) -> Self {
        Self {
            file,
            index,
            hashes: None,
        }
    }
}

/// Content of a chunk in the layers.
#[derive(Debug, Clone, Copy)]
pub enum StoredContent {
    /// All zeroes.
    Zero,
    /// The bytes of the file of this layer at the chunk's offset.
    File(usize),
    /// Bytes with this hash.
    Hash(ChunkHash),
}

/// Layers, oldest first. A booted VM has no layers: all memory below is zero.
#[derive(Debug, Default)]
pub struct MemoryLayers(Vec<MemoryLayer>);

impl MemoryLayers {
    /// Creates the list. Checks that each layer belongs to a memory of `bytes` bytes.
    pub fn new(layers: Vec<MemoryLayer>, bytes: u64) -> Result<Self, VmmError> {
        if layers.is_empty() || layers.len() > MAX_LAYERS {
            return Err(VmmError::Config(format!(
                "{} memory layers: must be 1 to {MAX_LAYERS}",
                layers.len()
            )));
        }
        for (number, layer) in layers.iter().enumerate() {
            let length = layer
                .file
                .metadata()
                .map_err(|e| VmmError::host("size of a memory layer", e))?
                .len();
            let fits =
                layer.index.unit == MEMORY_CHUNK && layer.index.units() == bytes / CHUNK_SIZE;
            // A mapping beyond the end of its file would kill the process when it is accessed.
            if !fits || length != bytes {
                return Err(VmmError::Config(format!(
                    "memory layer {number} has {length} bytes, but this VM has {bytes} bytes of memory"
                )));
            }
        }
        Ok(Self(layers))
    }

    /// Returns the content of `chunk` in the layers. Does not allocate memory.
    pub fn stored_content(&self, chunk: u64) -> StoredContent {
        let owning_layer = self.owning_layer(chunk);
        let stored = owning_layer.and_then(|at| Some((at, self.0.get(at)?)));
        match stored.filter(|(_, layer)| layer.index.stored.contains(chunk)) {
            Some((at, layer)) => {
                let hash = layer.hashes.as_ref().and_then(|hashes| hashes.get(chunk));
                hash.map_or(StoredContent::File(at), StoredContent::Hash)
            }
            None => StoredContent::Zero,
        }
    }

    /// Returns the newest layer that stores a chunk or marks it as zero.
    fn owning_layer(&self, chunk: u64) -> Option<usize> {
        self.0.iter().rposition(|layer| layer.index.decides(chunk))
    }

    /// Returns runs of chunks that one file contains, in ascending order: the file's number and the
    /// chunks.
    pub fn runs(&self, chunks: u64) -> Vec<(usize, Range<u64>)> {
        let mut runs: Vec<(usize, Range<u64>)> = Vec::new();
        for chunk in self.stored(chunks).iter() {
            let Some(owning_layer) = self.owning_layer(chunk) else {
                continue;
            };
            match runs.last_mut() {
                Some((at, run)) if *at == owning_layer && run.end == chunk => run.end += 1,
                _ => runs.push((owning_layer, chunk..chunk + 1)),
            }
        }
        runs
    }

    /// Returns the chunks that a file contains and that no newer layer marks as zero.
    fn stored(&self, chunks: u64) -> UnitSet {
        let empty = UnitSet::empty(chunks);
        // The layers are merged from oldest to newest: the words of each layer override the words
        // below, 64 chunks at a time.
        let mut words = empty.words().to_vec();
        for layer in &self.0 {
            let (stored, zero) = (&layer.index.stored, &layer.index.zero);
            for ((word, stored), zero) in words.iter_mut().zip(stored.words()).zip(zero.words()) {
                *word = *word & !zero | stored;
            }
        }
        UnitSet::from_words(chunks, &words)
    }

    /// Returns the file of layer `number`.
    pub fn file(&self, number: usize) -> Option<&File> {
        self.0.get(number).map(|layer| &layer.file)
    }

    /// Returns the descriptors of all layers.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        self.0.iter().map(|layer| layer.file.as_raw_fd())
    }

    /// Returns the number of layers.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there are no layers.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the layer of a new snapshot as the newest.
    pub fn push(&mut self, layer: MemoryLayer) {
        self.0.push(layer);
    }

    /// Folds the layer with the file `lower` into the next newer layer. Its file `upper` must
    /// contain every chunk that only `lower` contained. Does nothing if the layers are not
    /// adjacent. Existing mappings of `lower` remain.
    pub fn fold(&mut self, lower: FileIdentity, upper: FileIdentity) {
        let files = self.0.iter().map(|layer| &layer.file);
        let Some(at) = adjacent(files, lower, upper) else {
            return;
        };
        let folded = self.0.remove(at);
        let Some(layer) = self.0.get_mut(at) else {
            return;
        };
        // Chunks of which the upper layer stores the content or marks it as zero. The lower layer
        // determines all others.
        let decided = layer.index.stored.with(&layer.index.zero);
        let added = folded.index.stored.without(&decided);
        match (&layer.hashes, &folded.hashes) {
            (Some(hashes), Some(below)) => {
                for chunk in added.iter() {
                    if let Some(hash) = below.get(chunk) {
                        // The hash of a chunk moves with the chunk.
                        hashes.set(chunk, hash);
                    }
                }
            }
            // The added chunks have no hashes. A layer has hashes of all its stored chunks or none,
            // so all its chunks are compared by reading the file.
            (Some(_), None) if added.count() > 0 => layer.hashes = None,
            _ => {}
        }
        layer.index.stored = layer.index.stored.with(&added);
        let zero = folded.index.zero.without(&decided);
        layer.index.zero = layer.index.zero.with(&zero);
    }

    /// Removes the layer of an aborted snapshot. The next snapshot compares memory with the layers
    /// below, so no further cleanup is needed.
    pub fn pop(&mut self) {
        self.0.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_sys_util::tempfile::TempFile;

    fn layer(stored: &[u64], zero: &[u64]) -> MemoryLayer {
        let file = TempFile::new().unwrap().into_file();
        file.set_len(256 * CHUNK_SIZE).unwrap();
        let mut index = LayerIndex::empty(MEMORY_CHUNK, 256 * CHUNK_SIZE);
        stored.iter().for_each(|&c| index.stored.insert(c));
        zero.iter().for_each(|&c| index.zero.insert(c));
        MemoryLayer::new(file, index)
    }

    #[test]
    fn the_newest_layer_with_a_chunk_decides_its_content() {
        let layers = vec![
            layer(&[1, 2, 3, 4, 100], &[]),
            layer(&[3], &[2, 100]),
            layer(&[100], &[7]),
        ];
        let layers = MemoryLayers::new(layers, 256 * CHUNK_SIZE).unwrap();
        let expected = [(0, 1..2), (1, 3..4), (0, 4..5), (2, 100..101)];
        assert_eq!(layers.runs(256), expected);
        assert!(matches!(layers.stored_content(2), StoredContent::Zero));
        assert!(matches!(layers.stored_content(200), StoredContent::Zero));
        assert!(matches!(layers.stored_content(3), StoredContent::File(_)));
    }

    #[test]
    fn folded_layers_decide_the_same_content_and_the_lower_file_is_closed() {
        let layers = vec![
            layer(&[1, 2, 3], &[]),
            layer(&[3, 4, 9], &[2]),
            layer(&[4], &[1, 9]),
        ];
        let mut layers = MemoryLayers::new(layers, 256 * CHUNK_SIZE).unwrap();
        let hashes = ChunkHashes::new(256).unwrap();
        hashes.set(4, [7; 16]);
        layers.0[2].hashes = Some(hashes);
        let below = ChunkHashes::new(256).unwrap();
        below.set(3, [8; 16]);
        layers.0[1].hashes = Some(below);
        let identities: Vec<FileIdentity> = (0..3)
            .map(|at| crate::machine::file_identity(layers.file(at).unwrap()).unwrap())
            .collect();
        let decided = |layers: &MemoryLayers, chunk| match layers.stored_content(chunk) {
            StoredContent::Zero => "zero",
            StoredContent::File(_) => "file",
            StoredContent::Hash(hash) if hash == [7; 16] => "hash 7",
            StoredContent::Hash(hash) if hash == [8; 16] => "hash 8",
            StoredContent::Hash(_) => "another hash",
        };
        let of_all =
            |layers: &MemoryLayers| (0..10).map(|c| decided(layers, c)).collect::<Vec<_>>();
        let before = of_all(&layers);
        assert_eq!(before[3..5], ["hash 8", "hash 7"]);

        // Layers that are not adjacent, in another order, or unknown remain unchanged.
        layers.fold(identities[0], identities[2]);
        layers.fold(identities[1], identities[0]);
        assert_eq!(layers.len(), 3);
        layers.fold(identities[1], identities[2]);
        assert_eq!(layers.len(), 2);
        assert_eq!(of_all(&layers), before);
        // The lower layer adds no chunks, so the hashes of the upper layer remain.
        layers.fold(identities[0], identities[2]);
        assert_eq!((layers.len(), decided(&layers, 4)), (1, "hash 7"));
        // The lower layer adds chunks without hashes, so all chunks are compared by reading them.
        layers.push(layer(&[5], &[]));
        let newest = crate::machine::file_identity(layers.file(1).unwrap()).unwrap();
        layers.0[1].hashes = Some(ChunkHashes::new(256).unwrap());
        layers.0[0].hashes = None;
        layers.fold(identities[2], newest);
        assert_eq!((decided(&layers, 4), decided(&layers, 5)), ("file", "file"));
    }

    #[test]
    fn a_layer_for_a_memory_of_another_size_is_rejected() {
        assert!(MemoryLayers::new(vec![layer(&[], &[])], 128 * CHUNK_SIZE).is_err());
        let short = layer(&[], &[]);
        short.file.set_len(255 * CHUNK_SIZE).unwrap();
        assert!(MemoryLayers::new(vec![short], 256 * CHUNK_SIZE).is_err());
        assert!(MemoryLayers::new(Vec::new(), 256 * CHUNK_SIZE).is_err());
    }
}
