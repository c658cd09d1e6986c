//! A directory of snapshots.

use crate::family::{self, Family};
use crate::manifest::{Manifest, check_id};
use crate::snapshot::MANIFEST;
use crate::{Draft, Lineage, Snapshot, SnapshotError};
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File, Permissions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

/// Names of what is no snapshot (yet, or any more) begin with a dot, which no id does.
const DRAFT: &str = ".draft-";
const TRASH: &str = ".trash-";

/// No removal takes this long.
const ABANDONED: Duration = Duration::from_secs(3600);

/// Snapshots by id.
#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
    pub(crate) family: Arc<Family>,
}

impl Store {
    /// Opens the directory, making it if need be.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, SnapshotError> {
        let root = root.into();
        fs::create_dir_all(&root).map_err(SnapshotError::io(&root))?;
        // What is in it is for its owner, also where the directory above is not closed.
        fs::set_permissions(&root, Permissions::from_mode(0o700))
            .map_err(SnapshotError::io(&root))?;
        let family = Family::of(&root).map_err(SnapshotError::io(&root))?;
        Ok(Self { root, family })
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
        let (own, pid) = (own_mark(), std::process::id());
        let name = format!("{DRAFT}{pid}-{own}");
        Draft::create(&self.family, &self.root, self.root.join(name), disks)
    }

    /// Opens and checks one snapshot.
    pub fn get(&self, id: &str) -> Result<Snapshot, SnapshotError> {
        Snapshot::open(&self.root, id)
    }

    /// Opens and checks a snapshot and all below it.
    pub fn lineage(&self, id: &str) -> Result<Lineage, SnapshotError> {
        Lineage::open(&self.root, id)
    }

    /// The manifest of one snapshot. The files it speaks of are not checked: see [`Self::get`].
    pub fn manifest(&self, id: &str) -> Result<Manifest, SnapshotError> {
        family::manifest(&self.root, id)
    }

    /// Ids of all snapshots, sorted; whether each is sound is told by [`Self::get`].
    pub fn ids(&self) -> Result<Vec<String>, SnapshotError> {
        family::ids(&self.root)
    }

    /// Whether a snapshot lies on no other. Answered from memory.
    pub fn is_independent(&self, id: &str) -> Result<bool, SnapshotError> {
        let family = self.family.known()?;
        let parent = family.as_ref().and_then(|tree| tree.parent(id));
        let parent = parent.ok_or_else(|| SnapshotError::Missing(id.to_owned()))?;
        Ok(parent.is_none())
    }

    /// Removes a snapshot that nothing runs from and nothing descends from. A damaged one can be removed too. It costs the
    /// same however many others there are.
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
        let pid = std::process::id();
        let trash = self.root.join(format!("{TRASH}{id}-{}-{pid}", own_mark()));
        let mut family = self.family.known()?;
        while let Some(tree) = family.as_mut()
            && let Some(child) = tree.child(id).map(str::to_owned)
        {
            if self.root.join(&child).exists() {
                let id = id.to_owned();
                return Err(SnapshotError::HasChild { id, child });
            }
            // Its files were taken away by hand.
            tree.remove(&child);
        }
        // Gone at once for everybody; its files follow.
        fs::rename(&path, &trash).map_err(SnapshotError::io(&path))?;
        if let Some(tree) = family.as_mut() {
            tree.remove(id);
        }
        drop((family, lock));
        let removed = match fs::remove_dir_all(&trash) {
            // Whoever was sealing it put the seal in after the others were gone, and does so once.
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => fs::remove_dir_all(&trash),
            other => other,
        };
        removed.map_err(SnapshotError::io(&trash))
    }

    /// Removes what processes that are gone left half written or half removed, and what is half removed for an hour, while
    /// others use the store. Returns how many things there were.
    pub fn sweep(&self, now: SystemTime) -> Result<usize, SnapshotError> {
        let failed = |e| SnapshotError::io(&self.root)(e);
        let own = std::process::id().to_string();
        let mut swept = 0;
        for entry in fs::read_dir(&self.root).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let Some(pid) = maker(&name) else { continue };
            let modified = entry.metadata().and_then(|m| m.modified());
            let age = modified.ok().and_then(|m| now.duration_since(m).ok());
            let old = age.is_some_and(|age| age > ABANDONED);
            let dead = match name.contains(run()) {
                // A draft of this process is somebody's as long as it is there.
                true => old && name.starts_with(TRASH),
                // Of an earlier process, whose number may be ours by now.
                false => old || pid == own || !Path::new("/proc").join(pid).exists(),
            };
            if dead && fs::remove_dir_all(entry.path()).is_ok() {
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
}

/// Word for this run of this process: its number may have been another one's before, in a container for example.
fn run() -> &'static str {
    static RUN: OnceLock<String> = OnceLock::new();
    RUN.get_or_init(|| format!("{:016x}", RandomState::new().build_hasher().finish()))
}

/// Part of a name that nothing else has or had.
fn own_mark() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{}-{}", run(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Process that made a draft (`.draft-PID-...`) or trash (`.trash-...-PID`); none of other names.
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
        let dead = 4_194_305;
        let draft = store.draft(1).unwrap();
        let foreign = ".draft-1-0".to_owned();
        let removing = format!(".trash-abc-{}-{own}", own_mark());
        for name in [
            &foreign,
            &removing,
            // Of an earlier process with our number.
            &format!(".draft-{own}-0"),
            &format!(".draft-{dead}-3"),
            &format!(".trash-abc-{dead}"),
            "abc",
        ] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let now = SystemTime::now();
        assert_eq!(store.sweep(now).unwrap(), 3);
        for name in [&foreign, &removing, "abc"] {
            assert!(dir.path().join(name).exists(), "{name}");
        }
        assert_eq!(store.sweep(now + ABANDONED * 2).unwrap(), 2);
        assert!(draft.path().exists() && dir.path().join("abc").exists());
        drop(draft);
        fs::write(dir.path().join("abc/x"), [1; 10_000]).unwrap();
        assert!((10_000..100_000).contains(&store.disk_bytes().unwrap()));
    }
}
