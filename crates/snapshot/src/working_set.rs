//! Working set: chunks of memory that a restored guest touches first, and the pages that it writes.
//!
//! It is a hint: without it, or with a wrong one, restores are only slower. So it has no checksum.

use crate::snapshot::read_index;
use crate::snapshot_dir::SnapshotDir;
use crate::{Lineage, Snapshot, SnapshotError};
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK, MEMORY_PAGE, UnitSet};
use std::fs::File;
use std::path::Path;

pub(crate) const WORKING_SET_FILE: &str = "working-set.index";
pub(crate) const WRITTEN_PAGES_FILE: &str = "written-pages.index";
pub(crate) const FIRST_USE_PAGES_FILE: &str = "first-use-pages.index";
/// Files of sets, each with its unit in bytes.
pub(crate) const SET_FILES: [(&str, u32); 3] = [
    (WORKING_SET_FILE, MEMORY_CHUNK),
    (WRITTEN_PAGES_FILE, MEMORY_PAGE),
    (FIRST_USE_PAGES_FILE, MEMORY_PAGE),
];
/// Largest index read: pages of 32 GiB.
const MAX_INDEX_BYTES: u64 = 4 << 20;

/// Most chunks of a working set that is recorded at a pause: 64 MiB. A guest that has touched more
/// since its restore has done more than the next one begins with.
const MAX_TOUCHED_CHUNKS: u64 = 1024;

/// A set and the file that holds it.
type RecordedSet = (UnitSet, File);

/// Indexes of the pages that a restored guest writes first.
#[derive(Debug)]
pub struct WrittenPages {
    /// Up to the end of a first command.
    pub first_command: File,
    /// Up to the end of the first use, if the template tells one.
    pub first_use: Option<File>,
}

impl Snapshot {
    /// Adds `index`, an index of memory whose `stored` are the touched chunks. An existing working
    /// set stays.
    pub fn put_working_set(&self, index: &File) -> Result<(), SnapshotError> {
        self.put_set(WORKING_SET_FILE, MEMORY_CHUNK, index)
    }

    /// Adds `index`, an index of the chunks that a guest had touched when it was paused, as the
    /// working set; one that is empty or has more than 1,024 chunks (64 MiB) is left out. Returns
    /// true if the snapshot has a working set of its own then.
    pub fn put_touched(&self, index: &File) -> Result<bool, SnapshotError> {
        let path = self.path().join(WORKING_SET_FILE);
        let length = index.metadata().map_err(SnapshotError::io(&path))?.len();
        if length == 0 {
            return Ok(false);
        }
        let chunks = read_index(index)
            .map_err(SnapshotError::io(&path))?
            .stored
            .count();
        if !(1..=MAX_TOUCHED_CHUNKS).contains(&chunks) {
            return Ok(false);
        }
        self.put_working_set(index).map(|()| true)
    }

    /// Adds `index`, an index of memory whose `stored` are the pages written up to the end of a
    /// first command. An existing one stays.
    pub fn put_written_pages(&self, index: &File) -> Result<(), SnapshotError> {
        self.put_set(WRITTEN_PAGES_FILE, MEMORY_PAGE, index)
    }

    /// Adds `index`, an index of memory whose `stored` are the pages written up to the end of the
    /// first use. An existing one stays.
    pub fn put_first_use_pages(&self, index: &File) -> Result<(), SnapshotError> {
        self.put_set(FIRST_USE_PAGES_FILE, MEMORY_PAGE, index)
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

    /// Written pages of the newest snapshot that has any.
    pub fn written_pages(&self) -> Result<Option<WrittenPages>, SnapshotError> {
        for snapshot in self.snapshots().iter().rev() {
            if let Some((_, first_command)) = snapshot.read_set(WRITTEN_PAGES_FILE, MEMORY_PAGE)? {
                let first_use = snapshot.read_set(FIRST_USE_PAGES_FILE, MEMORY_PAGE)?;
                return Ok(Some(WrittenPages {
                    first_command,
                    first_use: first_use.map(|(_, file)| file),
                }));
            }
        }
        Ok(None)
    }

    /// Pages that a guest writes up to the end of its first command.
    pub(crate) fn written_page_set(&self) -> Result<Option<UnitSet>, SnapshotError> {
        let found = self.recorded(WRITTEN_PAGES_FILE, MEMORY_PAGE)?;
        Ok(found.map(|(set, _)| set))
    }

    /// Copies the working set and the written pages, as far as they are recorded, to the directory
    /// `dir` of a snapshot without parents. They are hints: a failure leaves them out.
    pub(crate) fn copy_working_set(&self, dir: &Path) {
        for (name, unit) in SET_FILES {
            if let Ok(Some((set, _))) = self.recorded(name, unit)
                && let Ok(to) = SnapshotDir::at(dir)
            {
                let index = LayerIndex {
                    zero: UnitSet::empty(set.units()),
                    stored: set,
                    unit,
                };
                let _ = to.create_once(name, &index.encode());
            }
        }
    }

    fn recorded(&self, name: &str, unit: u32) -> Result<Option<RecordedSet>, SnapshotError> {
        for snapshot in self.snapshots().iter().rev() {
            if let Some(found) = snapshot.read_set(name, unit)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
}
