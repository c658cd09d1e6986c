//! Working set: chunks of memory that a restored guest touches first, the pages that it writes, and
//! the prefetch of the chunks into the page cache.
//!
//! It is a hint: without it, or with a wrong one, restores are only slower. So it has no checksum.

use crate::snapshot::read_index;
use crate::snapshot_dir::SnapshotDir;
use crate::{Lineage, Snapshot, SnapshotError};
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK, MEMORY_PAGE, UnitSet};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

pub(crate) const WORKING_SET_FILE: &str = "working-set.index";
pub(crate) const WRITTEN_PAGES_FILE: &str = "written-pages.index";
/// Largest index read: pages of 32 GiB.
const MAX_INDEX_BYTES: u64 = 4 << 20;

/// A set and the file that holds it.
type RecordedSet = (UnitSet, File);

impl Snapshot {
    /// Adds `index`, an index of memory whose `stored` are the touched chunks. An existing working
    /// set stays.
    pub fn put_working_set(&self, index: &File) -> Result<(), SnapshotError> {
        self.put_set(WORKING_SET_FILE, MEMORY_CHUNK, index)
    }

    /// Adds `index`, an index of memory whose `stored` are the written pages. An existing one
    /// stays.
    pub fn put_written_pages(&self, index: &File) -> Result<(), SnapshotError> {
        self.put_set(WRITTEN_PAGES_FILE, MEMORY_PAGE, index)
    }

    /// Reads the touched chunks; returns them with their file, if recorded.
    pub fn working_set(&self) -> Result<Option<RecordedSet>, SnapshotError> {
        self.read_set(WORKING_SET_FILE, MEMORY_CHUNK)
    }

    fn put_set(&self, name: &str, unit: u32, index: &File) -> Result<(), SnapshotError> {
        let path = self.path().join(name);
        let index = read_index(index).map_err(SnapshotError::io(&path))?;
        self.fits(&path, &index, unit)?;
        SnapshotDir::at(self.path())?.create_once(name, &index.encode())
    }

    fn read_set(&self, name: &str, unit: u32) -> Result<Option<RecordedSet>, SnapshotError> {
        let Some(file) = SnapshotDir::at(self.path())?.find(name)? else {
            return Ok(None);
        };
        let path = self.path().join(name);
        let length = file.metadata().map_err(SnapshotError::io(&path))?.len();
        if length > MAX_INDEX_BYTES {
            return Err(SnapshotError::damaged(&path, "it is too long"));
        }
        let index = read_index(&file).map_err(|e| SnapshotError::damaged(&path, e))?;
        self.fits(&path, &index, unit)?;
        Ok(Some((index.stored, file)))
    }

    fn fits(&self, path: &Path, index: &LayerIndex, unit: u32) -> Result<(), SnapshotError> {
        let units = self.manifest().memory.bytes.div_ceil(u64::from(unit));
        if index.unit == unit && index.units() == units {
            return Ok(());
        }
        Err(SnapshotError::damaged(
            path,
            "it is of memory of another size",
        ))
    }
}

impl Lineage {
    /// Working set of the newest snapshot that has one. Chunks keep their numbers in a lineage, so
    /// an ancestor's working set still covers most of a descendant's.
    pub fn working_set(&self) -> Result<Option<RecordedSet>, SnapshotError> {
        self.recorded(WORKING_SET_FILE, MEMORY_CHUNK)
    }

    /// Index of the written pages of the newest snapshot that has one.
    pub fn written_pages(&self) -> Result<Option<File>, SnapshotError> {
        let found = self.recorded(WRITTEN_PAGES_FILE, MEMORY_PAGE)?;
        Ok(found.map(|(_, file)| file))
    }

    fn recorded(&self, name: &str, unit: u32) -> Result<Option<RecordedSet>, SnapshotError> {
        for snapshot in self.snapshots().iter().rev() {
            if let Some(found) = snapshot.read_set(name, unit)? {
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
