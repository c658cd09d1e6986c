//! Recorded sets: the working set (chunks of memory that a restored guest touches first), and the
//! pages that a restored guest writes first. A *chunk* is 64 KiB of memory or of a disk.
//!
//! The *first use* is an action that a template may define: the request or command with which most
//! uses of its sandboxes start. It runs once in a temporary guest to record these sets. The *first
//! command* of that guest is a simple command such as `true`, which runs before the first use.
//!
//! A recorded set is a hint without a checksum: if it is missing or wrong, restores are only
//! slower.

use crate::snapshot::read_index;
use crate::snapshot_dir::SnapshotDir;
use crate::{Snapshot, SnapshotError};
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK, MEMORY_PAGE, UnitSet};
use std::fs::File;
use std::path::Path;

/// File with the working set.
pub(crate) const WORKING_SET_FILE: &str = "working-set.index";
/// File with the pages written until the end of the first command.
pub(crate) const WRITTEN_PAGES_FILE: &str = "written-pages.index";
/// File with the pages written until the end of the first use.
pub(crate) const FIRST_USE_PAGES_FILE: &str = "first-use-pages.index";
/// Files of recorded sets with their units, in bytes.
pub(crate) const SET_FILES: [(&str, u32); 3] = [
    (WORKING_SET_FILE, MEMORY_CHUNK),
    (WRITTEN_PAGES_FILE, MEMORY_PAGE),
    (FIRST_USE_PAGES_FILE, MEMORY_PAGE),
];

/// Maximum number of chunks of a working set recorded at a pause: 64 MiB. If a guest has touched
/// more memory since its restore, most of the touched chunks belong to later work. They would not
/// predict the first accesses of a restored guest.
const MAX_TOUCHED_CHUNKS: u64 = 1024;

/// Recorded set, and the file that contains it.
pub(crate) type RecordedSet = (UnitSet, File);

/// Indexes of the pages that a restored guest writes first.
#[derive(Debug)]
pub struct WrittenPages {
    /// Pages written until the end of the first command.
    pub first_command: File,
    /// Pages written until the end of the first use. `None` if the template defines no first use.
    pub first_use: Option<File>,
}

impl Snapshot {
    /// Stores the working set. The `stored` units of `index` are the touched chunks. An existing
    /// working set is not replaced.
    pub fn put_working_set(&self, index: &File) -> Result<(), SnapshotError> {
        self.put_set(WORKING_SET_FILE, MEMORY_CHUNK, index)
    }

    /// Stores the working set of a paused guest: the chunks that the guest touched since its
    /// restore. An index that is empty or has more than 1,024 chunks (64 MiB) is ignored. Returns
    /// `false` if the index was ignored. An existing working set is not replaced.
    pub fn put_touched(&self, index: &File) -> Result<bool, SnapshotError> {
        let path = self.path().join(WORKING_SET_FILE);
        let length = index.metadata().map_err(SnapshotError::io(&path))?.len();
        // The VMM could not determine the chunks, and left the file empty.
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

    /// Stores the pages written until the end of the first command: the `stored` units of `index`.
    /// An existing index is not replaced.
    pub fn put_written_pages(&self, index: &File) -> Result<(), SnapshotError> {
        self.put_set(WRITTEN_PAGES_FILE, MEMORY_PAGE, index)
    }

    /// Stores the pages written until the end of the first use: the `stored` units of `index`. An
    /// existing index is not replaced.
    pub fn put_first_use_pages(&self, index: &File) -> Result<(), SnapshotError> {
        self.put_set(FIRST_USE_PAGES_FILE, MEMORY_PAGE, index)
    }

    /// Returns the touched chunks and the file that contains them. `None` if not recorded.
    pub fn working_set(&self) -> Result<Option<RecordedSet>, SnapshotError> {
        self.read_set(WORKING_SET_FILE, MEMORY_CHUNK)
    }

    fn put_set(&self, name: &str, unit: u32, index: &File) -> Result<(), SnapshotError> {
        let path = self.path().join(name);
        let index = read_index(index).map_err(SnapshotError::io(&path))?;
        self.fits(&path, &index, unit)?;
        SnapshotDir::at(self.path())?.create_once(name, &index.encode())
    }

    /// Reads a recorded set of units of the memory. `None` if the snapshot has no such file.
    pub(crate) fn read_set(
        &self,
        name: &str,
        unit: u32,
    ) -> Result<Option<RecordedSet>, SnapshotError> {
        let Some(file) = SnapshotDir::at(self.path())?.find(name)? else {
            return Ok(None);
        };
        let path = self.path().join(name);
        // An index of this memory is not longer. The files of an imported snapshot are untrusted.
        let limit = LayerIndex::encoded_len(self.units(unit)) as u64;
        let index = LayerIndex::read(&file, limit).map_err(|e| SnapshotError::damaged(&path, e))?;
        self.fits(&path, &index, unit)?;
        Ok(Some((index.stored, file)))
    }

    fn fits(&self, path: &Path, index: &LayerIndex, unit: u32) -> Result<(), SnapshotError> {
        if index.unit == unit && index.units() == self.units(unit) {
            return Ok(());
        }
        Err(SnapshotError::damaged(path, "its memory has another size"))
    }

    /// Returns the number of units of `unit` bytes of the memory.
    fn units(&self, unit: u32) -> u64 {
        self.manifest().memory.bytes.div_ceil(u64::from(unit))
    }
}
