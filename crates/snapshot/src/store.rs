//! A directory of snapshots.

use crate::manifest::check_id;
use crate::snapshot::MANIFEST;
use crate::{Draft, Lineage, Snapshot, SnapshotError};
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// Names of what is no snapshot (yet, or any more) begin with a dot, which no id does.
const DRAFT: &str = ".draft-";
const TRASH: &str = ".trash-";

/// No draft takes this long.
const ABANDONED: Duration = Duration::from_secs(3600);

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
        let removed = match fs::remove_dir_all(&trash) {
            // Whoever was sealing it put the seal in after the others were gone, and does so once.
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => fs::remove_dir_all(&trash),
            other => other,
        };
        removed.map_err(SnapshotError::io(&trash))
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

    /// The same while others use the store: what belongs to a process that is gone, or is an hour old.
    pub fn sweep_abandoned(&self, now: SystemTime) -> Result<usize, SnapshotError> {
        let failed = |e| SnapshotError::io(&self.root)(e);
        let mut swept = 0;
        for entry in fs::read_dir(&self.root).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let Some(pid) = maker(&name) else { continue };
            let modified = entry.metadata().and_then(|m| m.modified());
            let age = modified.ok().and_then(|m| now.duration_since(m).ok());
            let old = age.is_some_and(|age| age > ABANDONED);
            if (old || !Path::new("/proc").join(pid).exists())
                && fs::remove_dir_all(entry.path()).is_ok()
            {
                swept += 1;
            }
        }
        Ok(swept)
    }

    /// Disk space of everything in it, in bytes.
    pub fn disk_bytes(&self) -> Result<u64, SnapshotError> {
        let failed = |e| SnapshotError::io(&self.root)(e);
        let mut bytes = 0;
        for entry in fs::read_dir(&self.root).map_err(failed)?.flatten() {
            // One that is removed meanwhile counts nothing.
            for file in fs::read_dir(entry.path()).into_iter().flatten().flatten() {
                bytes += file.metadata().map_or(0, |m| m.blocks() * 512);
            }
        }
        Ok(bytes)
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

/// Process that made a draft (`.draft-PID-N`) or trash (`.trash-ID-PID`); none of other names.
fn maker(name: &str) -> Option<&str> {
    let pid = match name.strip_prefix(DRAFT) {
        Some(rest) => rest.split('-').next(),
        None => name.strip_prefix(TRASH)?.rsplit('-').next(),
    };
    pid.filter(|pid| pid.parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_dead_left_goes_and_what_the_living_write_stays() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let own = std::process::id();
        // Beyond the largest process id there can be (pid_max, proc(5)).
        let (dead, living) = (4_194_305, format!(".draft-{own}-0"));
        for name in [
            &living,
            &format!(".draft-{dead}-3"),
            &format!(".trash-abc-{dead}"),
            "abc",
        ] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let now = SystemTime::now();
        assert_eq!(store.sweep_abandoned(now).unwrap(), 2);
        assert!(dir.path().join(&living).exists() && dir.path().join("abc").exists());
        assert_eq!(store.sweep_abandoned(now + ABANDONED * 2).unwrap(), 1);
        fs::write(dir.path().join("abc/x"), [1; 10_000]).unwrap();
        assert!((10_000..100_000).contains(&store.disk_bytes().unwrap()));
    }
}
