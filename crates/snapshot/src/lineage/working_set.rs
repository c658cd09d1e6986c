//! Working set of a lineage: the chunks of memory that a restored guest touches first, as recorded
//! in its snapshots.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors.
//!
//! The *first command* is a simple command such as `true`. The *first use* is the request or
//! command with which most uses of a template's sandboxes start. Both run in a temporary guest, to
//! record the pages that they write.

use crate::snapshot::working_set::{
    FIRST_USE_PAGES_FILE, RecordedSet, SET_FILES, WORKING_SET_FILE, WRITTEN_PAGES_FILE,
};
use crate::snapshot_dir::SnapshotDir;
use crate::{Lineage, SnapshotError, WrittenPages};
use jiffy_proto::layer::{LayerIndex, MEMORY_CHUNK, MEMORY_PAGE, UnitSet};
use std::path::Path;

impl Lineage {
    /// Returns the working set of the newest snapshot that has one. Chunk numbers are the same in
    /// all snapshots of a lineage, so an ancestor's working set covers most of a descendant's.
    pub fn working_set(&self) -> Result<Option<RecordedSet>, SnapshotError> {
        self.recorded(WORKING_SET_FILE, MEMORY_CHUNK)
    }

    /// Returns the written pages of the newest snapshot that has recorded them.
    pub fn written_pages(&self) -> Result<Option<WrittenPages>, SnapshotError> {
        for snapshot in self.memory_snapshots().iter().rev() {
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

    /// Returns the pages that a guest writes until the end of its first command.
    pub(crate) fn written_page_set(&self) -> Result<Option<UnitSet>, SnapshotError> {
        let recorded = self.recorded(WRITTEN_PAGES_FILE, MEMORY_PAGE)?;
        Ok(recorded.map(|(set, _)| set))
    }

    /// Copies the recorded working set and written pages to the directory `dir` of a merged
    /// snapshot. Errors are ignored because the sets are hints.
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
                // Ignore the error: the set is only a hint.
                let _ = to.create_once(name, &index.encode());
            }
        }
    }

    /// Returns the recorded set `name` of the newest snapshot that has one.
    fn recorded(&self, name: &str, unit: u32) -> Result<Option<RecordedSet>, SnapshotError> {
        for snapshot in self.memory_snapshots().iter().rev() {
            if let Some(recorded) = snapshot.read_set(name, unit)? {
                return Ok(Some(recorded));
            }
        }
        Ok(None)
    }
}
