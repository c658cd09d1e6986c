//! The memory layers below a VM: which file says what a chunk held when it was last saved.

use super::hashes::{Hash, Hashes};
use super::linear::CHUNK;
use crate::error::VmmError;
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK, UnitSet};
use jiffy_proto::snapshot::MAX_LAYERS;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};

/// A file and what it says.
#[derive(Debug)]
pub struct Layer {
    /// Each chunk at its own offset.
    pub file: File,
    /// What it holds.
    pub index: LayerIndex,
    /// Hashes of what it stores, where it is not in the page cache.
    pub hashes: Option<Hashes>,
}

impl Layer {
    /// A layer that is compared with by reading it.
    pub fn new(file: File, index: LayerIndex) -> Self {
        Self {
            file,
            index,
            hashes: None,
        }
    }
}

/// What lies below a chunk.
#[derive(Debug, Clone, Copy)]
pub enum Below<'a> {
    /// Zeroes.
    Zero,
    /// What this file holds at the chunk's offset.
    File(&'a File),
    /// Something with this hash.
    Hashed(Hash),
}

/// Layers, oldest first. Of a VM that was booted there are none, and everything below is zero.
#[derive(Debug, Default)]
pub struct Layers(Vec<Layer>);

impl Layers {
    /// Checks that each layer is one of a memory of `bytes` bytes.
    pub fn new(layers: Vec<Layer>, bytes: u64) -> Result<Self, VmmError> {
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
            let fits = layer.index.unit == MEMORY_CHUNK && layer.index.units() == bytes / CHUNK;
            // A mapping beyond the end of its file would kill the process.
            if !fits || length != bytes {
                return Err(VmmError::Config(format!(
                    "memory layer {number} of {length} bytes is not one of this VM's {bytes} bytes"
                )));
            }
        }
        Ok(Self(layers))
    }

    /// What lies below `chunk`. Allocates nothing.
    pub fn below(&self, chunk: u64) -> Below<'_> {
        match self.owner(chunk).and_then(|at| self.0.get(at)) {
            Some(layer) if layer.index.stored.contains(chunk) => {
                let hash = layer.hashes.as_ref().and_then(|hashes| hashes.get(chunk));
                hash.map_or(Below::File(&layer.file), Below::Hashed)
            }
            _ => Below::Zero,
        }
    }

    fn owner(&self, chunk: u64) -> Option<usize> {
        self.0.iter().rposition(|layer| layer.index.decides(chunk))
    }

    /// Runs of chunks that one file holds, ascending: the file's number and the chunks.
    pub fn runs(&self, chunks: u64) -> Vec<(usize, Range<u64>)> {
        // Oldest to newest, each layer's word over the ones below it: 64 chunks at a time.
        let mut runs: Vec<(usize, Range<u64>)> = Vec::new();
        for chunk in self.stored(chunks).iter() {
            let Some(owner) = self.owner(chunk) else {
                continue;
            };
            match runs.last_mut() {
                Some((at, run)) if *at == owner && run.end == chunk => run.end += 1,
                _ => runs.push((owner, chunk..chunk + 1)),
            }
        }
        runs
    }

    /// Chunks that some file holds and no newer layer makes zero.
    fn stored(&self, chunks: u64) -> UnitSet {
        let empty = UnitSet::empty(chunks);
        let mut words = empty.words().to_vec();
        for layer in &self.0 {
            let (stored, zero) = (&layer.index.stored, &layer.index.zero);
            for ((word, stored), zero) in words.iter_mut().zip(stored.words()).zip(zero.words()) {
                *word = *word & !zero | stored;
            }
        }
        UnitSet::from_words(chunks, &words)
    }

    /// The file of layer `number`.
    pub fn file(&self, number: usize) -> Option<&File> {
        self.0.get(number).map(|layer| &layer.file)
    }

    /// All descriptors of layers.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        self.0.iter().map(|layer| layer.file.as_raw_fd())
    }

    /// Number of layers.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A new snapshot lies on top from now on.
    pub fn push(&mut self, layer: Layer) {
        self.0.push(layer);
    }

    /// The newest snapshot did not happen. What memory differs in from the layers below is found by looking at it, so nothing
    /// else has to be undone.
    pub fn pop(&mut self) {
        self.0.pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_sys_util::tempfile::TempFile;

    fn layer(stored: &[u64], zero: &[u64]) -> Layer {
        let file = TempFile::new().unwrap().into_file();
        file.set_len(256 * CHUNK).unwrap();
        let mut index = LayerIndex::empty(MEMORY_CHUNK, 256 * CHUNK);
        stored.iter().for_each(|&c| index.stored.insert(c));
        zero.iter().for_each(|&c| index.zero.insert(c));
        Layer::new(file, index)
    }

    #[test]
    fn the_newest_layer_that_says_something_decides() {
        let layers = vec![
            layer(&[1, 2, 3, 4, 100], &[]),
            layer(&[3], &[2, 100]),
            layer(&[100], &[7]),
        ];
        let layers = Layers::new(layers, 256 * CHUNK).unwrap();
        let expected = [(0, 1..2), (1, 3..4), (0, 4..5), (2, 100..101)];
        assert_eq!(layers.runs(256), expected);
        assert!(matches!(layers.below(2), Below::Zero));
        assert!(matches!(layers.below(200), Below::Zero));
        assert!(matches!(layers.below(3), Below::File(_)));
    }

    #[test]
    fn a_layer_of_another_memory_is_refused() {
        assert!(Layers::new(vec![layer(&[], &[])], 128 * CHUNK).is_err());
        let short = layer(&[], &[]);
        short.file.set_len(255 * CHUNK).unwrap();
        assert!(Layers::new(vec![short], 256 * CHUNK).is_err());
        assert!(Layers::new(Vec::new(), 256 * CHUNK).is_err());
    }
}
