//! Draft: the directory of a snapshot that is not published yet. An unpublished draft is removed
//! when it is dropped. A captured draft ([`crate::Store::persist_captured`]) remains instead, and a
//! later process publishes or discards the draft.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. The *overlay* is the file that receives the disk writes of a guest.
//!
//! A *merge* ([`crate::Store::merge`]) and a *fold* ([`crate::Store::prepare_fold`]) replace the
//! files of a snapshot by new files with the content of its ancestors.

use crate::SnapshotError;
use crate::manifest::Manifest;
use crate::snapshot::{
    MANIFEST, MEMORY_INDEX, MEMORY_LAYER, STATE, Snapshot, disk_index, disk_layer,
};
use crate::store_index::StoreIndex;
use nix::errno::Errno;
use nix::fcntl::posix_fallocate;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Space reserved for the manifest, in bytes.
const MANIFEST_RESERVED_BYTES: i64 = 4096;

/// Maximum number of attempts to remove a directory to which a concurrent writer adds files.
const REMOVAL_ATTEMPTS: usize = 4;

/// Durability of a published snapshot if the host crashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// The kernel writes the files back later. A power failure of the host may lose or damage the
    /// snapshot.
    PageCache,
    /// All files and directories are synced before the snapshot is published.
    Storage,
}

/// Files of an unpublished snapshot, opened for reading and writing.
#[derive(Debug)]
pub struct SnapshotDraft {
    index: Arc<StoreIndex>,
    root: PathBuf,
    dir: PathBuf,
    /// File for the state of vCPUs and devices.
    pub state: File,
    /// File for the memory layer.
    pub memory: File,
    /// File for the index of the memory layer.
    pub memory_index: File,
    /// Files for the indexes of the disk layers.
    pub disk_indexes: Vec<File>,
    manifest: File,
    /// True after the publication. Otherwise dropping this value removes the draft.
    is_published: bool,
    /// True if the draft remains for a later process when it is dropped.
    captured: bool,
}

impl SnapshotDraft {
    /// Creates the directory and the empty files of a draft.
    pub(crate) fn create(
        index: &Arc<StoreIndex>,
        root: &Path,
        dir: PathBuf,
        disks: usize,
    ) -> Result<Self, SnapshotError> {
        fs::create_dir(&dir).map_err(SnapshotError::io(&dir))?;
        let draft = Self::files(index, root, &dir, disks);
        if draft.is_err() {
            // Ignore the error: the walk of the store removes abandoned drafts.
            let _ = fs::remove_dir_all(&dir);
        }
        draft
    }

    /// Creates the files of a draft in the directory `dir`.
    fn files(
        index: &Arc<StoreIndex>,
        root: &Path,
        dir: &Path,
        disks: usize,
    ) -> Result<Self, SnapshotError> {
        let new = |name: &str| {
            let path = dir.join(name);
            File::options()
                .read(true)
                .write(true)
                .create_new(true)
                .open(&path)
                .map_err(SnapshotError::io(&path))
        };
        let manifest = new(MANIFEST)?;
        // Detect a full disk before the guest is paused. Some file systems cannot preallocate.
        match posix_fallocate(&manifest, 0, MANIFEST_RESERVED_BYTES) {
            Err(Errno::EOPNOTSUPP | Errno::EINVAL) | Ok(()) => {}
            Err(e) => return Err(SnapshotError::io(&dir.join(MANIFEST))(e.into())),
        }
        Ok(Self {
            manifest,
            state: new(STATE)?,
            memory: new(MEMORY_LAYER)?,
            memory_index: new(MEMORY_INDEX)?,
            disk_indexes: (0..disks)
                .map(|n| new(&disk_index(n)))
                .collect::<Result<_, _>>()?,
            index: index.clone(),
            root: root.to_owned(),
            dir: dir.to_owned(),
            is_published: false,
            captured: false,
        })
    }

    /// Opens the draft in the directory `dir`, which another process captured. Returns the draft
    /// and the frozen overlays of its disks.
    pub(crate) fn reopen(
        index: &Arc<StoreIndex>,
        root: &Path,
        dir: &Path,
        disks: usize,
    ) -> Result<(Self, Vec<File>), SnapshotError> {
        let open = |name: &str| {
            let path = dir.join(name);
            let file = File::options().read(true).write(true).open(&path);
            file.map_err(SnapshotError::io(&path))
        };
        let all = |name: fn(usize) -> String| {
            let files = (0..disks).map(|n| open(&name(n)));
            files.collect::<Result<Vec<File>, _>>()
        };
        let draft = Self {
            index: index.clone(),
            root: root.to_owned(),
            dir: dir.to_owned(),
            state: open(STATE)?,
            memory: open(MEMORY_LAYER)?,
            memory_index: open(MEMORY_INDEX)?,
            disk_indexes: all(disk_index)?,
            manifest: open(MANIFEST)?,
            is_published: false,
            captured: true,
        };
        Ok((draft, all(disk_layer)?))
    }

    /// Moves the draft to `dir` together with the frozen overlays of its disks. A later process can
    /// open it with [`Self::reopen`].
    pub(crate) fn persist_at(
        &mut self,
        dir: PathBuf,
        overlays: &[File],
    ) -> Result<(), SnapshotError> {
        // Link the overlays first: a later process expects all files under the new name.
        self.add_overlays(overlays)?;
        fs::rename(&self.dir, &dir).map_err(SnapshotError::io(&dir))?;
        self.dir = dir;
        self.captured = true;
        Ok(())
    }

    /// Makes sure that a captured draft is removed when it is dropped.
    pub fn remove_on_drop(&mut self) {
        self.captured = false;
    }

    fn add_overlays(&self, overlays: &[File]) -> Result<(), SnapshotError> {
        for (number, overlay) in overlays.iter().enumerate() {
            let path = self.dir.join(disk_layer(number));
            link_or_copy(overlay, &path).map_err(SnapshotError::io(&path))?;
        }
        Ok(())
    }

    /// Opens [`Self::memory`] again with `O_DIRECT`. `None` if the file system does not support it.
    pub fn memory_direct(&self) -> Option<File> {
        let mut options = File::options();
        options.write(true).custom_flags(nix::libc::O_DIRECT);
        options.open(self.dir.join(MEMORY_LAYER)).ok()
    }

    /// Returns the draft's directory.
    pub(crate) fn path(&self) -> &Path {
        &self.dir
    }

    /// Publishes the snapshot under its id. `overlays` are the frozen overlays of the disks.
    /// Overlays created by [`crate::Store::overlay`] are linked, others are copied. A failed call
    /// (for example because the disk is full) can be repeated.
    pub fn publish(
        &mut self,
        manifest: &Manifest,
        overlays: &[File],
        durability: Durability,
    ) -> Result<Snapshot, SnapshotError> {
        crate::manifest::check_id(&manifest.id)?;
        // An earlier call has published the snapshot but failed afterwards.
        if self.is_published {
            return Snapshot::open(&self.root, &manifest.id, &self.index.checked);
        }
        self.add_overlays(overlays)?;
        let path = self.dir.join(MANIFEST);
        let text =
            serde_json::to_vec_pretty(manifest).map_err(|e| SnapshotError::damaged(&path, e))?;
        // Overwrite the file in place, so that its reserved block is used.
        self.manifest
            .write_all_at(&text, 0)
            .and_then(|()| self.manifest.set_len(text.len() as u64))
            .map_err(SnapshotError::io(&path))?;
        // Sync before the rename: a name must never refer to incomplete files after a crash.
        if durability == Durability::Storage {
            sync_dir(&self.dir).map_err(SnapshotError::io(&self.dir))?;
        }
        let place = self.root.join(&manifest.id);
        // A rename never replaces a directory that is not empty.
        fs::rename(&self.dir, &place).map_err(|e| match e.kind() {
            io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists => {
                SnapshotError::Exists(manifest.id.clone())
            }
            _ => SnapshotError::io(&place)(e),
        })?;
        // From here on, dropping the draft must not remove the files.
        self.is_published = true;
        self.index.insert(&manifest.id, manifest.parent.as_deref());
        // The rename itself is durable only after the parent directory was synced.
        if durability == Durability::Storage {
            let synced = File::open(&self.root).and_then(|root| root.sync_all());
            synced.map_err(SnapshotError::io(&self.root))?;
        }
        Snapshot::open(&self.root, &manifest.id, &self.index.checked)
    }
}

impl Drop for SnapshotDraft {
    fn drop(&mut self) {
        if !self.is_published && !self.captured {
            remove_draft(&self.dir);
        }
    }
}

/// Removes the directory of a draft, or of a snapshot that a merge, a fold or an import has
/// replaced. Checksums may be added to the replaced snapshot during the removal.
pub(crate) fn remove_draft(dir: &Path) {
    for _ in 0..REMOVAL_ATTEMPTS {
        match fs::remove_dir_all(dir) {
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            // On other errors, garbage collection removes the remaining files.
            _ => return,
        }
    }
}

/// Syncs the files of a draft and its directory.
pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        // A draft contains no subdirectories.
        File::open(entry?.path())?.sync_all()?;
    }
    File::open(dir)?.sync_all()
}

/// Links an unnamed file to `path`, or copies it if linking fails.
fn link_or_copy(file: &File, path: &Path) -> io::Result<()> {
    // A repeated call finds the link of the earlier call.
    if let Ok(existing) = fs::metadata(path) {
        let ours = file.metadata()?;
        if (existing.dev(), existing.ino()) == (ours.dev(), ours.ino()) {
            return Ok(());
        }
        // Incomplete copy of an earlier attempt.
        fs::remove_file(path)?;
    }
    let link = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    let cwd = nix::fcntl::AT_FDCWD;
    let flags = nix::fcntl::AtFlags::AT_SYMLINK_FOLLOW;
    match nix::unistd::linkat(cwd, Path::new(&link), cwd, path, flags) {
        Ok(()) => Ok(()),
        // The file has a name already, or is on another file system.
        Err(_) => {
            let mut from = File::open(&link)?;
            let mut to = File::create(path)?;
            let length = from.metadata()?.len();
            copy_data(&mut from, &mut to, length)
        }
    }
}

/// Copies the data and preserves holes.
fn copy_data(from: &mut File, to: &mut File, length: u64) -> io::Result<()> {
    use nix::unistd::{Whence, lseek};
    // The new file is sparse. Only data between holes is copied.
    to.set_len(length)?;
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0i64;
    loop {
        let start = match lseek(&*from, at, Whence::SeekData) {
            Ok(start) => start,
            // No data follows.
            Err(nix::errno::Errno::ENXIO) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        let end = lseek(&*from, start, Whence::SeekHole)?;
        at = start;
        while at < end {
            let part = buffer
                .len()
                .min(usize::try_from(end - at).unwrap_or(usize::MAX));
            let offset = u64::try_from(at).map_err(io::Error::other)?;
            from.read_exact_at(&mut buffer[..part], offset)?;
            to.write_all_at(&buffer[..part], offset)?;
            at += i64::try_from(part).map_err(io::Error::other)?;
        }
    }
}
