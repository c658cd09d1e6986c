//! Cache of layers on a host: a sparse file and a bitmap of present chunks for each, both named by
//! the layer's root.
//!
//! `<root>.present`: magic (8 bytes), version (4), bytes per chunk (4), length of the layer (8), 8
//! zero bytes, then the bitmap, chunk `n` at bit `n % 8` of byte `n / 8`. A bit is written when its
//! chunk is on storage. Users hold a shared lock on this file, so that a layer in use is not
//! evicted; one that fills the layer holds `<root>.fill`.

use crate::layer::{Layer, RunKind, chunks_of};
use crate::manifest::CHUNK_BYTES;
use crate::{Hash, StoreError};
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

const MAGIC: [u8; 8] = *b"JIFFYPRE";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 32;
/// Attempts at opening a layer that is evicted meanwhile.
const OPEN_ATTEMPTS: usize = 16;
const BLOCK_BYTES: u64 = 512;

/// Directory of cached layers.
#[derive(Debug)]
pub struct LayerCache {
    dir: PathBuf,
    max_bytes: u64,
}

/// Layer in the cache, kept from eviction.
#[derive(Debug)]
pub struct CachedLayer {
    path: PathBuf,
    data: File,
    present: Flock<File>,
    bitmap: Mutex<Vec<u8>>,
}

impl LayerCache {
    /// Opens the cache in `dir`, which may take `max_bytes` bytes on disk.
    pub fn open(dir: PathBuf, max_bytes: u64) -> Result<Self, StoreError> {
        fs::create_dir_all(&dir).map_err(StoreError::io(&dir))?;
        Ok(Self { dir, max_bytes })
    }

    fn path(&self, root: &Hash, kind: &str) -> PathBuf {
        self.dir.join(format!("{root}.{kind}"))
    }

    /// Opens the layer named `root`; an absent one is made without any chunk present.
    pub fn layer(&self, root: &Hash, layer: &Layer) -> Result<CachedLayer, StoreError> {
        let path = self.path(root, "present");
        for _ in 0..OPEN_ATTEMPTS {
            if let Some(found) = self.try_layer(root, layer).map_err(StoreError::io(&path))? {
                return Ok(found);
            }
        }
        let evicted = io::Error::other("it was evicted again and again");
        Err(StoreError::io(&path)(evicted))
    }

    fn try_layer(&self, root: &Hash, layer: &Layer) -> io::Result<Option<CachedLayer>> {
        let (path, data_path) = (self.path(root, "present"), self.path(root, "data"));
        let open = |path: &Path| {
            let mut options = File::options();
            options
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(path)
        };
        let file = open(&path)?;
        let present = Flock::lock(file, FlockArg::LockShared).map_err(|(_, e)| e)?;
        let named = fs::metadata(&path).ok();
        let ours = present.metadata()?;
        if named.is_none_or(|named| (named.dev(), named.ino()) != (ours.dev(), ours.ino())) {
            return Ok(None);
        }
        // The time of the last use, by which layers are evicted.
        let _ = present.set_modified(std::time::SystemTime::now());
        let data = open(&data_path)?;
        let header = header(layer.bytes);
        let wanted = HEADER_BYTES + bitmap_bytes(layer.bytes);
        let mut content = vec![0; wanted];
        let whole = present.read_exact_at(&mut content, 0).is_ok()
            && content[..HEADER_BYTES] == header
            && data.metadata()?.len() == layer.bytes;
        if !whole {
            content.fill(0);
            content[..HEADER_BYTES].copy_from_slice(&header);
            data.set_len(layer.bytes)?;
            present.write_all_at(&content, 0)?;
        }
        Ok(Some(CachedLayer {
            path: data_path,
            data,
            present,
            bitmap: Mutex::new(content.split_off(HEADER_BYTES)),
        }))
    }

    /// Waits until this is the only one to fill the layer named `root`.
    pub(crate) fn lock_fill(&self, root: &Hash) -> Result<Flock<File>, StoreError> {
        let path = self.path(root, "fill");
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path);
        let file = file.map_err(StoreError::io(&path))?;
        Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| StoreError::io(&path)(e.into()))
    }

    /// Bytes on disk.
    pub fn bytes(&self) -> Result<u64, StoreError> {
        Ok(self.layers()?.iter().map(|(_, bytes, _)| bytes).sum())
    }

    /// Paths without their ending, bytes on disk and times of last use of all layers.
    fn layers(&self) -> Result<Vec<(PathBuf, u64, i64)>, StoreError> {
        let mut layers = Vec::new();
        for entry in fs::read_dir(&self.dir)
            .map_err(StoreError::io(&self.dir))?
            .flatten()
        {
            let path = entry.path();
            let Ok(data) = entry.metadata() else { continue };
            if path.extension().is_some_and(|ending| ending == "data") {
                let used = fs::metadata(path.with_extension("present")).map_or(0, |m| m.mtime());
                layers.push((path, data.blocks() * BLOCK_BYTES, used));
            }
        }
        Ok(layers)
    }

    /// Makes place for `bytes` bytes: evicts what is not in use, the longest unused first.
    pub fn make_place(&self, bytes: u64) -> Result<u64, StoreError> {
        let mut layers = self.layers()?;
        layers.sort_by_key(|(_, _, used)| *used);
        let mut total: u64 = layers.iter().map(|(_, bytes, _)| bytes).sum();
        let mut freed = 0;
        for (path, size, _) in layers {
            if total.saturating_add(bytes) <= self.max_bytes {
                break;
            }
            if evict(&path).map_err(StoreError::io(&path))? {
                total -= size;
                freed += size;
            }
        }
        match total.saturating_add(bytes) <= self.max_bytes {
            true => Ok(freed),
            false => Err(StoreError::CacheFull {
                path: self.dir.clone(),
                limit: self.max_bytes,
            }),
        }
    }
}

/// Removes a layer that is not in use; returns false if it is.
fn evict(data: &Path) -> io::Result<bool> {
    let present = data.with_extension("present");
    let file = match File::open(&present) {
        Ok(file) => file,
        // Left by a crash between two removals.
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return fs::remove_file(data).map(|()| true);
        }
        Err(e) => return Err(e),
    };
    let Ok(_lock) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else {
        return Ok(false);
    };
    // The bitmap first: without it nothing is present.
    fs::remove_file(&present)?;
    fs::remove_file(data)?;
    let _ = fs::remove_file(data.with_extension("fill"));
    Ok(true)
}

fn header(bytes: u64) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&CHUNK_BYTES.to_le_bytes());
    header[16..24].copy_from_slice(&bytes.to_le_bytes());
    header
}

fn bitmap_bytes(bytes: u64) -> usize {
    chunks_of(bytes).div_ceil(8) as usize
}

impl CachedLayer {
    /// Path of the sparse file. Absent chunks are holes.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The sparse file.
    pub fn file(&self) -> &File {
        &self.data
    }

    fn bits(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bitmap.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Returns true if chunk `number` is present.
    pub fn has(&self, number: u64) -> bool {
        let bits = self.bits();
        bits.get((number / 8) as usize)
            .is_some_and(|byte| byte >> (number % 8) & 1 == 1)
    }

    /// Reads the bitmap anew: another process may have filled the layer.
    pub(crate) fn refresh(&self) -> Result<(), StoreError> {
        let mut bits = self.bits();
        let read = self.present.read_exact_at(&mut bits, HEADER_BYTES as u64);
        read.map_err(StoreError::io(&self.path))
    }

    pub(crate) fn write(&self, number: u64, chunk: &[u8]) -> Result<(), StoreError> {
        let at = number * u64::from(CHUNK_BYTES);
        self.data
            .write_all_at(chunk, at)
            .map_err(StoreError::io(&self.path))
    }

    /// Marks chunks as present, once they are on storage.
    pub(crate) fn mark(&self, numbers: &[u64]) -> Result<(), StoreError> {
        self.data.sync_data().map_err(StoreError::io(&self.path))?;
        let mut bits = self.bits();
        for number in numbers {
            if let Some(byte) = bits.get_mut((number / 8) as usize) {
                *byte |= 1 << (number % 8);
            }
        }
        let written = self.present.write_all_at(&bits, HEADER_BYTES as u64);
        written
            .and_then(|()| self.present.sync_data())
            .map_err(StoreError::io(&self.path))
    }

    /// Makes a file with the content of the layer at `to`, which must not exist: it shares storage
    /// with the cache where the file system can. Returns true if it does.
    pub fn clone_to(&self, layer: &Layer, to: &Path) -> Result<bool, StoreError> {
        let failed = StoreError::io(to);
        let new = File::options().write(true).create_new(true).open(to);
        let made = new.and_then(|new| {
            if reflink(&self.data, &new) {
                return Ok(true);
            }
            new.set_len(layer.bytes)?;
            let mut buffer = vec![0; CHUNK_BYTES as usize];
            for number in layer.ranges(RunKind::Stored).flatten() {
                let range = layer.chunk_range(number);
                let chunk = &mut buffer[..(range.end - range.start) as usize];
                self.data.read_exact_at(chunk, range.start)?;
                new.write_all_at(chunk, range.start)?;
            }
            Ok(false)
        });
        made.map_err(|e| {
            if e.kind() != io::ErrorKind::AlreadyExists {
                let _ = fs::remove_file(to);
            }
            failed(e)
        })
    }
}

nix::ioctl_write_int!(ficlone, 0x94, 9);

fn reflink(from: &File, to: &File) -> bool {
    use std::os::fd::AsRawFd;
    let Ok(source) = u64::try_from(from.as_raw_fd()) else {
        return false;
    };
    // SAFETY: FICLONE takes two descriptors, which are open, and touches no memory.
    unsafe { ficlone(to.as_raw_fd(), source) }.is_ok()
}
