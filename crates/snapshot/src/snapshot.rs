//! [`Snapshot`]: a published snapshot on disk. Its files are checked against its manifest when it
//! is opened.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. A *chunk* is 64 KiB of memory or of a disk. A *unit* is the smallest part
//! that a layer stores: a chunk of memory, or a block of 4 KiB of a disk.
//!
//! A *merge* copies the layers of ancestors into a snapshot. A *fold* copies the layers of a parent
//! into its only child. Both replace the snapshot's files at once.
pub(crate) mod missing;
pub(crate) mod working_set;

use crate::checked_snapshots::{CheckedSnapshots, FileStamp, SnapshotStamps};
use crate::manifest::{Manifest, check_id};
use crate::{SnapshotError, VerifyResult, checksums, store_index};
use jiffy_proto::layer::{DISK_BLOCK, IndexFileError, LayerIndex, MEMORY_CHUNK};
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum size of a manifest, in bytes.
pub(crate) const MAX_MANIFEST_BYTES: u64 = 1 << 20;
/// Maximum size of an index in bytes, sufficient for a disk of 1 TiB: its 2^28 blocks need two
/// bitmaps of 32 MiB each, after a short header.
const MAX_INDEX_BYTES: u64 = 65 << 20;

/// Maximum number of concurrent replacements of a snapshot after which an open is retried.
const MAX_REPLACEMENTS: usize = 8;

// Names of the files of a snapshot. The documentation of the crate describes them.
pub(crate) const MANIFEST: &str = "manifest.json";
pub(crate) const STATE: &str = "state.bin";
pub(crate) const MEMORY_LAYER: &str = "memory.layer";
pub(crate) const MEMORY_INDEX: &str = "memory.index";

/// Published snapshot.
#[derive(Debug, Clone)]
pub struct Snapshot {
    path: PathBuf,
    manifest: Arc<Manifest>,
}

/// Layer file and its index, open for reading.
#[derive(Debug)]
pub struct SnapshotLayer {
    /// File with the chunks or blocks.
    pub file: File,
    /// Index of stored and zero units.
    pub index: File,
}

/// Guard that prevents the removal of a snapshot.
#[derive(Debug)]
pub struct Hold(#[allow(dead_code)] Flock<File>);

pub(crate) fn disk_layer(number: usize) -> String {
    format!("disk{number}.layer")
}

pub(crate) fn disk_index(number: usize) -> String {
    format!("disk{number}.index")
}

impl Snapshot {
    /// Opens snapshot `id` in the directory `root`. Checks its files against its manifest, unless
    /// the same files were checked before.
    pub(crate) fn open(
        root: &Path,
        id: &str,
        checked: &CheckedSnapshots,
    ) -> Result<Self, SnapshotError> {
        check_id(id)?;
        let path = root.join(id);
        if let Some(manifest) = checked.find(id, &path) {
            return Ok(Self { path, manifest });
        }
        let mut attempts = 0;
        loop {
            // Stamp the manifest before reading it. An equal stamp afterwards proves that it was
            // not replaced.
            let before = FileStamp::of(&path.join(MANIFEST));
            match Self::open_unchecked(root, id, &path, &before, checked) {
                // A merge (with the parent) or a fold (of a removed parent) replaces all files of a
                // snapshot at once. A manifest read before it does not match an index read
                // afterwards.
                Err(_)
                    if attempts < MAX_REPLACEMENTS
                        && before.is_ok()
                        && FileStamp::of(&path.join(MANIFEST)).ok() != before.ok() =>
                {
                    attempts += 1;
                }
                opened => return opened,
            }
        }
    }

    /// Opens a snapshot that is not in the cache of checked ones: checks its files, and adds it.
    fn open_unchecked(
        root: &Path,
        id: &str,
        path: &Path,
        before: &Result<FileStamp, SnapshotError>,
        checked: &CheckedSnapshots,
    ) -> Result<Self, SnapshotError> {
        let manifest = store_index::manifest(root, id)?;
        // Take the stamps before the files are checked. A later change then invalidates the cache
        // entry.
        let stamps = SnapshotStamps::of(path, &manifest);
        let snapshot = Self::checked_at(path, manifest)?;
        if let (Ok(before), Ok(stamps)) = (before, stamps)
            && stamps.is_of_manifest(*before)
        {
            checked.insert(snapshot.manifest.clone(), stamps);
        }
        Ok(snapshot)
    }

    /// Checks the files in the directory `path` against `manifest`.
    pub(crate) fn checked_at(path: &Path, manifest: Manifest) -> Result<Self, SnapshotError> {
        let snapshot = Self {
            path: path.to_owned(),
            manifest: Arc::new(manifest),
        };
        snapshot.check()?;
        Ok(snapshot)
    }

    /// Checks sizes and indexes. The content of layers and of the state is not read.
    fn check(&self) -> Result<(), SnapshotError> {
        let memory = self.manifest.memory;
        let index = self.check_layer(MEMORY_LAYER, MEMORY_INDEX, MEMORY_CHUNK, memory.bytes)?;
        let check_counts = |name: &str, index: &LayerIndex, stored: u64, zero: u64| {
            if (index.stored.count(), index.zero.count()) == (stored, zero) {
                return Ok(());
            }
            let reason = "it does not match the manifest";
            Err(SnapshotError::damaged(&self.path.join(name), reason))
        };
        check_counts(MEMORY_INDEX, &index, memory.stored, memory.zero)?;
        for (number, disk) in self.manifest.disks.iter().enumerate() {
            let name = disk_index(number);
            let layer = disk_layer(number);
            let index = self.check_layer(&layer, &name, DISK_BLOCK, disk.bytes)?;
            // Disk layers mark no blocks as zero: a zeroed block is stored as a hole.
            check_counts(&name, &index, disk.stored, 0)?;
        }
        let state = self.path.join(STATE);
        let length = fs::metadata(&state)
            .map_err(SnapshotError::io(&state))?
            .len();
        // A snapshot of the disks has no state of vCPUs and devices.
        if (length == 0) != self.manifest.disk_only {
            let reason = match length {
                0 => "it is empty",
                _ => "it is not empty, but the snapshot contains the disks only",
            };
            return Err(SnapshotError::damaged(&state, reason));
        }
        Ok(())
    }

    /// Checks the length of a layer's file, and reads its index.
    fn check_layer(
        &self,
        layer: &str,
        index: &str,
        unit: u32,
        bytes: u64,
    ) -> Result<LayerIndex, SnapshotError> {
        let path = self.path.join(layer);
        let length = fs::metadata(&path).map_err(SnapshotError::io(&path))?.len();
        // An access to a mapping beyond the end of the file would kill the VMM.
        if length != bytes {
            let reason = format!("its size is {length} bytes instead of {bytes}");
            return Err(SnapshotError::damaged(&path, reason));
        }
        let path = self.path.join(index);
        let file = File::open(&path).map_err(SnapshotError::io(&path))?;
        let index = LayerIndex::read(&file, MAX_INDEX_BYTES).map_err(|e| match e {
            IndexFileError::Io(e) => SnapshotError::io(&path)(e),
            IndexFileError::Index(e) => SnapshotError::index(&path)(e),
        })?;
        index.of(unit, bytes).map_err(SnapshotError::index(&path))
    }

    /// Returns the manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the id.
    pub fn id(&self) -> &str {
        &self.manifest.id
    }

    /// Returns the path of the snapshot's directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the disk space in bytes that the file system has allocated for layers, indexes and
    /// state, without ancestors. A layer with missing chunks counts as complete.
    pub fn bytes(&self) -> Result<u64, SnapshotError> {
        let mut files = vec![
            STATE.to_owned(),
            MEMORY_INDEX.to_owned(),
            MEMORY_LAYER.to_owned(),
        ];
        for number in 0..self.manifest.disks.len() {
            files.extend([disk_index(number), disk_layer(number)]);
        }
        let mut bytes = 0u64;
        for name in files {
            let path = self.path.join(name);
            let metadata = fs::metadata(&path).map_err(SnapshotError::io(&path))?;
            // st_blocks counts units of 512 bytes (stat(2)).
            bytes = bytes.saturating_add(metadata.blocks().saturating_mul(512));
        }
        if self.check_complete().is_err() {
            let memory = self.manifest.memory.stored;
            bytes = bytes.max(memory.saturating_mul(MEMORY_CHUNK.into()));
        }
        Ok(bytes)
    }

    fn file(&self, name: &str) -> Result<File, SnapshotError> {
        let path = self.path.join(name);
        File::open(&path).map_err(SnapshotError::io(&path))
    }

    /// Opens the state of vCPUs and devices.
    pub fn state(&self) -> Result<File, SnapshotError> {
        self.file(STATE)
    }

    /// Opens the memory layer.
    pub fn memory(&self) -> Result<SnapshotLayer, SnapshotError> {
        Ok(SnapshotLayer {
            file: self.file(MEMORY_LAYER)?,
            index: self.file(MEMORY_INDEX)?,
        })
    }

    /// Opens the layer of writable disk `number`.
    pub fn disk(&self, number: usize) -> Result<SnapshotLayer, SnapshotError> {
        Ok(SnapshotLayer {
            file: self.file(&disk_layer(number))?,
            index: self.file(&disk_index(number))?,
        })
    }

    /// Prevents the removal of the snapshot. Fails if the removal has started.
    pub fn hold(&self) -> Result<Hold, SnapshotError> {
        let missing = || SnapshotError::Missing(self.id().to_owned());
        // `Store::remove` takes the exclusive lock.
        let file = self.file(MANIFEST).map_err(|_| missing())?;
        let lock = Flock::lock(file, FlockArg::LockSharedNonblock).map_err(|_| missing())?;
        // The snapshot may have been removed between opening and locking.
        if self.path.join(MANIFEST).exists() {
            Ok(Hold(lock))
        } else {
            Err(missing())
        }
    }

    /// Writes the checksums of all chunks for [`Self::verify`]. Reads the whole snapshot. Does
    /// nothing if checksums exist. The snapshot may be removed meanwhile.
    pub fn write_checksums(&self) -> Result<(), SnapshotError> {
        checksums::write(self)
    }

    /// Compares the snapshot with its checksums.
    pub fn verify(&self) -> Result<VerifyResult, SnapshotError> {
        checksums::verify(self)
    }
}

/// Reads an index from the start of its file.
pub fn read_index(file: &File) -> io::Result<LayerIndex> {
    Ok(LayerIndex::read(file, MAX_INDEX_BYTES)?)
}

pub(crate) fn read(path: &Path, limit: u64) -> Result<Vec<u8>, SnapshotError> {
    let file = File::open(path).map_err(SnapshotError::io(path))?;
    read_file(file, path, limit)
}

/// Reads a file of at most `limit` bytes. `path` is for messages.
pub(crate) fn read_file(file: File, path: &Path, limit: u64) -> Result<Vec<u8>, SnapshotError> {
    // One byte more than the limit, to detect a longer file.
    let mut bytes = Vec::new();
    file.take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(SnapshotError::io(path))?;
    if u64::try_from(bytes.len()).is_ok_and(|n| n <= limit) {
        Ok(bytes)
    } else {
        Err(SnapshotError::damaged(path, "it is too long"))
    }
}
