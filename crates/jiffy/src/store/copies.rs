//! Copies of stored chunks on this host, from which `jiffy store verify --repair` repairs damaged
//! chunks. The store verifies each copy.
//!
//! A *part* is a file of a snapshot, for example its memory. A *chunk* is 64 KiB of a part.

use jiffy_image::Home;
use jiffy_store::{ChunkCopies, LayerCache, RemoteSnapshot};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Source of chunk copies for repairs.
pub struct LocalCopies<'a> {
    cache: &'a LayerCache,
    snapshots: PathBuf,
}

impl<'a> LocalCopies<'a> {
    /// Returns a source that reads `cache` and the snapshots of `home`.
    pub fn new(cache: &'a LayerCache, home: Home) -> Self {
        let snapshots = home.path().join("snapshots");
        Self { cache, snapshots }
    }

    /// Opens the file of a part in a snapshot of this host. `None` if the host does not have the
    /// snapshot.
    fn file(&self, snapshot: &RemoteSnapshot, part: usize) -> Option<File> {
        let id = &snapshot.manifest.attributes.id;
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let part = snapshot.manifest.parts.get(part)?;
        // The id comes from the store, and becomes part of a path.
        if id.is_empty() || !id.chars().all(is_name) {
            return None;
        }
        File::open(self.snapshots.join(id).join(&part.name)).ok()
    }
}

impl ChunkCopies for LocalCopies<'_> {
    fn read_chunk(
        &self,
        snapshot: &RemoteSnapshot,
        part: usize,
        chunk: u64,
        buffer: &mut [u8],
    ) -> Option<usize> {
        // A hole of the cache file reads as zeroes. Chunks of zeroes are never stored, so zeroes
        // mean that the cache does not have the chunk.
        let cached = self.cache.read_chunk(snapshot, part, chunk, buffer);
        let is_zero = |length: usize| buffer.iter().take(length).all(|byte| *byte == 0);
        if let Some(length) = cached.filter(|length| !is_zero(*length)) {
            return Some(length);
        }
        // The file is read at the position of the chunk in the uncompressed part.
        let range = snapshot.manifest.parts.get(part)?.chunk_range(chunk);
        let length = usize::try_from(range.end.checked_sub(range.start)?).ok()?;
        let file = self.file(snapshot, part)?;
        file.read_exact_at(buffer.get_mut(..length)?, range.start)
            .ok()
            .map(|()| length)
    }
}
