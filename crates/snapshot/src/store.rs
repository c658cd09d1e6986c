//! Directory of snapshots.

use crate::manifest::{Manifest, check_id};
use crate::snapshot::MANIFEST;
use crate::store_index::{self, StoreIndex};
use crate::{Lineage, Snapshot, SnapshotDraft, SnapshotError};
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, DirEntry, File, Permissions, ReadDir};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

/// Prefixes of unpublished, removed and captured snapshots: a dot, which no id starts with.
const DRAFT_PREFIX: &str = ".draft-";
const TRASH_PREFIX: &str = ".trash-";
const CAPTURED_PREFIX: &str = ".captured-";

/// Age at which a removal, or a captured draft, counts as abandoned; none takes this long.
const ABANDONED_AFTER: Duration = Duration::from_secs(3600);

/// Store of snapshots by id.
#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
    pub(crate) index: Arc<StoreIndex>,
}

impl Store {
    /// Opens the directory, creating it if needed.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, SnapshotError> {
        let root = root.into();
        fs::create_dir_all(&root).map_err(SnapshotError::io(&root))?;
        // Closed to other users, even if the directory above is open.
        fs::set_permissions(&root, Permissions::from_mode(0o700))
            .map_err(SnapshotError::io(&root))?;
        let index = StoreIndex::of(&root).map_err(SnapshotError::io(&root))?;
        Ok(Self { root, index })
    }

    /// Path of the directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Creates an empty, nameless file for a disk's writes, which a later snapshot links without
    /// copying.
    pub fn overlay(&self) -> Result<File, SnapshotError> {
        File::options()
            .read(true)
            .write(true)
            .custom_flags(nix::libc::O_TMPFILE)
            .mode(0o600)
            .open(&self.root)
            .map_err(SnapshotError::io(&self.root))
    }

    /// Creates the files of a new snapshot with `disks` writable disks.
    pub fn draft(&self, disks: usize) -> Result<SnapshotDraft, SnapshotError> {
        SnapshotDraft::create(&self.index, &self.root, self.new_draft_path(), disks)
    }

    /// Keeps the draft of snapshot `id` in place when this process ends: its memory is frozen in
    /// another one, which writes it. `overlays` are the disks' frozen overlays.
    pub fn keep_captured(
        &self,
        id: &str,
        draft: &mut SnapshotDraft,
        overlays: &[File],
    ) -> Result<(), SnapshotError> {
        draft.keep_at(self.captured_path(id)?, overlays)
    }

    /// Opens the draft of a snapshot that an earlier process captured, with `disks` writable disks,
    /// and their frozen overlays.
    pub fn captured(
        &self,
        id: &str,
        disks: usize,
    ) -> Result<(SnapshotDraft, Vec<File>), SnapshotError> {
        SnapshotDraft::reopen(&self.index, &self.root, &self.captured_path(id)?, disks)
    }

    /// Removes the draft of a snapshot that an earlier process captured, if there is one.
    pub fn discard_captured(&self, id: &str) -> Result<(), SnapshotError> {
        crate::draft::remove_draft(&self.captured_path(id)?);
        Ok(())
    }

    fn captured_path(&self, id: &str) -> Result<PathBuf, SnapshotError> {
        check_id(id)?;
        Ok(self.root.join(format!("{CAPTURED_PREFIX}{id}")))
    }

    /// Path of a directory for a snapshot that is being made, which is not there yet.
    pub(crate) fn new_draft_path(&self) -> PathBuf {
        let (own, pid) = (unique_name(), std::process::id());
        self.root.join(format!("{DRAFT_PREFIX}{pid}-{own}"))
    }

    /// Opens and checks a snapshot.
    pub fn get(&self, id: &str) -> Result<Snapshot, SnapshotError> {
        Snapshot::open(&self.root, id, &self.index.checked)
    }

    /// Opens and checks a snapshot and its ancestors.
    ///
    /// Their files are opened by their users, from a path: if one is not there then, a merge may
    /// have made it unneeded meanwhile, and a lineage that is opened anew tells it
    /// ([`Lineage::is_same`]).
    pub fn lineage(&self, id: &str) -> Result<Lineage, SnapshotError> {
        let open = || Lineage::open(&self.root, id, &self.index.checked);
        // Again where ancestors that were looked for have been merged into others and removed.
        open().or_else(|_| open()).or_else(|_| open())
    }

    /// Reads the manifest of a snapshot. Its files are not checked: see [`Self::get`].
    pub fn manifest(&self, id: &str) -> Result<Manifest, SnapshotError> {
        store_index::manifest(&self.root, id)
    }

    /// Ids of all snapshots, sorted; [`Self::get`] checks each.
    pub fn ids(&self) -> Result<Vec<String>, SnapshotError> {
        store_index::ids(&self.root)
    }

    /// Returns true if a snapshot has no parent. Reads its manifest.
    pub fn is_independent(&self, id: &str) -> Result<bool, SnapshotError> {
        Ok(self.manifest(id)?.parent.is_none())
    }

    /// Removes a snapshot without users and children, also a damaged one. The first removal waits
    /// until all manifests are read; the cost of others does not depend on the number of snapshots.
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
        let trash = self
            .root
            .join(format!("{TRASH_PREFIX}{id}-{}-{pid}", unique_name()));
        let mut index = self.index.loaded()?;
        while let Some(lineages) = index.tree()
            && let Some(child) = lineages.child(id).map(str::to_owned)
        {
            if self.root.join(&child).exists() {
                let id = id.to_owned();
                return Err(SnapshotError::HasChild { id, child });
            }
            // The child's files were removed by hand.
            lineages.remove(&child);
        }
        // Removed atomically for all users; the files follow.
        fs::rename(&path, &trash).map_err(SnapshotError::io(&path))?;
        if let Some(lineages) = index.tree() {
            lineages.remove(id);
        }
        drop((index, lock));
        self.index.checked.forget(id);
        let removed = match fs::remove_dir_all(&trash) {
            // A concurrent writer of checksums may have added its file, which happens at most once.
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => fs::remove_dir_all(&trash),
            other => other,
        };
        removed.map_err(SnapshotError::io(&trash))
    }

    /// Ids of the snapshots, in no order, read from the directory as they are taken. Removes drafts
    /// and incomplete removals that it comes by if they are of dead processes, and removals older
    /// than an hour at `now`, while others use the store.
    pub fn walk(&self, now: SystemTime) -> Result<StoreWalk, SnapshotError> {
        let entries = fs::read_dir(&self.root).map_err(SnapshotError::io(&self.root))?;
        Ok(StoreWalk {
            root: self.root.clone(),
            entries,
            now,
        })
    }
}

/// Ids of the snapshots of a store ([`Store::walk`]).
#[derive(Debug)]
pub struct StoreWalk {
    root: PathBuf,
    entries: ReadDir,
    now: SystemTime,
}

impl Iterator for StoreWalk {
    type Item = Result<String, SnapshotError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let entry = match self.entries.next()? {
                Ok(entry) => entry,
                Err(e) => return Some(Err(SnapshotError::io(&self.root)(e))),
            };
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if check_id(&name).is_ok() {
                return Some(Ok(name.into_owned()));
            }
            if is_abandoned(&entry, &name, self.now) {
                // Remains are found again by the next walk.
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }
}

/// True for a draft or an incomplete removal of a dead process, and for a removal or a captured
/// draft older than an hour.
fn is_abandoned(entry: &DirEntry, name: &str, now: SystemTime) -> bool {
    let modified = entry.metadata().and_then(|m| m.modified());
    let age = modified.ok().and_then(|m| now.duration_since(m).ok());
    let old = age.is_some_and(|age| age > ABANDONED_AFTER);
    let Some(pid) = maker_pid(name) else {
        // Those of guests that are lost were discarded already.
        return old && name.starts_with(CAPTURED_PREFIX);
    };
    match name.contains(run_id()) {
        // A draft of this process is in use as long as it exists.
        true => old && name.starts_with(TRASH_PREFIX),
        // Of an earlier process, whose id may be this one's by now.
        false => {
            let own = pid == std::process::id().to_string();
            old || own || !Path::new("/proc").join(pid).exists()
        }
    }
}

/// Random id of this run: the process id may have been another process's before, in a container for
/// example.
fn run_id() -> &'static str {
    static RUN: OnceLock<String> = OnceLock::new();
    RUN.get_or_init(|| format!("{:016x}", RandomState::new().build_hasher().finish()))
}

/// Unique part of a directory's name.
fn unique_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{}-{}", run_id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Id of the process that made a draft (`.draft-PID-...`) or trash (`.trash-...-PID`); none for
/// other names.
fn maker_pid(name: &str) -> Option<&str> {
    let pid = match name.strip_prefix(DRAFT_PREFIX) {
        Some(rest) => rest.split('-').next(),
        None => name.strip_prefix(TRASH_PREFIX)?.rsplit('-').next(),
    };
    pid.filter(|pid| pid.parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafts_of_dead_processes_are_removed_and_those_of_live_ones_stay() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let own = std::process::id();
        // Beyond the largest process id (pid_max, proc(5)).
        let dead = 4_194_305;
        let draft = store.draft(1).unwrap();
        let foreign = ".draft-1-0".to_owned();
        let removing = format!(".trash-abc-{}-{own}", unique_name());
        for name in [
            &foreign,
            &removing,
            // Of an earlier process with the same id.
            &format!(".draft-{own}-0"),
            &format!(".draft-{dead}-3"),
            &format!(".trash-abc-{dead}"),
            // Another process may still be writing it.
            ".captured-abd",
            "abc",
        ] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let now = SystemTime::now();
        let left = |now| {
            let ids: Vec<_> = store.walk(now).unwrap().map(Result::unwrap).collect();
            assert_eq!(ids, ["abc"]);
            fs::read_dir(dir.path()).unwrap().count()
        };
        assert_eq!(left(now), 5);
        for name in [&foreign, &removing, ".captured-abd", "abc"] {
            assert!(dir.path().join(name).exists(), "{name}");
        }
        assert_eq!(left(now + ABANDONED_AFTER * 2), 2);
        assert!(draft.path().exists() && dir.path().join("abc").exists());
    }
}
