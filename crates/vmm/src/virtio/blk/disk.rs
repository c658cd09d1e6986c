//! Where a disk's bytes live: a file as it is, or a base file under frozen layers and a copy-on-write overlay.

use super::overlay::Overlay;
use crate::virtio::device::chain::Buffers;
use jiffy_proto::layer::{DISK_BLOCK, LayerIndex};
use nix::fcntl::{FallocateFlags, fallocate};
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// Logical block of the device: what guest addresses and lengths are multiples of.
pub const SECTOR: u64 = 512;
/// Unit of copy-on-write.
pub const BLOCK: u64 = 4096;
/// Most pieces that one vectored system call takes (`UIO_MAXIOV`).
const MAX_IOVECS: usize = 1024;

/// What a block device is made of.
#[derive(Debug)]
pub enum Backend {
    /// The file as it is, never written.
    ReadOnly(File),
    /// `base` as it is, with written blocks kept at the same place in `overlay`, which becomes as long as the disk.
    /// What `overlay` held before is never read.
    Overlay {
        /// Image below; its size is the size of the disk.
        base: File,
        /// Where written blocks go.
        overlay: File,
    },
    /// As `Overlay`, with frozen layers in between, oldest first.
    Layered {
        /// Image below; its size is the size of the disk.
        base: File,
        /// Files and what they hold; never written.
        layers: Vec<(File, LayerIndex)>,
        /// Where written blocks go.
        overlay: File,
    },
}

/// A disk of a fixed size.
#[derive(Debug)]
pub struct Disk {
    base: File,
    /// Oldest first.
    layers: Vec<Overlay>,
    overlay: Option<Overlay>,
    bytes: u64,
}

impl Disk {
    /// Opens the backend; its size must be a multiple of 512 bytes and not 0.
    pub fn new(backend: Backend) -> io::Result<Self> {
        let (mut base, layers, overlay) = match backend {
            Backend::ReadOnly(file) => (file, Vec::new(), None),
            Backend::Overlay { base, overlay } => (base, Vec::new(), Some(overlay)),
            Backend::Layered {
                base,
                layers,
                overlay,
            } => (base, layers, Some(overlay)),
        };
        let bytes = base.seek(SeekFrom::End(0))?;
        if bytes == 0 || !bytes.is_multiple_of(SECTOR) {
            return Err(invalid(format!(
                "{bytes} bytes are no whole number of sectors"
            )));
        }
        let layers = layers
            .into_iter()
            .map(|(file, index)| Overlay::frozen(file, index, bytes))
            .collect::<io::Result<_>>()?;
        let overlay = overlay
            .map(|file| Overlay::create(file, bytes))
            .transpose()?;
        Ok(Self {
            base,
            layers,
            overlay,
            bytes,
        })
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether nothing can be written.
    pub fn read_only(&self) -> bool {
        self.overlay.is_none()
    }

    /// The file that takes what is written.
    pub fn overlay(&self) -> Option<&File> {
        self.overlay.as_ref().map(|o| &o.file)
    }

    /// Which 4 KiB blocks the overlay holds: block `n` is bit `n % 64` of word `n / 64`. Empty without overlay.
    pub fn owned_blocks(&self) -> &[u64] {
        self.overlay.as_ref().map_or(&[], |o| o.owned.words())
    }

    /// Makes what was written so far a layer that is never written again, and lets the guest write to `overlay`, an empty
    /// file. Returns the index of the new layer.
    pub fn freeze(&mut self, overlay: File) -> io::Result<LayerIndex> {
        let new = Overlay::create(overlay, self.bytes)?;
        let Some(old) = self.overlay.replace(new) else {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        };
        let index = LayerIndex {
            stored: old.owned.clone(),
            ..LayerIndex::empty(DISK_BLOCK, self.bytes)
        };
        self.layers.push(old);
        Ok(index)
    }

    /// Undoes the last [`Self::freeze`]: what was written since goes to the file that was frozen, which is written on.
    pub fn thaw(&mut self) -> io::Result<()> {
        let (Some(top), Some(frozen)) = (&self.overlay, self.layers.last_mut()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        frozen.take_over(top, self.bytes)?;
        self.overlay = self.layers.pop();
        Ok(())
    }

    /// The number of the layer below the overlay that holds `block`, from 1; 0 is the base.
    fn below(&self, block: u64) -> usize {
        self.layers
            .iter()
            .rposition(|layer| layer.owns(block))
            .map_or(0, |at| at + 1)
    }

    /// The end of `offset..offset + bytes`, if that lies inside the disk.
    fn end(&self, offset: u64, bytes: usize) -> io::Result<u64> {
        u64::try_from(bytes)
            .ok()
            .and_then(|n| offset.checked_add(n))
            .filter(|&end| end <= self.bytes)
            .ok_or_else(|| invalid("beyond the disk"))
    }

    /// Fills `to` from the disk.
    pub fn read(&self, mut offset: u64, mut to: Buffers<'_>) -> io::Result<()> {
        let end = self.end(offset, to.len())?;
        let Some(overlay) = &self.overlay else {
            return transfer(libc::preadv, &self.base, offset, to.iovecs().collect());
        };
        // The overlay counts as one more than the layers below it.
        let source = |block| match overlay.owns(block) {
            true => self.layers.len() + 1,
            false => self.below(block),
        };
        while offset < end {
            let mut block = offset / BLOCK;
            let from = source(block);
            while block * BLOCK < end && source(block) == from {
                block += 1;
            }
            let stop = end.min(block * BLOCK);
            let run = usize::try_from(stop - offset)
                .ok()
                .and_then(|n| to.take(n))
                .ok_or(io::ErrorKind::InvalidInput)?;
            let file = match from.checked_sub(1) {
                None => &self.base,
                Some(at) => self.layers.get(at).map_or(&overlay.file, |l| &l.file),
            };
            transfer(libc::preadv, file, offset, run.iovecs().collect())?;
            offset = stop;
        }
        Ok(())
    }

    /// Writes all of `from` to the disk.
    pub fn write(&mut self, offset: u64, from: &Buffers<'_>) -> io::Result<()> {
        self.end(offset, from.len())?;
        self.write_iovecs(offset, from.len(), from.iovecs())
    }

    /// Writes `bytes` bytes, which the caller has checked to lie inside the disk. What a first or last block that
    /// the overlay does not own yet misses is read from below and written around the data, in one call.
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
        let blocks = offset / BLOCK..end.div_ceil(BLOCK);
        let mut head = Vec::new();
        let start = blocks.start * BLOCK;
        if start < offset && !overlay.owns(blocks.start) {
            head = self.read_below(start, offset)?;
        }
        let mut tail = Vec::new();
        let stop = self.bytes.min(blocks.end * BLOCK);
        if end < stop && !overlay.owns(blocks.end - 1) {
            tail = self.read_below(end, stop)?;
        }
        let from = if head.is_empty() { offset } else { start };
        let mut iovecs = Vec::new();
        iovecs.extend(iovec(&mut head));
        iovecs.extend(data);
        iovecs.extend(iovec(&mut tail));
        transfer(libc::pwritev, &overlay.file, from, iovecs)?;
        if let Some(overlay) = &mut self.overlay {
            overlay.own(blocks);
        }
        Ok(())
    }

    /// The bytes `start..end` of one block, as they are below the overlay.
    fn read_below(&self, start: u64, end: u64) -> io::Result<Vec<u8>> {
        let file = match self.below(start / BLOCK).checked_sub(1) {
            Some(at) => self.layers.get(at).map_or(&self.base, |l| &l.file),
            None => &self.base,
        };
        let bytes = usize::try_from(end - start).map_err(invalid)?;
        let mut data = vec![0; bytes];
        file.read_exact_at(&mut data, start)?;
        Ok(data)
    }

    /// Makes `bytes` bytes at `offset` read as zeroes and gives their whole blocks back to the host. With
    /// `whole_blocks_only` the rest is left as it is, which is all that a discard promises.
    pub fn zero(&mut self, offset: u64, bytes: u64, whole_blocks_only: bool) -> io::Result<()> {
        let end = self.end(offset, usize::try_from(bytes).unwrap_or(usize::MAX))?;
        let first = offset.div_ceil(BLOCK);
        let last = if end == self.bytes {
            end.div_ceil(BLOCK)
        } else {
            end / BLOCK
        };
        let (inner, inner_end) = (first * BLOCK, self.bytes.min(last * BLOCK));
        if inner < inner_end {
            let Some(overlay) = &mut self.overlay else {
                return Err(io::ErrorKind::ReadOnlyFilesystem.into());
            };
            punch(&overlay.file, inner, inner_end - inner)?;
            overlay.own(first..last);
        }
        if whole_blocks_only {
            return Ok(());
        }
        if inner >= inner_end {
            return self.write_zeroes(offset, end);
        }
        self.write_zeroes(offset, inner)?;
        self.write_zeroes(inner_end, end)
    }

    /// Zeroes less than two blocks by writing.
    fn write_zeroes(&mut self, start: u64, end: u64) -> io::Result<()> {
        let bytes = usize::try_from(end.saturating_sub(start)).map_err(invalid)?;
        let mut zeroes = vec![0; bytes];
        let data = iovec(&mut zeroes);
        self.write_iovecs(start, bytes, data.into_iter())
    }

    /// Brings everything written to stable storage.
    pub fn sync(&self) -> io::Result<()> {
        self.overlay.as_ref().map_or(Ok(()), |o| o.file.sync_data())
    }
}

pub(super) fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}

fn iovec(data: &mut [u8]) -> Option<libc::iovec> {
    (!data.is_empty()).then_some(libc::iovec {
        iov_base: data.as_mut_ptr().cast(),
        iov_len: data.len(),
    })
}

fn punch(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let signed = |n| i64::try_from(n).map_err(invalid);
    fallocate(file, flags, signed(offset)?, signed(bytes)?)?;
    Ok(())
}

type Vectored = unsafe extern "C" fn(libc::c_int, *const libc::iovec, libc::c_int, i64) -> isize;

/// Moves all bytes of `iovecs` with `preadv` or `pwritev`, however many calls that takes.
fn transfer(
    call: Vectored,
    file: &File,
    mut offset: u64,
    mut iovecs: Vec<libc::iovec>,
) -> io::Result<()> {
    let mut rest = &mut iovecs[..];
    loop {
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
        // SAFETY: `rest` holds at least `count` vectors. Each names guest memory, which stays mapped for as long as
        // the borrowed `Buffers` it came from, or a buffer that the caller owns. The kernel moves plain bytes; for
        // guest memory racing accesses are as good as a device's DMA.
        let moved = unsafe { call(file.as_raw_fd(), rest.as_ptr(), count, at) };
        let Ok(moved) = usize::try_from(moved) else {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Err(error);
        };
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

/// Leaves out the first `bytes` bytes.
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
