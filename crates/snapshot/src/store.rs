//! [`Store`]: a directory of snapshots, with one subdirectory per snapshot, and hidden
//! subdirectories for snapshots that are being written or removed. It is local to a host, unlike
//! the crate `jiffy-store`.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors. The *overlay* is the
//! file that receives the disk writes of a guest.
//!
//! A *draft* is the directory of a snapshot that is not published yet. A draft is *captured* when
//! the memory of its snapshot is frozen in a VMM process, which completes the draft even if this
//! process exits.

pub(crate) mod fold;
pub(crate) mod import;
mod merge;
pub(crate) mod parts;

use crate::manifest::{Manifest, check_id};
use crate::snapshot::MANIFEST;
use crate::snapshot::missing::MISSING_FILE;
use crate::store_index::{self, StoreIndex};
use crate::{Lineage, Snapshot, SnapshotDraft, SnapshotError, checksums};
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, DirEntry, File, Permissions, ReadDir};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

/// Prefixes of the names of unpublished, removed and captured snapshots. Ids contain no dot, so
/// these names are never ids.
const DRAFT_PREFIX: &str = ".draft-";
const TRASH_PREFIX: &str = ".trash-";
const CAPTURED_PREFIX: &str = ".captured-";

/// Age above which a removal, a captured draft or a draft of another process is abandoned. No
/// operation takes this long.
const ABANDONED_AFTER: Duration = Duration::from_secs(3600);

/// Snapshots of one directory, by id.
#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
    pub(crate) index: Arc<StoreIndex>,
}

impl Store {
    /// Opens the directory, and creates it if it does not exist.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, SnapshotError> {
        let root = root.into();
        fs::create_dir_all(&root).map_err(SnapshotError::io(&root))?;
        // Make the directory inaccessible to other users, even if its parent directory is
        // accessible.
        fs::set_permissions(&root, Permissions::from_mode(0o700))
            .map_err(SnapshotError::io(&root))?;
        let index = StoreIndex::of(&root).map_err(SnapshotError::io(&root))?;
        Ok(Self { root, index })
    }

    /// Returns the path of the directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Creates an empty, unnamed file for the writes of a disk. A snapshot can link the file
    /// instead of copying it.
    pub fn overlay(&self) -> Result<File, SnapshotError> {
        // O_TMPFILE: the kernel removes the file when it is closed, unless it was linked.
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

    /// Makes the draft of snapshot `id` outlive this process. The snapshot's memory is frozen in a
    /// VMM process, which writes it to the draft even after this process has exited. `overlays` are
    /// the frozen overlays of the disks.
    pub fn persist_captured(
        &self,
        id: &str,
        draft: &mut SnapshotDraft,
        overlays: &[File],
    ) -> Result<(), SnapshotError> {
        draft.persist_at(self.captured_path(id)?, overlays)
    }

    /// Opens the draft of a snapshot with `disks` writable disks that an earlier process captured.
    /// Returns the draft and the frozen overlays of the disks.
    pub fn captured(
        &self,
        id: &str,
        disks: usize,
    ) -> Result<(SnapshotDraft, Vec<File>), SnapshotError> {
        SnapshotDraft::reopen(&self.index, &self.root, &self.captured_path(id)?, disks)
    }

    /// Removes the draft of a snapshot that an earlier process captured, if it exists.
    pub fn discard_captured(&self, id: &str) -> Result<(), SnapshotError> {
        crate::draft::remove_draft(&self.captured_path(id)?);
        Ok(())
    }

    fn captured_path(&self, id: &str) -> Result<PathBuf, SnapshotError> {
        check_id(id)?;
        Ok(self.root.join(format!("{CAPTURED_PREFIX}{id}")))
    }

    /// Returns an unused path for the directory of a new draft.
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
    /// Callers open the files later, by path. If a file is missing then, a concurrent merge may
    /// have removed it: open the lineage again and compare both ([`Lineage::is_same`]).
    pub fn lineage(&self, id: &str) -> Result<Lineage, SnapshotError> {
        let open = || Lineage::open(&self.root, id, &self.index.checked);
        // Retry: an ancestor may have been merged and removed while the lineage was opened.
        open().or_else(|_| open()).or_else(|_| open())
    }

    /// Reads the manifest of a snapshot without checking its files: see [`Self::get`].
    pub fn manifest(&self, id: &str) -> Result<Manifest, SnapshotError> {
        store_index::manifest(&self.root, id)
    }

    /// Returns the ids of all snapshots, sorted. The snapshots are not checked.
    pub fn ids(&self) -> Result<Vec<String>, SnapshotError> {
        store_index::ids(&self.root)
    }

    /// Returns whether a snapshot has no parent. Reads its manifest.
    pub fn is_independent(&self, id: &str) -> Result<bool, SnapshotError> {
        Ok(self.manifest(id)?.parent.is_none())
    }

    /// Removes a snapshot that has no users and no children, even if it is damaged. The first
    /// removal waits until all manifests are read. The cost of further removals does not depend on
    /// the number of snapshots.
    pub fn remove(&self, id: &str) -> Result<(), SnapshotError> {
        check_id(id)?;
        let path = self.root.join(id);
        let manifest = path.join(MANIFEST);
        // Users of the snapshot hold a shared lock on its manifest ([`Snapshot::hold`]).
        let lock = match File::open(&manifest) {
            Ok(file) => Some(
                Flock::lock(file, FlockArg::LockExclusiveNonblock)
                    .map_err(|_| SnapshotError::InUse(id.to_owned()))?,
            ),
            // A snapshot without a manifest is damaged and cannot be held.
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
        // The lock is held until the rename, so that only one snapshot is removed at a time.
        let mut index = self.index.loaded()?;
        while let Some(lineages) = index.tree()
            && let Some(child) = lineages.child(id).map(str::to_owned)
        {
            if self.root.join(&child).exists() {
                let id = id.to_owned();
                return Err(SnapshotError::HasChild { id, child });
            }
            // The child's files were removed manually.
            lineages.remove(&child);
        }
        // Rename first: the snapshot disappears atomically, before its files are removed.
        fs::rename(&path, &trash).map_err(SnapshotError::io(&path))?;
        if let Some(lineages) = index.tree() {
            lineages.remove(id);
        }
        // Removing the files takes time and needs no lock.
        drop((index, lock));
        self.index.checked.remove(id);
        let removed = match fs::remove_dir_all(&trash) {
            // A concurrent writer may have added the checksums, which happens at most once.
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => fs::remove_dir_all(&trash),
            other => other,
        };
        removed.map_err(SnapshotError::io(&trash))
    }

    /// Iterates over the ids of the snapshots in no particular order, reading the directory lazily.
    /// Deletes drafts and incomplete removals of exited processes. Also deletes removals, captured
    /// drafts and drafts of other processes that are older than an hour at `now`. Other processes
    /// may use the store meanwhile.
    pub fn walk(&self, now: SystemTime) -> Result<StoreWalk, SnapshotError> {
        let entries = fs::read_dir(&self.root).map_err(SnapshotError::io(&self.root))?;
        Ok(StoreWalk {
            root: self.root.clone(),
            entries,
            now,
        })
    }

    /// Checks snapshot `id` for damage: missing files, files of unexpected size, and small files
    /// that differ from their checksums. Layers are not read, and ancestors are not checked.
    pub fn find_damage(&self, id: &str) -> Option<SnapshotError> {
        let snapshot = self.get(id);
        let checked = snapshot.and_then(|snapshot| checksums::verify_small_files(&snapshot));
        checked.err().filter(SnapshotError::is_damage)
    }

    /// Returns whether chunks of snapshot `id` are missing. Checks the existence of one file.
    pub fn is_incomplete(&self, id: &str) -> bool {
        self.root().join(id).join(MISSING_FILE).exists()
    }
}

/// Iterator over the ids of a store's snapshots ([`Store::walk`]).
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
                // Ignore the error: the next walk tries again.
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }
}

/// Returns whether an entry is a draft or an incomplete removal of an exited process, or a draft,
/// removal or captured draft older than an hour. A draft of this process is never abandoned.
fn is_abandoned(entry: &DirEntry, name: &str, now: SystemTime) -> bool {
    let modified = entry.metadata().and_then(|m| m.modified());
    let age = modified.ok().and_then(|m| now.duration_since(m).ok());
    // An entry whose age is unknown, for example after a change of the clock, counts as new.
    let old = age.is_some_and(|age| age > ABANDONED_AFTER);
    let Some(pid) = creator_pid(name) else {
        // Names of captured drafts contain no process id, because a VMM may write a draft after the
        // creator of the draft has exited. Recovery discards the drafts of lost guests, so only old
        // leftovers are abandoned.
        return old && name.starts_with(CAPTURED_PREFIX);
    };
    if name.contains(run_id()) {
        // A draft of this process is in use while it exists.
        old && name.starts_with(TRASH_PREFIX)
    } else {
        // An earlier process created the draft. Its id may have been reused for this process.
        let own = pid == std::process::id().to_string();
        old || own || !Path::new("/proc").join(pid).exists()
    }
}

/// Returns the random id of this run. A process id alone is not unique, for example in containers.
fn run_id() -> &'static str {
    static RUN: OnceLock<String> = OnceLock::new();
    RUN.get_or_init(|| format!("{:016x}", RandomState::new().build_hasher().finish()))
}

/// Returns a unique part of a directory name.
fn unique_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{}-{}", run_id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Returns the id of the process that created a draft (`.draft-PID-...`) or a removal
/// (`.trash-...-PID`). `None` for other names.
fn creator_pid(name: &str) -> Option<&str> {
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
    fn drafts_of_exited_processes_are_removed_and_other_drafts_remain() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let own = std::process::id();
        // Above the maximum process id (pid_max, proc(5)).
        let dead = 4_194_305;
        let draft = store.draft(1).unwrap();
        // Process 1 always runs.
        let foreign = ".draft-1-0".to_owned();
        let removing = format!(".trash-abc-{}-{own}", unique_name());
        for name in [
            &foreign,
            &removing,
            // An earlier process with the same id created this one.
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
        let remaining = |now| {
            let ids: Vec<_> = store.walk(now).unwrap().map(Result::unwrap).collect();
            assert_eq!(ids, ["abc"]);
            fs::read_dir(dir.path()).unwrap().count()
        };
        assert_eq!(remaining(now), 5);
        for name in [&foreign, &removing, ".captured-abd", "abc"] {
            assert!(dir.path().join(name).exists(), "{name}");
        }
        assert_eq!(remaining(now + ABANDONED_AFTER * 2), 2);
        assert!(draft.path().exists() && dir.path().join("abc").exists());
    }
}
