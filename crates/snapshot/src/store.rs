//! A directory of snapshots.

use crate::manifest::check_id;
use crate::snapshot::MANIFEST;
use crate::{Draft, Lineage, Snapshot, SnapshotError};
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Names of what is no snapshot (yet, or any more) begin with a dot, which no id does.
const DRAFT: &str = ".draft-";
const TRASH: &str = ".trash-";

/// Snapshots by id.
#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
}

impl Store {
    /// Opens the directory, making it if need be.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, SnapshotError> {
        let root = root.into();
        fs::create_dir_all(&root).map_err(SnapshotError::io(&root))?;
        Ok(Self { root })
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// An empty, nameless file for a disk's writes, which a later snapshot takes over without copying.
    pub fn overlay(&self) -> Result<File, SnapshotError> {
        File::options()
            .read(true)
            .write(true)
            .custom_flags(nix::libc::O_TMPFILE)
            .mode(0o600)
            .open(&self.root)
            .map_err(SnapshotError::io(&self.root))
    }

    /// Files for a new snapshot of a sandbox with `disks` writable disks.
    pub fn draft(&self, disks: usize) -> Result<Draft, SnapshotError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{DRAFT}{}-{number}", std::process::id());
        Draft::create(&self.root, self.root.join(name), disks)
    }

    /// Opens and checks one snapshot.
    pub fn get(&self, id: &str) -> Result<Snapshot, SnapshotError> {
        Snapshot::open(&self.root, id)
    }

    /// Opens and checks a snapshot and all below it.
    pub fn lineage(&self, id: &str) -> Result<Lineage, SnapshotError> {
        Lineage::open(&self.root, id)
    }

    /// Ids of all snapshots, sorted; whether each is sound is told by [`Self::get`].
    pub fn ids(&self) -> Result<Vec<String>, SnapshotError> {
        let failed = |e| SnapshotError::io(&self.root)(e);
        let mut ids = Vec::new();
        for entry in fs::read_dir(&self.root).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            if let Some(id) = name.to_str().filter(|id| check_id(id).is_ok()) {
                ids.push(id.to_owned());
            }
        }
        ids.sort();
        Ok(ids)
    }

    /// Removes a snapshot that nothing runs from and nothing descends from. A damaged one can be removed too.
    pub fn remove(&self, id: &str) -> Result<(), SnapshotError> {
        check_id(id)?;
        let path = self.root.join(id);
        let manifest = path.join(MANIFEST);
        let lock = match File::open(&manifest) {
            Ok(file) => Some(
                Flock::lock(file, FlockArg::LockExclusiveNonblock)
                    .map_err(|_| SnapshotError::InUse(id.to_owned()))?,
            ),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(SnapshotError::io(&manifest)(e)),
        };
        if !path.exists() {
            return Err(SnapshotError::Missing(id.to_owned()));
        }
        if let Some(child) = self.child_of(id)? {
            let id = id.to_owned();
            return Err(SnapshotError::HasChild { id, child });
        }
        // Gone at once for everybody; its files follow.
        let trash = self
            .root
            .join(format!("{TRASH}{id}-{}", std::process::id()));
        fs::rename(&path, &trash).map_err(SnapshotError::io(&path))?;
        drop(lock);
        fs::remove_dir_all(&trash).map_err(SnapshotError::io(&trash))
    }

    fn child_of(&self, id: &str) -> Result<Option<String>, SnapshotError> {
        for other in self.ids()? {
            match self.get(&other) {
                Ok(snapshot) if snapshot.manifest().parent.as_deref() == Some(id) => {
                    return Ok(Some(other));
                }
                _ => {}
            }
        }
        Ok(None)
    }

    /// Removes what killed processes left half written or half removed. Call it when no other process uses the store.
    pub fn sweep(&self) -> Result<usize, SnapshotError> {
        let failed = |e| SnapshotError::io(&self.root)(e);
        let mut swept = 0;
        for entry in fs::read_dir(&self.root).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with(DRAFT) || name.starts_with(TRASH) {
                fs::remove_dir_all(entry.path()).map_err(failed)?;
                swept += 1;
            }
        }
        Ok(swept)
    }
}
