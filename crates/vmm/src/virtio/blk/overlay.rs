//! A file that holds some blocks of a disk.

use super::disk::{BLOCK, invalid};
use jiffy_proto::layer::{DISK_BLOCK, LayerIndex, MAX_UNITS, UnitSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Invariant: a block is read from this file exactly if it is in `owned`, and it is only after every byte of it is in
/// the file.
#[derive(Debug)]
pub(super) struct Overlay {
    pub file: File,
    pub owned: UnitSet,
}

impl Overlay {
    /// Nothing written yet, of a disk of `bytes` bytes. What `file` held before is never read.
    pub fn create(file: File, bytes: u64) -> io::Result<Self> {
        let units = bytes.div_ceil(BLOCK);
        if units > MAX_UNITS {
            return Err(invalid(format!("{bytes} bytes are too large a disk")));
        }
        file.set_len(bytes)?;
        Ok(Self {
            file,
            owned: UnitSet::empty(units),
        })
    }

    /// A layer of a snapshot of a disk of `bytes` bytes.
    pub fn frozen(file: File, index: LayerIndex, bytes: u64) -> io::Result<Self> {
        let length = file.metadata()?.len();
        let fits = index.unit == DISK_BLOCK && index.units() == bytes.div_ceil(BLOCK);
        if !fits || length != bytes {
            return Err(invalid(format!(
                "a layer of {length} bytes is not one of this disk of {bytes} bytes"
            )));
        }
        Ok(Self {
            file,
            owned: index.stored,
        })
    }

    pub fn owns(&self, block: u64) -> bool {
        self.owned.contains(block)
    }

    pub fn own(&mut self, blocks: Range<u64>) {
        self.owned.insert_range(blocks);
    }

    /// Takes all blocks of `newer`, of a disk of `bytes` bytes.
    pub fn take_over(&mut self, newer: &Self, bytes: u64) -> io::Result<()> {
        let mut data = vec![0; usize::try_from(BLOCK).map_err(invalid)?];
        for block in newer.owned.iter() {
            let start = block * BLOCK;
            let length = usize::try_from(BLOCK.min(bytes - start)).map_err(invalid)?;
            newer.file.read_exact_at(&mut data[..length], start)?;
            self.file.write_all_at(&data[..length], start)?;
            self.own(block..block + 1);
        }
        Ok(())
    }
}
