//! Which chunks of memory a guest touches when it wakes up from a snapshot, and keeping those in the page cache.
//!
//! It is a hint: without it, or with a wrong one, restores are slower and nothing else. So it is no part of the seal.

use crate::dir::Dir;
use crate::snapshot::read_index;
use crate::{Lineage, Snapshot, SnapshotError};
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK, UnitSet};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const WORKING_SET: &str = "working-set.index";
const MAX_INDEX: u64 = 1 << 20;

impl Snapshot {
    /// Adds `index`, an index of memory whose `stored` are the chunks that were touched. One that is there already stays.
    pub fn put_working_set(&self, index: &File) -> Result<(), SnapshotError> {
        let path = self.path().join(WORKING_SET);
        let index = read_index(index).map_err(SnapshotError::io(&path))?;
        self.fits(&index)?;
        Dir::at(self.path())?.put_once(WORKING_SET, &index.encode())
    }

    /// The chunks that were touched and the file that says so, if that is known.
    pub fn working_set(&self) -> Result<Option<(UnitSet, File)>, SnapshotError> {
        let Some(file) = Dir::at(self.path())?.find(WORKING_SET)? else {
            return Ok(None);
        };
        let path = self.path().join(WORKING_SET);
        let length = file.metadata().map_err(SnapshotError::io(&path))?.len();
        if length > MAX_INDEX {
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
        let path = self.path().join(WORKING_SET);
        Err(SnapshotError::damaged(
            &path,
            "it is of memory of another size",
        ))
    }
}

impl Lineage {
    /// The working set of the newest snapshot that has one. Chunks keep their numbers from generation to generation, so that of
    /// an ancestor still says most of what a descendant touches.
    pub fn working_set(&self) -> Result<Option<(UnitSet, File)>, SnapshotError> {
        for snapshot in self.snapshots().iter().rev() {
            if let Some(found) = snapshot.working_set()? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Reads the working set of memory (everything, if it is not known), so that it is in the page cache and counts as recently
    /// used. Returns how many bytes that were.
    pub fn warm(&self) -> Result<u64, SnapshotError> {
        let chunk = u64::from(MEMORY_CHUNK);
        let set = self.working_set()?.map(|(set, _)| set);
        let mut warmed = 0;
        for (snapshot, layer) in self.snapshots().iter().zip(self.memory()?) {
            let failed = |e: io::Error| SnapshotError::io(snapshot.path())(e);
            let stored = read_index(&layer.index).map_err(failed)?.stored;
            let wanted = |c: &u64| set.as_ref().is_none_or(|set| set.contains(*c));
            let wanted: Vec<u64> = stored.iter().filter(wanted).collect();
            // All are asked for first, so that a device with a queue has something to queue.
            for &at in &wanted {
                let (offset, length) = (at.saturating_mul(chunk), chunk);
                if let (Ok(offset), Ok(length)) = (offset.try_into(), length.try_into()) {
                    let advice = PosixFadviseAdvice::POSIX_FADV_WILLNEED;
                    // Reading brings it as well, one by one.
                    let _ = posix_fadvise(&layer.file, offset, length, advice);
                }
            }
            let mut buffer = vec![0; MEMORY_CHUNK as usize];
            for at in wanted {
                let read = layer.file.read_at(&mut buffer, at * chunk);
                warmed += read.map_err(failed)? as u64;
            }
        }
        Ok(warmed)
    }
}
