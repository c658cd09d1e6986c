//! [`FrozenMachine`]: the parts of a paused machine that a snapshot contains. They are collected
//! while the guest is paused, and written while it runs again.

use crate::error::VmmError;
use jiffy_proto::layer::{DISK_BLOCK, LayerIndex, MEMORY_CHUNK, MEMORY_PAGE, UnitSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Number of a frozen disk's device, with the index and the file of its layer.
pub(super) type FrozenDisk = (usize, LayerIndex, File);

/// State of a paused machine.
pub(super) struct FrozenMachine {
    /// Encoded state. Empty in a snapshot of the disks.
    pub state: Vec<u8>,
    /// Guest's private pages. `None` if they were not searched.
    pub private_pages: Option<UnitSet>,
    /// Chunks that may differ from the layers below.
    pub candidates: UnitSet,
    /// Pages that may differ from the layers below.
    pub pages: UnitSet,
    pub disks: Vec<FrozenDisk>,
}

impl FrozenMachine {
    /// Returns a machine of which only the disks are written.
    pub fn of_disks(disks: Vec<FrozenDisk>, bytes_of_memory: u64) -> Self {
        Self {
            state: Vec::new(),
            private_pages: None,
            candidates: UnitSet::empty(bytes_of_memory / u64::from(MEMORY_CHUNK)),
            pages: UnitSet::empty(bytes_of_memory / u64::from(MEMORY_PAGE)),
            disks,
        }
    }

    /// Writes all state except memory.
    pub fn write(&self, state: &File) -> Result<(), VmmError> {
        let failed = |e: io::Error| VmmError::host("writing the snapshot's state", e);
        state.write_all_at(&self.state, 0).map_err(failed)?;
        for (_, index, file) in &self.disks {
            index.write(file).map_err(failed)?;
        }
        Ok(())
    }

    /// Returns the maximum bytes of layers, indexes and state, as if all candidates were stored.
    pub fn max_bytes(&self, chunks_of_memory: u64) -> u64 {
        let chunks = self.candidates.count().saturating_mul(MEMORY_CHUNK.into());
        let index = LayerIndex::encoded_len(chunks_of_memory) as u64;
        let disks = self.disks.iter().map(|(_, index, _)| {
            let blocks = index.stored.count().saturating_mul(DISK_BLOCK.into());
            blocks.saturating_add(LayerIndex::encoded_len(index.units()) as u64)
        });
        let state = self.state.len() as u64;
        disks.fold(chunks + index + state, u64::saturating_add)
    }

    pub fn devices(&self) -> Vec<usize> {
        self.disks.iter().map(|(device, ..)| *device).collect()
    }
}
