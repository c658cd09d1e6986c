//! Storage of a disk: a read-only image, or an image with frozen layers (of snapshots) above it and
//! a copy-on-write overlay on top.
//!
//! The *overlay* is the file that receives the disk writes of a guest. A snapshot freezes the
//! overlay: the file becomes a *layer* of the snapshot, and a new overlay receives later writes.

use super::overlay::BlockOverlay;
use crate::machine::adjacent;
use crate::machine::bus::lock;
use crate::virtio::device::chain::GuestBuffers;
use jiffy_proto::layer::{DISK_BLOCK, LayerIndex};
use jiffy_proto::snapshot::FileIdentity;
use nix::fcntl::{FallocateFlags, fallocate};
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

/// Size of a logical block of the device, in bytes. Addresses and lengths of the guest are
/// multiples.
pub const SECTOR_BYTES: u64 = 512;
/// Unit of copy-on-write, in bytes.
pub const BLOCK_BYTES: u64 = 4096;
/// Maximum number of vectors per system call (`UIO_MAXIOV`).
const MAX_IOVECS: usize = 1024;

/// Files of a block device.
#[derive(Debug)]
pub enum DiskBackend {
    /// A single read-only file.
    ReadOnly(File),
    /// A read-only `base` and an `overlay` with the written blocks at the same offsets. `overlay`
    /// becomes as long as the disk. Its former content is never read.
    Overlay {
        /// Image, which determines the size of the disk.
        base: File,
        /// File for written blocks.
        overlay: File,
    },
    /// Same as `Overlay`, with frozen layers in between, oldest first.
    Layered {
        /// Image, which determines the size of the disk.
        base: File,
        /// Read-only files and their indexes.
        layers: Vec<(File, LayerIndex)>,
        /// File for written blocks.
        overlay: File,
    },
}

/// Layers and overlay of a writable disk.
#[derive(Debug)]
pub struct DiskLayers {
    /// Oldest first.
    layers: Vec<BlockOverlay>,
    overlay: BlockOverlay,
}

impl DiskLayers {
    /// Opens layers (oldest first) and an empty file for the guest's writes. [`Disk::revert`] puts
    /// them above the image of a disk of `bytes` bytes.
    pub fn open(layers: Vec<(File, LayerIndex)>, overlay: File, bytes: u64) -> io::Result<Self> {
        let layers = layers
            .into_iter()
            .map(|(file, index)| BlockOverlay::frozen(file, index, bytes));
        Ok(Self {
            layers: layers.collect::<io::Result<_>>()?,
            overlay: BlockOverlay::create(overlay, bytes)?,
        })
    }
}

/// File that currently receives a disk's writes. Can be read without the disk's lock, which is held
/// while the host's storage responds.
#[derive(Debug, Clone, Default)]
pub struct SharedOverlay(Arc<Mutex<Option<Arc<File>>>>);

impl SharedOverlay {
    /// Returns the file. `None` if the disk is read-only.
    pub fn file(&self) -> Option<Arc<File>> {
        lock(&self.0).clone()
    }
}

/// Disk of a fixed size.
#[derive(Debug)]
pub struct Disk {
    base: File,
    /// Oldest first.
    layers: Vec<BlockOverlay>,
    overlay: Option<BlockOverlay>,
    /// File of `overlay`.
    shared_overlay: SharedOverlay,
    bytes: u64,
}

impl Disk {
    /// Opens the backend. Its size must be a positive multiple of 512 bytes.
    pub fn new(backend: DiskBackend) -> io::Result<Self> {
        let (mut base, layers, overlay) = match backend {
            DiskBackend::ReadOnly(file) => (file, Vec::new(), None),
            DiskBackend::Overlay { base, overlay } => (base, Vec::new(), Some(overlay)),
            DiskBackend::Layered {
                base,
                layers,
                overlay,
            } => (base, layers, Some(overlay)),
        };
        // Unlike the metadata, the end of the file is also the size of a block device.
        let bytes = base.seek(SeekFrom::End(0))?;
        if bytes == 0 || !bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(invalid(format!(
                "{bytes} bytes are no whole number of sectors"
            )));
        }
        let layers = layers
            .into_iter()
            .map(|(file, index)| BlockOverlay::frozen(file, index, bytes))
            .collect::<io::Result<_>>()?;
        let overlay = overlay
            .map(|file| BlockOverlay::create(file, bytes))
            .transpose()?;
        let disk = Self {
            base,
            layers,
            overlay,
            shared_overlay: SharedOverlay::default(),
            bytes,
        };
        disk.share_overlay();
        Ok(disk)
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns whether the disk is read-only.
    pub fn read_only(&self) -> bool {
        self.overlay.is_none()
    }

    /// Returns a handle of the file that receives writes.
    pub fn overlay(&self) -> SharedOverlay {
        self.shared_overlay.clone()
    }

    /// Must be called after each change of the overlay.
    fn share_overlay(&self) {
        let file = self.overlay.as_ref().map(|overlay| overlay.file.clone());
        *lock(&self.shared_overlay.0) = file;
    }

    /// Returns the bit set of the 4 KiB blocks in the overlay: block `n` is bit `n % 64` of word `n
    /// / 64`. Empty without an overlay.
    pub fn owned_blocks(&self) -> &[u64] {
        self.overlay.as_ref().map_or(&[], |o| o.owned.words())
    }

    /// Turns the writes so far into an immutable layer, and directs further writes to `overlay`, an
    /// empty file. Returns the index of the new layer.
    pub fn freeze(&mut self, overlay: File) -> io::Result<LayerIndex> {
        let new = BlockOverlay::create(overlay, self.bytes)?;
        // A read-only disk has no overlay to replace.
        let Some(old) = self.overlay.replace(new) else {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        };
        let index = LayerIndex {
            stored: old.owned.clone(),
            ..LayerIndex::empty(DISK_BLOCK, self.bytes)
        };
        self.layers.push(old);
        self.share_overlay();
        Ok(index)
    }

    /// Undoes the last [`Self::freeze`]: later writes are copied to the frozen file, which receives
    /// writes again.
    pub fn thaw(&mut self) -> io::Result<()> {
        let (Some(top), Some(frozen)) = (&self.overlay, self.layers.last_mut()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        // If copying fails, reads are unaffected because the overlay still covers all copied
        // blocks: `thaw` can be repeated.
        frozen.copy_blocks_of(top, self.bytes)?;
        self.overlay = self.layers.pop();
        self.share_overlay();
        Ok(())
    }

    /// Replaces all layers above the image by `layers`, and returns the former layers.
    pub fn revert(&mut self, layers: DiskLayers) -> Option<DiskLayers> {
        // The image is not replaced: all snapshots of a sandbox are based on it.
        let before = std::mem::replace(&mut self.layers, layers.layers);
        let overlay = self.overlay.replace(layers.overlay)?;
        self.share_overlay();
        Some(DiskLayers {
            layers: before,
            overlay,
        })
    }

    /// Folds the frozen layer with the file `lower` into the next newer layer with the file
    /// `upper`. The file `upper` must already contain every block that only `lower` contained, at
    /// the same offset. Does nothing if the layers are not adjacent.
    pub fn fold_layers(&mut self, lower: FileIdentity, upper: FileIdentity) {
        let files = self.layers.iter().map(|layer| &*layer.file);
        let Some(at) = adjacent(files, lower, upper) else {
            return;
        };
        // Existing reads are not affected: the caller holds the device's lock.
        let folded = self.layers.remove(at);
        if let Some(layer) = self.layers.get_mut(at) {
            layer.owned = layer.owned.with(&folded.owned);
        }
    }

    /// Returns the number of the newest frozen layer that contains `block`. The oldest layer is 1;
    /// 0 is the base.
    fn layer_below(&self, block: u64) -> usize {
        self.layers
            .iter()
            .rposition(|layer| layer.owns(block))
            .map_or(0, |at| at + 1)
    }

    /// Returns the end of `offset..offset + bytes`. Fails if it is outside the disk.
    fn end(&self, offset: u64, bytes: usize) -> io::Result<u64> {
        u64::try_from(bytes)
            .ok()
            .and_then(|n| offset.checked_add(n))
            .filter(|&end| end <= self.bytes)
            .ok_or_else(|| invalid("beyond the disk"))
    }

    /// Fills `to` from the disk.
    pub fn read(&self, mut offset: u64, mut to: GuestBuffers<'_>) -> io::Result<()> {
        let end = self.end(offset, to.len())?;
        let Some(overlay) = &self.overlay else {
            return transfer(libc::preadv, &self.base, offset, to.iovecs().collect());
        };
        // The overlay is counted as an additional layer above the frozen layers.
        let source = |block| {
            if overlay.owns(block) {
                self.layers.len() + 1
            } else {
                self.layer_below(block)
            }
        };
        while offset < end {
            let mut block = offset / BLOCK_BYTES;
            let from = source(block);
            // Extend the run as long as the same file contains the blocks.
            while block * BLOCK_BYTES < end && source(block) == from {
                block += 1;
            }
            let stop = end.min(block * BLOCK_BYTES);
            let run = usize::try_from(stop - offset)
                .ok()
                .and_then(|n| to.take(n))
                .ok_or(io::ErrorKind::InvalidInput)?;
            let file = match from.checked_sub(1) {
                None => &self.base,
                Some(at) => self.layers.get(at).map_or(&*overlay.file, |l| &*l.file),
            };
            transfer(libc::preadv, file, offset, run.iovecs().collect())?;
            offset = stop;
        }
        Ok(())
    }

    /// Writes all of `from` to the disk.
    pub fn write(&mut self, offset: u64, from: &GuestBuffers<'_>) -> io::Result<()> {
        self.end(offset, from.len())?;
        self.write_iovecs(offset, from.len(), from.iovecs())
    }

    /// Writes `bytes` bytes, which the caller has checked to be inside the disk. If the overlay
    /// does not own the first or last block yet, the missing part of the block is read from below.
    /// This part and the data are written in one call.
    fn write_iovecs(
        &mut self,
        offset: u64,
        bytes: usize,
        data: impl Iterator<Item = libc::iovec>,
    ) -> io::Result<()> {
        let end = self.end(offset, bytes)?;
        let Some(overlay) = &self.overlay else {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        };
        if bytes == 0 {
            return Ok(());
        }
        // All blocks that the write touches. The overlay owns all of them afterwards.
        let blocks = offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES);
        let mut head = Vec::new();
        let start = blocks.start * BLOCK_BYTES;
        if start < offset && !overlay.owns(blocks.start) {
            head = self.read_below(start, offset)?;
        }
        let mut tail = Vec::new();
        // The last block of the disk may be shorter.
        let stop = self.bytes.min(blocks.end * BLOCK_BYTES);
        if end < stop && !overlay.owns(blocks.end - 1) {
            tail = self.read_below(end, stop)?;
        }
        let from = if head.is_empty() { offset } else { start };
        let mut iovecs = Vec::new();
        iovecs.extend(iovec(&mut head));
        iovecs.extend(data);
        iovecs.extend(iovec(&mut tail));
        // Head, data and tail are complete in the file before the blocks are owned: after a failed
        // write, the overlay owns no block of which a part is missing.
        transfer(libc::pwritev, &overlay.file, from, iovecs)?;
        if let Some(overlay) = &mut self.overlay {
            overlay.own(blocks);
        }
        Ok(())
    }

    /// Reads the bytes `start..end` of one block from below the overlay.
    fn read_below(&self, start: u64, end: u64) -> io::Result<Vec<u8>> {
        let file = match self.layer_below(start / BLOCK_BYTES).checked_sub(1) {
            Some(at) => self.layers.get(at).map_or(&self.base, |l| &*l.file),
            None => &self.base,
        };
        let bytes = usize::try_from(end - start).map_err(invalid)?;
        let mut data = vec![0; bytes];
        file.read_exact_at(&mut data, start)?;
        Ok(data)
    }

    /// Zeroes `bytes` bytes at `offset` and releases their whole blocks on the host. With
    /// `whole_blocks_only`, partial blocks retain their content, which a discard permits.
    pub fn zero(&mut self, offset: u64, bytes: u64, whole_blocks_only: bool) -> io::Result<()> {
        let end = self.end(offset, usize::try_from(bytes).unwrap_or(usize::MAX))?;
        let first = offset.div_ceil(BLOCK_BYTES);
        // The partial block at the end of the disk counts as whole, because it has no other bytes.
        let last = if end == self.bytes {
            end.div_ceil(BLOCK_BYTES)
        } else {
            end / BLOCK_BYTES
        };
        let (inner, inner_end) = (first * BLOCK_BYTES, self.bytes.min(last * BLOCK_BYTES));
        if inner < inner_end {
            let Some(overlay) = &mut self.overlay else {
                return Err(io::ErrorKind::ReadOnlyFilesystem.into());
            };
            // A hole reads as zeroes, and hides the blocks of the layers below when the overlay
            // owns it.
            punch(&overlay.file, inner, inner_end - inner)?;
            overlay.own(first..last);
        }
        if whole_blocks_only {
            return Ok(());
        }
        // The range contains no whole block.
        if inner >= inner_end {
            return self.write_zeroes(offset, end);
        }
        self.write_zeroes(offset, inner)?;
        self.write_zeroes(inner_end, end)
    }

    /// Zeroes less than two blocks by writing zeroes.
    fn write_zeroes(&mut self, start: u64, end: u64) -> io::Result<()> {
        let bytes = usize::try_from(end.saturating_sub(start)).map_err(invalid)?;
        let mut zeroes = vec![0; bytes];
        let data = iovec(&mut zeroes);
        self.write_iovecs(start, bytes, data.into_iter())
    }

    /// Syncs all writes to stable storage.
    pub fn sync(&self) -> io::Result<()> {
        self.overlay.as_ref().map_or(Ok(()), |o| o.file.sync_data())
    }
}

/// Returns the error of an invalid argument.
pub(super) fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}

/// Returns the vector of a buffer. `None` if the buffer is empty.
fn iovec(data: &mut [u8]) -> Option<libc::iovec> {
    (!data.is_empty()).then_some(libc::iovec {
        iov_base: data.as_mut_ptr().cast(),
        iov_len: data.len(),
    })
}

/// Replaces a range of a file by a hole, which takes no space and reads as zeroes.
fn punch(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let signed = |n| i64::try_from(n).map_err(invalid);
    fallocate(file, flags, signed(offset)?, signed(bytes)?)?;
    Ok(())
}

/// `preadv` or `pwritev`.
type VectoredIo = unsafe extern "C" fn(libc::c_int, *const libc::iovec, libc::c_int, i64) -> isize;

/// Moves all bytes of `iovecs` with as many calls of `preadv` or `pwritev` as needed.
fn transfer(
    call: VectoredIo,
    file: &File,
    mut offset: u64,
    mut iovecs: Vec<libc::iovec>,
) -> io::Result<()> {
    let mut rest = &mut iovecs[..];
    loop {
        // The guest may send empty buffers. The kernel would return 0 for them.
        while let [first, ..] = rest
            && first.iov_len == 0
        {
            rest = &mut rest[1..];
        }
        if rest.is_empty() {
            return Ok(());
        }
        let count = libc::c_int::try_from(rest.len().min(MAX_IOVECS)).unwrap_or(1);
        let at = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: `rest` has at least `count` vectors. Each refers to guest memory, which is mapped
        // while the `GuestBuffers` is borrowed, or to a buffer of the caller. The kernel moves
        // plain bytes. Concurrent accesses of the guest are equivalent to accesses during a
        // device's DMA.
        let moved = unsafe { call(file.as_raw_fd(), rest.as_ptr(), count, at) };
        let Ok(moved) = usize::try_from(moved) else {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Err(error);
        };
        // The file is shorter than the disk.
        if moved == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        offset = u64::try_from(moved)
            .ok()
            .and_then(|n| offset.checked_add(n))
            .ok_or(io::ErrorKind::InvalidInput)?;
        rest = advance(rest, moved);
    }
}

/// Skips the first `bytes` bytes.
fn advance(mut iovecs: &mut [libc::iovec], mut bytes: usize) -> &mut [libc::iovec] {
    while let [first, ..] = iovecs {
        if bytes < first.iov_len {
            first.iov_base = first.iov_base.wrapping_byte_add(bytes);
            first.iov_len -= bytes;
            break;
        }
        bytes -= first.iov_len;
        iovecs = &mut iovecs[1..];
    }
    iovecs
}
