//! Presence bitmaps of a layer, and locks of chunks that are being fetched. The bitmaps are in the
//! file `<root>.present`, where *root* is the hash that identifies the content of the layer.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. A *chunk* is 64 KiB of memory or of a disk.
//!
//! | offset | bytes | content |
//! |---|---|---|
//! | 0 | 8 | magic |
//! | 8 | 4 | version |
//! | 12 | 4 | bytes per chunk |
//! | 16 | 8 | length of the layer |
//! | 24 | 16 | id of the boot in which the second bitmap was written |
//! | 40 | 24 | 0 |
//! | 64 | n | first bitmap: persisted chunks; chunk `c` at bit `c % 8` of byte `c / 8` |
//! | 64 + n | n | second bitmap: written chunks |
//!
//! A chunk is written before its bit in the second bitmap is set. Both survive the exit of a
//! process, because both are in the page cache. If the host crashes, the chunk may be lost although
//! its bit is set. Therefore only the first bitmap counts after a reboot: its bits are set after
//! their chunks are synced.
//!
//! The locks are open file description locks at offsets far beyond the end of the file. The kernel
//! releases them when the process that holds them exits.

use crate::layer::chunks_of;
use crate::manifest::CHUNK_BYTES;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, Flock, fcntl};
use nix::libc;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::{Mutex, MutexGuard};

/// First bytes of the file.
const MAGIC: [u8; 8] = *b"JIFFYPRE";
/// Version of the format.
const VERSION: u32 = 2;
/// Length of the header in bytes, after which the bitmaps follow.
const HEADER_BYTES: usize = 64;
/// Offset of the id of the boot.
const BOOT_AT: usize = 24;
/// Offset of the lock of the bitmaps.
const BITMAPS_LOCK: u64 = 1 << 40;
/// Offset of the lock of chunk 0.
const CHUNK_LOCKS: u64 = 1 << 41;

/// Id of a boot of the host: the first bytes of a hash of the kernel's boot id.
pub(super) type BootId = [u8; 16];

/// Bitmaps of present chunks.
#[derive(Debug)]
pub(super) struct Presence {
    /// Bitmap file, with a shared lock (flock(2)). The cache evicts a layer only while it holds the
    /// exclusive lock of this file, so that a layer in use is not evicted.
    file: Flock<File>,
    /// One bit per chunk that is known to be present.
    bits: Mutex<Vec<u8>>,
}

impl Presence {
    /// Reads the bitmaps in `file` of the layer of `bytes` bytes in `data`. Clears them if the
    /// header does not match or `data` has another length.
    pub fn open(file: Flock<File>, data: &File, bytes: u64, boot: &BootId) -> io::Result<Self> {
        let length = bitmap_bytes(bytes);
        let header = header(bytes, boot);
        let _lock = RangeLock::wait(&file, BITMAPS_LOCK)?;
        let mut content = vec![0; HEADER_BYTES + 2 * length];
        let whole = file.read_exact_at(&mut content, 0).is_ok()
            && content[..BOOT_AT] == header[..BOOT_AT]
            && data.metadata()?.len() == bytes;
        if !whole {
            content.fill(0);
        }
        // The layer is new, or the host has booted since: replace the second bitmap by the first
        // one.
        if content[..HEADER_BYTES] != header {
            content[..HEADER_BYTES].copy_from_slice(&header);
            content.copy_within(HEADER_BYTES..HEADER_BYTES + length, HEADER_BYTES + length);
            let is_empty = file.metadata()?.len() == 0;
            file.write_all_at(&content, 0)?;
            // Cleared bits must not reappear after a power failure.
            if !whole && !is_empty {
                file.sync_data()?;
            }
        }
        // Set the length of a new data file last. If the host fails before, the file has another
        // length than the layer, and the next `open` clears the bitmaps again.
        if !whole {
            data.set_len(bytes)?;
        }
        drop(_lock);
        let bits = Mutex::new(content.split_off(HEADER_BYTES + length));
        Ok(Self { file, bits })
    }

    fn bits(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bits.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Returns true if chunk `number` is known to be present, without reading the file.
    pub fn knows(&self, number: u64) -> bool {
        is_set(&self.bits(), number)
    }

    /// Returns true if chunk `number` is present.
    pub fn has(&self, number: u64) -> bool {
        let mut bits = self.bits();
        if is_set(&bits, number) {
            return true;
        }
        // Another process may have written it.
        let at = (number / 8) as usize;
        let offset = HEADER_BYTES + bits.len() + at;
        let Some(byte) = bits.get_mut(at) else {
            return false;
        };
        let mut read = [0];
        if self.file.read_exact_at(&mut read, offset as u64).is_ok() {
            *byte |= read[0];
        }
        is_set(&bits, number)
    }

    /// Reads all bits set by other processes.
    pub fn refresh(&self) -> io::Result<()> {
        let mut bits = self.bits();
        let mut read = vec![0; bits.len()];
        self.file
            .read_exact_at(&mut read, (HEADER_BYTES + bits.len()) as u64)?;
        join(&mut bits, &read);
        Ok(())
    }

    /// Returns the second bitmap without reading the file.
    pub fn bitmap(&self) -> Vec<u8> {
        self.bits().clone()
    }

    /// Reads the first bitmap.
    pub fn persisted(&self) -> io::Result<Vec<u8>> {
        let mut read = vec![0; self.bits().len()];
        self.file.read_exact_at(&mut read, HEADER_BYTES as u64)?;
        Ok(read)
    }

    /// Returns device and inode of the file.
    pub fn inode(&self) -> io::Result<(u64, u64)> {
        let metadata = self.file.metadata()?;
        Ok((metadata.dev(), metadata.ino()))
    }

    /// Marks chunks as written.
    pub fn mark(&self, numbers: &[u64]) -> io::Result<()> {
        let (Some(first), Some(last)) = (numbers.iter().min(), numbers.iter().max()) else {
            return Ok(());
        };
        let mut bits = self.bits();
        let (first, last) = ((first / 8) as usize, (last / 8) as usize);
        if last >= bits.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut marked = vec![0; last - first + 1];
        for number in numbers {
            marked[(number / 8) as usize - first] |= 1 << (number % 8);
        }
        let offset = (HEADER_BYTES + bits.len() + first) as u64;
        // The file lock excludes other processes. `bits` excludes the threads that share this
        // value, for which the lock has no effect.
        let _lock = RangeLock::wait(&self.file, BITMAPS_LOCK)?;
        let mut read = vec![0; marked.len()];
        self.file.read_exact_at(&mut read, offset)?;
        // Other processes may have set bits in the same bytes.
        join(&mut marked, &read);
        self.file.write_all_at(&marked, offset)?;
        join(&mut bits[first..=last], &marked);
        Ok(())
    }
}

/// Persists the written chunks: syncs the data, then sets their bits in the first bitmap.
#[derive(Debug)]
pub(super) struct PersistTask {
    data: File,
    present: File,
    bytes: u64,
}

impl PersistTask {
    /// Prepares the layer of `bytes` bytes in `data`. The caller must hold the shared lock of the
    /// bitmap file, so that the file at `present` belongs to this layer.
    pub fn new(data: &File, present: &Path, bytes: u64) -> io::Result<Self> {
        Ok(Self {
            data: data.try_clone()?,
            // Open the file again: a clone of the descriptor would share the lock of
            // `Presence::file`, and the layer could not be evicted while this task exists.
            present: File::options().read(true).write(true).open(present)?,
            bytes,
        })
    }

    pub fn run(self) -> io::Result<()> {
        let length = bitmap_bytes(self.bytes);
        let mut bitmaps = vec![0; 2 * length];
        self.present
            .read_exact_at(&mut bitmaps, HEADER_BYTES as u64)?;
        let (stored, written) = bitmaps.split_at(length);
        if stored == written {
            return Ok(());
        }
        // Sync after `written` was read, so that the sync includes the chunks of all these bits.
        self.data.sync_data()?;
        let _lock = RangeLock::wait(&self.present, BITMAPS_LOCK)?;
        // Read the first bitmap again under the lock: another task may have set bits.
        let mut stored = vec![0; length];
        self.present
            .read_exact_at(&mut stored, HEADER_BYTES as u64)?;
        join(&mut stored, written);
        self.present.write_all_at(&stored, HEADER_BYTES as u64)?;
        self.present.sync_data()
    }
}

/// Locks of chunks that are being fetched. Dropping this value releases all of them.
#[derive(Debug)]
pub(crate) struct ChunkLocks(File);

impl ChunkLocks {
    pub(super) fn open(present: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(present)?;
        Ok(Self(file))
    }

    /// Locks chunk `number`. Returns false if another process or task holds the lock.
    pub fn try_lock(&self, number: u64) -> io::Result<bool> {
        let locked = lock(&self.0, libc::F_WRLCK, CHUNK_LOCKS + number, false);
        match locked {
            Ok(()) => Ok(true),
            Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// Releases the lock of chunk `number`.
    pub fn unlock(&self, number: u64) {
        let _ = lock(&self.0, libc::F_UNLCK, CHUNK_LOCKS + number, false);
    }
}

/// Lock of a byte of a file. Dropping this value unlocks the byte.
struct RangeLock<'a>(&'a File, u64);

impl<'a> RangeLock<'a> {
    fn wait(file: &'a File, offset: u64) -> io::Result<Self> {
        loop {
            match lock(file, libc::F_WRLCK, offset, true) {
                Err(Errno::EINTR) => {}
                other => return other.map(|()| Self(file, offset)).map_err(Into::into),
            }
        }
    }
}

impl Drop for RangeLock<'_> {
    fn drop(&mut self) {
        // Ignore the error: unlocking a byte of an open file does not fail.
        let _ = lock(self.0, libc::F_UNLCK, self.1, false);
    }
}

/// Locks or unlocks one byte of a file. Without `wait`, fails if another descriptor has the lock.
fn lock(file: impl AsFd, kind: libc::c_int, offset: u64, wait: bool) -> Result<(), Errno> {
    let range = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: offset.cast_signed(),
        l_len: 1,
        l_pid: 0,
    };
    let how = if wait {
        FcntlArg::F_OFD_SETLKW(&range)
    } else {
        FcntlArg::F_OFD_SETLK(&range)
    };
    fcntl(file, how).map(drop)
}

/// Returns the header of the bitmaps of a layer with `bytes` bytes.
fn header(bytes: u64, boot: &BootId) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&CHUNK_BYTES.to_le_bytes());
    header[16..BOOT_AT].copy_from_slice(&bytes.to_le_bytes());
    header[BOOT_AT..BOOT_AT + 16].copy_from_slice(boot);
    header
}

fn bitmap_bytes(bytes: u64) -> usize {
    chunks_of(bytes).div_ceil(8) as usize
}

fn is_set(bits: &[u8], number: u64) -> bool {
    bits.get((number / 8) as usize)
        .is_some_and(|byte| byte >> (number % 8) & 1 == 1)
}

fn join(to: &mut [u8], from: &[u8]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to |= from;
    }
}
