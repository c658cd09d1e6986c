//! File that contains some blocks of a disk: either the writable overlay, or the frozen layer of a
//! snapshot.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. The *overlay* is the file that receives the disk writes of a guest.

use super::disk::{BLOCK_BYTES, invalid};
use jiffy_proto::layer::{DISK_BLOCK, LayerIndex, MAX_UNITS, UnitSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Invariant: a block is read from this file exactly if the block is in `owned`. A block is added
/// to `owned` only after all of its bytes are in the file.
#[derive(Debug)]
pub(super) struct BlockOverlay {
    pub file: Arc<File>,
    pub owned: UnitSet,
}

impl BlockOverlay {
    /// Creates an empty overlay of a disk of `bytes` bytes. The former content of `file` is never
    /// read.
    pub fn create(file: File, bytes: u64) -> io::Result<Self> {
        let units = bytes.div_ceil(BLOCK_BYTES);
        if units > MAX_UNITS {
            return Err(invalid(format!("{bytes} bytes are too large a disk")));
        }
        // A sparse file: blocks that are not written take no space.
        file.set_len(bytes)?;
        Ok(Self {
            file: Arc::new(file),
            owned: UnitSet::empty(units),
        })
    }

    /// Opens a snapshot's layer of a disk of `bytes` bytes.
    pub fn frozen(file: File, index: LayerIndex, bytes: u64) -> io::Result<Self> {
        let length = file.metadata()?.len();
        let fits = index.unit == DISK_BLOCK && index.units() == bytes.div_ceil(BLOCK_BYTES);
        if !fits || length != bytes {
            return Err(invalid(format!(
                "the layer has {length} bytes, but the disk has {bytes} bytes"
            )));
        }
        Ok(Self {
            file: Arc::new(file),
            // Zero blocks are stored as holes, so `index.zero` is empty for disks.
            owned: index.stored,
        })
    }

    /// Returns whether the file contains a block.
    pub fn owns(&self, block: u64) -> bool {
        self.owned.contains(block)
    }

    /// Records that the file contains `blocks`.
    pub fn own(&mut self, blocks: Range<u64>) {
        self.owned.insert_range(blocks);
    }

    /// Copies all blocks of `newer` into this file. `bytes` is the size of the disk.
    pub fn copy_blocks_of(&mut self, newer: &Self, bytes: u64) -> io::Result<()> {
        let mut data = vec![0; usize::try_from(BLOCK_BYTES).map_err(invalid)?];
        for block in newer.owned.iter() {
            let start = block * BLOCK_BYTES;
            // The last block of a disk may be shorter.
            let length = usize::try_from(BLOCK_BYTES.min(bytes - start)).map_err(invalid)?;
            newer.file.read_exact_at(&mut data[..length], start)?;
            self.file.write_all_at(&data[..length], start)?;
            // Add the block only after it is complete (invariant of this type).
            self.own(block..block + 1);
        }
        Ok(())
    }
}
