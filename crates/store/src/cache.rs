//! Cache of layers on a host. A *layer* is the part of a memory or disk that one snapshot stores:
//! the content that differs from its ancestors. Each layer has a sparse file and a bitmap of
//! present chunks. Both are named by the layer's *root*, the hash that identifies its content.
//!
//! Users hold a shared lock on the bitmap file ([`presence`]), which protects a layer in use from
//! eviction. A second hard link to that file ([`CachedLayer::pin`]) has the same effect without a
//! process.
//!
//! A *chunk* is 64 KiB of memory or of a disk.

mod presence;

use crate::layer::{Layer, RunKind};
use crate::manifest::CHUNK_BYTES;
use crate::{Hash, StoreError};
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Notify;

pub(crate) use presence::ChunkLocks;
use presence::{BootId, PersistTask, Presence};

/// File with the kernel's id of the current boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Attempts at opening a layer that is concurrently evicted.
const OPEN_ATTEMPTS: usize = 16;
/// Unit of [`MetadataExt::blocks`] in bytes.
const BLOCK_BYTES: u64 = 512;
/// Number of bytes evicted when a layer cannot be created because the file system is full.
const PLACE_BYTES: u64 = 16 << 20;

/// Directory of cached layers.
#[derive(Debug)]
pub struct LayerCache {
    dir: PathBuf,
    /// Maximum disk space of all layers, in bytes.
    max_bytes: u64,
    boot: BootId,
}

/// Cached layer, protected from eviction while this value exists.
#[derive(Debug)]
pub struct CachedLayer {
    path: PathBuf,
    data: File,
    /// Length of the layer in bytes.
    bytes: u64,
    presence: Presence,
    /// Bytes that may still be written to the layer without freeing space:
    /// [`LayerCache::make_place`] has freed the space before.
    reserved: AtomicU64,
    arrived: Notify,
}

impl LayerCache {
    /// Opens the cache in `dir`, which may use at most `max_bytes` bytes on disk.
    pub fn open(dir: PathBuf, max_bytes: u64) -> Result<Self, StoreError> {
        let id = fs::read(BOOT_ID).map_err(StoreError::io(BOOT_ID.as_ref()))?;
        let hash = blake3::hash(&id);
        let boot = hash.as_bytes().first_chunk().copied().unwrap_or_default();
        Self::open_in_boot(dir, max_bytes, boot)
    }

    /// Like [`Self::open`], with an explicit id of the host's current boot. After a reboot, only
    /// the chunks that were persisted count as present.
    pub fn open_in_boot(dir: PathBuf, max_bytes: u64, boot: [u8; 16]) -> Result<Self, StoreError> {
        fs::create_dir_all(&dir).map_err(StoreError::io(&dir))?;
        Ok(Self {
            dir,
            max_bytes,
            boot,
        })
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn path(&self, root: &Hash, kind: &str) -> PathBuf {
        self.dir.join(format!("{root}.{kind}"))
    }

    /// Opens the layer named `root`. Creates a layer without present chunks if it is absent.
    pub fn layer(&self, root: &Hash, layer: &Layer) -> Result<CachedLayer, StoreError> {
        self.layer_of(root, layer.bytes)
    }

    /// Like [`Self::layer`], for a layer of which only the length of `bytes` bytes is known.
    pub fn layer_of(&self, root: &Hash, bytes: u64) -> Result<CachedLayer, StoreError> {
        let path = self.path(root, "present");
        for _ in 0..OPEN_ATTEMPTS {
            match self.try_layer(root, bytes) {
                Ok(Some(layer)) => return Ok(layer),
                Ok(None) => {}
                // Free space by evicting unused layers, then try again.
                Err(e)
                    if e.kind() == io::ErrorKind::StorageFull
                        && self.evict_unused(PLACE_BYTES)? > 0 => {}
                Err(e) => return Err(StoreError::io(&path)(e)),
            }
        }
        let evicted = io::Error::other("the layer was evicted repeatedly while it was opened");
        Err(StoreError::io(&path)(evicted))
    }

    /// Like [`Self::layer_of`], without retries. Returns `None` if the layer was evicted meanwhile.
    fn try_layer(&self, root: &Hash, bytes: u64) -> io::Result<Option<CachedLayer>> {
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
        // The layer may have been evicted between opening and locking the file. Then the lock is on
        // an unlinked file, and the path refers to no file or another one.
        let named = fs::metadata(&path).ok();
        let ours = present.metadata()?;
        if named.is_none_or(|named| (named.dev(), named.ino()) != (ours.dev(), ours.ino())) {
            return Ok(None);
        }
        // Eviction orders layers by this time of the last use. Ignore the error: the layer is then
        // only evicted earlier.
        let _ = present.set_modified(std::time::SystemTime::now());
        let data = open(&data_path)?;
        let presence = Presence::open(present, &data, bytes, &self.boot)?;
        Ok(Some(CachedLayer {
            path: data_path,
            data,
            bytes,
            presence,
            reserved: AtomicU64::new(0),
            arrived: Notify::new(),
        }))
    }

    /// Reads bytes of the layer named `root` without checking their presence. The caller must
    /// verify the content, because absent chunks read as zeroes. Returns false on failure.
    pub(crate) fn read_at(&self, root: &Hash, offset: u64, buffer: &mut [u8]) -> bool {
        let data = File::open(self.path(root, "data"));
        data.is_ok_and(|data| data.read_exact_at(buffer, offset).is_ok())
    }

    /// Returns the number of bytes on disk.
    pub fn bytes(&self) -> Result<u64, StoreError> {
        Ok(self.layers()?.iter().map(|(_, bytes, _)| bytes).sum())
    }

    /// Returns for each layer the path of its data file, its bytes on disk and the time of its last
    /// use.
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

    /// Frees space for `bytes` bytes by evicting unused layers, least recently used first. Returns
    /// the number of freed bytes.
    ///
    /// # Errors
    /// [`StoreError::CacheFull`] if the layers in use leave too little space.
    pub fn make_place(&self, bytes: u64) -> Result<u64, StoreError> {
        let layers = self.layers()?;
        let total: u64 = layers.iter().map(|(_, bytes, _)| bytes).sum();
        let excess = total.saturating_add(bytes).saturating_sub(self.max_bytes);
        let freed = evict_layers(layers, excess)?;
        if freed >= excess {
            Ok(freed)
        } else {
            Err(StoreError::CacheFull {
                path: self.dir.clone(),
                limit: self.max_bytes,
            })
        }
    }

    /// Removes the layer named `root`, so that it is fetched again. Returns false without removing
    /// the layer if it is in use.
    pub fn forget(&self, root: &Hash) -> Result<bool, StoreError> {
        let data = self.path(root, "data");
        match evict(&data) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(true),
            other => other.map_err(StoreError::io(&data)),
        }
    }

    /// Evicts unused layers until `bytes` bytes are freed or no unused layer remains.
    pub fn evict_unused(&self, bytes: u64) -> Result<u64, StoreError> {
        evict_layers(self.layers()?, bytes)
    }
}

/// Evicts unused `layers`, least recently used first, until `bytes` bytes are freed. Returns the
/// number of freed bytes.
fn evict_layers(mut layers: Vec<(PathBuf, u64, i64)>, bytes: u64) -> Result<u64, StoreError> {
    layers.sort_by_key(|(_, _, used)| *used);
    let mut freed = 0;
    for (path, size, _) in layers {
        if freed >= bytes {
            break;
        }
        match evict(&path) {
            Ok(true) => freed += size,
            Ok(false) => {}
            // Another process evicted the layer.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(StoreError::io(&path)(e)),
        }
    }
    Ok(freed)
}

/// Removes an unused layer. Returns false if the layer is in use. Fails with `NotFound` if there is
/// no such layer.
fn evict(data: &Path) -> io::Result<bool> {
    let present = data.with_extension("present");
    // Create a missing bitmap, because its lock excludes processes that open the layer.
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(&present)?;
    let Ok(lock) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else {
        return Ok(false);
    };
    // A second hard link is a pin. Without a link, another process has evicted the layer, and the
    // lock does not exclude processes that open it again.
    if lock.metadata()?.nlink() != 1 {
        return Ok(false);
    }
    // Remove the bitmap last: its lock excludes processes that open the layer as long as the bitmap
    // has its name. A bitmap without its data file has no present chunks.
    let removed = fs::remove_file(data);
    if removed
        .as_ref()
        .is_err_and(|e| e.kind() != io::ErrorKind::NotFound)
    {
        return removed.map(|()| false);
    }
    fs::remove_file(&present)?;
    removed.map(|()| true)
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

    /// Returns true if chunk `number` is present, no matter which process wrote it.
    pub fn has(&self, number: u64) -> bool {
        self.presence.has(number)
    }

    /// Returns true if chunk `number` was present at the last [`Self::refresh`].
    pub(crate) fn knows(&self, number: u64) -> bool {
        self.presence.knows(number)
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Protects the layer from eviction until `to`, another hard link to its bitmap, is removed.
    pub fn pin(&self, to: &Path) -> Result<(), StoreError> {
        let present = self.path.with_extension("present");
        fs::hard_link(&present, to).map_err(StoreError::io(to))
    }

    /// Returns true if `pin` was created by [`Self::pin`] of this layer.
    pub fn is_pinned_by(&self, pin: &Path) -> Result<bool, StoreError> {
        let pinned = fs::metadata(pin).map_err(StoreError::io(pin))?;
        let own = self.presence.inode().map_err(StoreError::io(&self.path))?;
        Ok((pinned.dev(), pinned.ino()) == own)
    }

    /// Returns the bitmap of present chunks: chunk `c` at bit `c % 8` of byte `c / 8`.
    pub fn present(&self) -> Result<Vec<u8>, StoreError> {
        self.refresh()?;
        Ok(self.presence.bitmap())
    }

    /// Like [`Self::present`], limited to persisted chunks.
    pub fn persisted(&self) -> Result<Vec<u8>, StoreError> {
        self.presence
            .persisted()
            .map_err(StoreError::io(&self.path))
    }

    /// Marks the chunks of `layer` that read as zeroes and need not be fetched. `layer` must
    /// describe this layer.
    pub fn mark_holes(&self, layer: &Layer) -> Result<(), StoreError> {
        let kinds = [RunKind::Zero, RunKind::Inherited];
        let holes = kinds.into_iter().flat_map(|kind| layer.ranges(kind));
        let holes: Vec<u64> = holes.flatten().collect();
        self.mark(&holes)
    }

    /// Reads the bitmap again, because another process may have added chunks.
    pub(crate) fn refresh(&self) -> Result<(), StoreError> {
        self.presence.refresh().map_err(StoreError::io(&self.path))
    }

    pub(crate) fn write(&self, number: u64, chunk: &[u8]) -> Result<(), StoreError> {
        let at = number * u64::from(CHUNK_BYTES);
        self.data
            .write_all_at(chunk, at)
            .map_err(StoreError::io(&self.path))
    }

    /// Marks chunks as written and notifies the tasks that wait for chunks.
    pub(crate) fn mark(&self, numbers: &[u64]) -> Result<(), StoreError> {
        self.presence
            .mark(numbers)
            .map_err(StoreError::io(&self.path))?;
        self.arrived.notify_waiters();
        Ok(())
    }

    /// Notified when this process has marked chunks.
    pub(crate) fn arrived(&self) -> &Notify {
        &self.arrived
    }

    /// Opens the locks of this layer's chunks, for a task that fetches chunks.
    pub(crate) fn locks(&self) -> Result<ChunkLocks, StoreError> {
        let present = self.path.with_extension("present");
        ChunkLocks::open(&present).map_err(StoreError::io(&present))
    }

    /// Consumes `bytes` bytes of the reservation. Returns false if fewer are reserved.
    pub(crate) fn take_reserved(&self, bytes: u64) -> bool {
        let take = |reserved: u64| reserved.checked_sub(bytes);
        self.reserved
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .is_ok()
    }

    pub(crate) fn add_reserved(&self, bytes: u64) {
        self.reserved.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Persists the written chunks, so that they survive a reboot of the host.
    pub fn persist(&self) -> Result<(), StoreError> {
        let present = self.path.with_extension("present");
        PersistTask::new(&self.data, &present, self.bytes)
            .and_then(PersistTask::run)
            .map_err(StoreError::io(&self.path))
    }

    /// Like [`Self::persist`], in a background thread that does not protect the layer from
    /// eviction.
    pub(crate) fn persist_in_background(&self) {
        let present = self.path.with_extension("present");
        let path = self.path.clone();
        let task = PersistTask::new(&self.data, &present, self.bytes);
        tokio::task::spawn_blocking(move || {
            if let Err(e) = task.and_then(PersistTask::run) {
                tracing::warn!(path = %path.display(), error = %e, "cannot persist chunks of a cached layer");
            }
        });
    }

    /// Creates a file with the content of the layer at `to`, which must not exist. Returns true if
    /// the file shares storage with the cache (reflink).
    pub fn clone_to(&self, layer: &Layer, to: &Path) -> Result<bool, StoreError> {
        let failed = StoreError::io(to);
        let new = File::options().write(true).create_new(true).open(to);
        let cloned = new.and_then(|new| {
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
        cloned.map_err(|e| {
            if e.kind() != io::ErrorKind::AlreadyExists {
                // The error of the copy is returned, not an error of this removal.
                let _ = fs::remove_file(to);
            }
            failed(e)
        })
    }
}

// FICLONE of `linux/fs.h`.
nix::ioctl_write_int!(ficlone, 0x94, 9);

fn reflink(from: &File, to: &File) -> bool {
    use std::os::fd::AsRawFd;
    let Ok(source) = u64::try_from(from.as_raw_fd()) else {
        return false;
    };
    // SAFETY: FICLONE takes two descriptors, which are open, and touches no memory.
    unsafe { ficlone(to.as_raw_fd(), source) }.is_ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::HASH_BYTES;

    const ROOT: Hash = Hash([7; HASH_BYTES]);
    const BYTES: u64 = 2 * CHUNK_BYTES as u64;

    fn cache(dir: &Path) -> LayerCache {
        LayerCache::open_in_boot(dir.join("layers"), u64::MAX, [1; 16]).unwrap()
    }

    fn with_chunk(cache: &LayerCache) -> CachedLayer {
        let layer = cache.layer_of(&ROOT, BYTES).unwrap();
        layer.write(1, &[5; CHUNK_BYTES as usize]).unwrap();
        layer.mark(&[1]).unwrap();
        layer
    }

    #[test]
    fn a_layer_that_is_opened_during_its_eviction_has_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let cache = cache(dir.path());
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let _ = cache.forget(&ROOT).unwrap();
                }
            });
            for _ in 0..3000 {
                // The layer may be evicted during each of the attempts.
                let Ok(layer) = cache.layer_of(&ROOT, BYTES) else {
                    continue;
                };
                let named = fs::metadata(layer.path()).map(|named| named.ino()).ok();
                let open = layer.file().metadata().unwrap();
                if named != Some(open.ino()) {
                    is_over.store(true, Ordering::Relaxed);
                }
                assert_eq!(named, Some(open.ino()));
            }
            is_over.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn an_interrupted_eviction_leaves_no_present_chunks() {
        let dir = tempfile::tempdir().unwrap();
        let cache = cache(dir.path());
        drop(with_chunk(&cache));
        fs::remove_file(cache.path(&ROOT, "data")).unwrap();
        assert!(!cache.layer_of(&ROOT, BYTES).unwrap().has(1));
        drop(with_chunk(&cache));
        fs::remove_file(cache.path(&ROOT, "present")).unwrap();
        assert!(!cache.layer_of(&ROOT, BYTES).unwrap().has(1));
        drop(with_chunk(&cache));
        for missing in ["data", "present"] {
            fs::remove_file(cache.path(&ROOT, missing)).unwrap();
            assert!(cache.forget(&ROOT).unwrap());
            assert_eq!(fs::read_dir(cache.dir()).unwrap().count(), 0);
            drop(with_chunk(&cache));
        }
        let layer = with_chunk(&cache);
        assert!(!cache.forget(&ROOT).unwrap() && layer.has(1));
    }
}
