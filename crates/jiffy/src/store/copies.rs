//! Copies of chunks on this host: its cache of the store, and its own snapshots.

use jiffy_image::Home;
use jiffy_store::{ChunkCopies, LayerCache, RemoteSnapshot};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Copies of chunks on this host.
pub struct LocalCopies<'a> {
    cache: &'a LayerCache,
    snapshots: PathBuf,
}

impl<'a> LocalCopies<'a> {
    /// Copies in `cache` and in the snapshots of `home`.
    pub fn new(cache: &'a LayerCache, home: Home) -> Self {
        let snapshots = home.path().join("snapshots");
        Self { cache, snapshots }
    }

    /// File of a part in this host's own snapshot.
    fn file(&self, snapshot: &RemoteSnapshot, part: usize) -> Option<File> {
        let id = &snapshot.manifest.attributes.id;
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let part = snapshot.manifest.parts.get(part)?;
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
        // A hole of the cache reads as zeroes, which are no stored chunk.
        let cached = self.cache.read_chunk(snapshot, part, chunk, buffer);
        let is_zero = |length: usize| buffer.iter().take(length).all(|byte| *byte == 0);
        if let Some(length) = cached.filter(|length| !is_zero(*length)) {
            return Some(length);
        }
        let range = snapshot.manifest.parts.get(part)?.chunk_range(chunk);
        let length = usize::try_from(range.end.checked_sub(range.start)?).ok()?;
        let file = self.file(snapshot, part)?;
        file.read_exact_at(buffer.get_mut(..length)?, range.start)
            .ok()
            .map(|()| length)
    }
}
