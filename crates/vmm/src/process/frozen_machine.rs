//! [`FrozenMachine`]: the parts of a paused machine that a snapshot contains. They are collected
//! while the guest is paused, and written while it runs again.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. A *chunk* is 64 KiB of memory. A *private* page of the guest belongs to this
//! process alone, because the guest has written it or the VMM has copied it. To *freeze* a disk is
//! to turn its writes into a layer and to direct further writes to a new overlay.
//!
//! The guest waits while they are collected. This step therefore copies the state of the devices
//! and finds the written pages, but writes no memory to files.

use super::{Vm, micros};
use crate::error::VmmError;
use crate::machine::Machine;
use crate::machine::bus::lock;
use crate::snapshot::linear_memory::{CHUNK_SIZE, LinearMemory};
use crate::snapshot::pagemap_scan::{PrivatePagesFound, scan_private};
use crate::snapshot::revert_memory::pages_to_compare;
use crate::virtio::blk::Block;
use jiffy_proto::layer::{DISK_BLOCK, LayerIndex, MEMORY_CHUNK, MEMORY_PAGE, UnitSet};
use jiffy_proto::snapshot::FreezePhases;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Instant;

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

    /// Returns the numbers of the frozen disks' devices.
    pub fn devices(&self) -> Vec<usize> {
        self.disks.iter().map(|(device, ..)| *device).collect()
    }
}

impl Vm {
    /// Saves the state of the paused machine and freezes its disks. On failure, the disks are
    /// unchanged.
    pub(super) fn freeze(
        &mut self,
        disks: Vec<(File, File)>,
        pagemap: Option<&File>,
        linear: &LinearMemory,
        phases: &mut FreezePhases,
    ) -> Result<FrozenMachine, VmmError> {
        let reading = Instant::now();
        let state = self.machine.save(&self.vcpus)?.encode()?;
        phases.state_us = micros(reading);
        let scanning = Instant::now();
        let private_pages = pagemap
            .map(|file| scan_private(file, linear))
            .transpose()
            .map_err(|e| VmmError::host("searching for written pages", e))?;
        let pages = match &private_pages {
            Some(private) => self.pages_to_compare(private)?,
            None => UnitSet::full(linear.bytes() / u64::from(MEMORY_PAGE)),
        };
        let mut candidates = pages.coarser(CHUNK_SIZE / u64::from(MEMORY_PAGE));
        // Exclude memory that is not fetched yet: it equals the layers below, but would read as
        // zero in the writer process. Check this after the search: memory that is missing now had
        // no page during the search.
        if let Some(lazy) = &self.machine.lazy {
            lazy.missing()
                .iter()
                .for_each(|chunk| candidates.remove(chunk));
        }
        phases.scan_us = micros(scanning);
        Ok(FrozenMachine {
            state,
            private_pages: private_pages.map(|private| private.all),
            candidates,
            pages,
            disks: self.freeze_disks(disks)?,
        })
    }

    /// Returns the pages that may differ from the layers. `private` are the guest's private pages.
    fn pages_to_compare(&self, private: &PrivatePagesFound) -> Result<UnitSet, VmmError> {
        let Machine {
            mapped,
            layers,
            captured,
            ..
        } = &self.machine;
        let captured = captured.as_ref();
        let pages = pages_to_compare(&private.all, mapped, layers, captured)?;
        Ok(match captured {
            Some(captured) => pages.without(&captured.unwritten(private)),
            None => pages,
        })
    }

    /// Freezes the disks: each receives the overlay in `disks`. On failure, the disks are
    /// unchanged.
    pub(super) fn freeze_disks(
        &mut self,
        disks: Vec<(File, File)>,
    ) -> Result<Vec<FrozenDisk>, VmmError> {
        let writable = self.machine.writable_disks.iter();
        let writable: Vec<usize> = writable.map(|disk| disk.device).collect();
        let mut frozen: Vec<FrozenDisk> = Vec::new();
        for (at, (overlay, index_file)) in writable.into_iter().zip(disks) {
            let Some(device) = self.machine.devices.get(at) else {
                continue;
            };
            let result = lock(device).device_mut(|block: &mut Block| block.freeze(overlay));
            match result {
                Some(Ok(index)) => frozen.push((at, index, index_file)),
                Some(Err(e)) => {
                    self.thaw(frozen.iter().map(|(device, ..)| *device).collect())?;
                    return Err(VmmError::host("preparing a disk's new overlay", e));
                }
                None => {}
            }
        }
        Ok(frozen)
    }
}
