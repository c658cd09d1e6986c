//! Folding: two adjacent layers are merged into the upper layer while the guest runs.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. A *unit* is the smallest part that a layer stores. The *index* of a layer
//! lists its units. The *controller* is the process that drives this VMM: the daemon.
//!
//! The controller copies units that only the lower layer stores into the files of the upper layer,
//! at offsets that the index of the upper layer does not claim. The machine then claims these
//! offsets for the upper layer and closes the lower one, which changes no byte that the guest
//! reads. Without this, the file of a removed snapshot would take disk space until the VM stops.

use super::Machine;
use crate::virtio::blk::Block;
use jiffy_proto::snapshot::{FileIdentity, FoldedLayers};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::TryLockError;

/// Returns the identity of a layer's file.
pub(crate) fn file_identity(file: &File) -> io::Result<FileIdentity> {
    let metadata = file.metadata()?;
    Ok(FileIdentity {
        device: metadata.dev(),
        inode: metadata.ino(),
    })
}

/// Returns the position of `lower` in `files`, which are sorted from oldest to newest. `None` if
/// `upper` does not follow directly, or if a file cannot be identified.
pub(crate) fn adjacent<'a>(
    files: impl Iterator<Item = &'a File>,
    lower: FileIdentity,
    upper: FileIdentity,
) -> Option<usize> {
    let identities: Vec<FileIdentity> = files.map(file_identity).collect::<io::Result<_>>().ok()?;
    identities
        .windows(2)
        .position(|pair| pair == [lower, upper])
}

impl Machine {
    /// Folds the adjacent layers of memory and all disks. Returns `false` if a disk is in use: the
    /// caller must repeat the call later.
    pub fn fold_layers(&mut self, layers: &FoldedLayers) -> bool {
        let (lower, upper) = (&layers.lower, &layers.upper);
        // No lock is required: only the event loop uses the memory layers.
        self.layers.fold(lower.memory, upper.memory);
        let mut done = true;
        let identities = lower.disks.iter().zip(&upper.disks);
        for (disk, (lower, upper)) in self.writable_disks.iter().zip(identities) {
            let Some(device) = self.devices.get(disk.device) else {
                continue;
            };
            // The disk thread holds the lock while storage responds. The event loop must not wait
            // for it.
            let mut device = match device.try_lock() {
                Ok(device) => device,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    done = false;
                    continue;
                }
            };
            // Repeated folds are harmless: layers that are no longer adjacent are not found again.
            device.device_mut(|block: &mut Block| block.fold_layers(*lower, *upper));
        }
        done
    }
}
