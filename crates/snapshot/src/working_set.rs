//! Working set: chunks of memory that a restored guest touches first, and their prefetch into the
//! page cache.
//!
//! It is a hint: without it, or with a wrong one, restores are only slower. So it has no checksum.

use crate::snapshot::read_index;
use crate::snapshot_dir::SnapshotDir;
use crate::{Lineage, Snapshot, SnapshotError};
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK, UnitSet};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const WORKING_SET_FILE: &str = "working-set.index";
const MAX_INDEX_BYTES: u64 = 1 << 20;

impl Snapshot {
    /// Adds `index`, an index of memory whose `stored` are the touched chunks. An existing working
    /// set stays.
    pub fn put_working_set(&self, index: &File) -> Result<(), SnapshotError> {
        let path = self.path().join(WORKING_SET_FILE);
        let index = read_index(index).map_err(SnapshotError::io(&path))?;
        self.fits(&index)?;
        SnapshotDir::at(self.path())?.create_once(WORKING_SET_FILE, &index.encode())
    }

    /// Reads the touched chunks; returns them with their file, if recorded.
    pub fn working_set(&self) -> Result<Option<(UnitSet, File)>, SnapshotError> {
        let Some(file) = SnapshotDir::at(self.path())?.find(WORKING_SET_FILE)? else {
            return Ok(None);
        };
        let path = self.path().join(WORKING_SET_FILE);
        let length = file.metadata().map_err(SnapshotError::io(&path))?.len();
        if length > MAX_INDEX_BYTES {
            return Err(SnapshotError::damaged(&path, "it is too long"));
        }
        let index = read_index(&file).map_err(|e| SnapshotError::damaged(&path, e))?;
        self.fits(&index)?;
        Ok(Some((index.stored, file)))
    }

    fn fits(&self, index: &LayerIndex) -> Result<(), SnapshotError> {
        let chunks = self
            .manifest()
            .memory
            .bytes
            .div_ceil(u64::from(MEMORY_CHUNK));
        if index.unit == MEMORY_CHUNK && index.units() == chunks {
            return Ok(());
        }
        let path = self.path().join(WORKING_SET_FILE);
        Err(SnapshotError::damaged(
            &path,
            "it is of memory of another size",
        ))
    }
}

impl Lineage {
    /// Working set of the newest snapshot that has one. Chunks keep their numbers in a lineage, so
    /// an ancestor's working set still covers most of a descendant's.
    pub fn working_set(&self) -> Result<Option<(UnitSet, File)>, SnapshotError> {
        for snapshot in self.snapshots().iter().rev() {
            if let Some(found) = snapshot.working_set()? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Reads the working set (or all memory, if it is not recorded) into the page cache, where it
    /// counts as recently used. Returns the number of bytes.
    pub fn prefetch(&self) -> Result<u64, SnapshotError> {
        let chunk = u64::from(MEMORY_CHUNK);
        let set = self.working_set()?.map(|(set, _)| set);
        let mut prefetched = 0;
        for (snapshot, layer) in self.snapshots().iter().zip(self.memory()?) {
            let failed = |e: io::Error| SnapshotError::io(snapshot.path())(e);
            let stored = read_index(&layer.index).map_err(failed)?.stored;
            let wanted = |c: &u64| set.as_ref().is_none_or(|set| set.contains(*c));
            let wanted: Vec<u64> = stored.iter().filter(wanted).collect();
            // Requests all chunks first, so that a storage device can queue them.
            for &at in &wanted {
                let (offset, length) = (at.saturating_mul(chunk), chunk);
                if let (Ok(offset), Ok(length)) = (offset.try_into(), length.try_into()) {
                    let advice = PosixFadviseAdvice::POSIX_FADV_WILLNEED;
                    // On failure the read below loads the chunk.
                    let _ = posix_fadvise(&layer.file, offset, length, advice);
                }
            }
            let mut buffer = vec![0; MEMORY_CHUNK as usize];
            for at in wanted {
                let read = layer.file.read_at(&mut buffer, at * chunk);
                prefetched += read.map_err(failed)? as u64;
            }
        }
        Ok(prefetched)
    }
}
