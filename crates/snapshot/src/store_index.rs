//! In-memory index of parents and children of the snapshots in one directory.
//!
//! All manifests are read once, at the first query. Afterwards, every published or removed snapshot
//! updates the index. Only one process at a time writes to a directory; all its stores of this
//! directory share one index.
//!
//! A *fold* merges the files of a snapshot into the files of its only child.

use crate::SnapshotError;
use crate::checked_snapshots::CheckedSnapshots;
use crate::manifest::{Manifest, check_id};
use crate::snapshot::{MANIFEST, MAX_MANIFEST_BYTES, read};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io;
use std::mem;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Number of manifests that are read without a pause. Each read briefly holds the kernel's lock of
/// the directory. Other threads need this lock to publish snapshots.
const MANIFESTS_WITHOUT_PAUSE: usize = 64;
/// Length of the pause as a multiple of the time that these reads took.
const SCAN_PAUSES: u32 = 3;
/// Maximum length of the pause. On a busy host, most of the measured time was spent waiting, and
/// the multiple alone would be too long.
const MAX_SCAN_PAUSE: Duration = Duration::from_millis(10);

/// Device and inode number of a directory.
type DirId = (u64, u64);

/// Indexes of all directories used by this process. Weak references: an index is dropped with the
/// last store of its directory.
static STORE_INDEXES: OnceLock<Mutex<HashMap<DirId, Weak<StoreIndex>>>> = OnceLock::new();

/// Index of one directory.
#[derive(Debug)]
pub(crate) struct StoreIndex {
    root: PathBuf,
    state: Mutex<IndexState>,
    /// Notified when the manifests were read or could not be read.
    scanned: Condvar,
    /// Cache of checked snapshots.
    pub checked: CheckedSnapshots,
}

/// State of the index.
#[derive(Debug, Default)]
pub(crate) enum IndexState {
    /// No query has requested the index yet.
    #[default]
    NotLoaded,
    /// The manifests are being read. Snapshots published meanwhile are recorded with their parents.
    Scanning(Vec<(String, Option<String>)>),
    /// The index is complete.
    Loaded(LineageTree),
}

impl IndexState {
    /// Returns the tree. `None` unless the index is complete.
    pub fn tree(&mut self) -> Option<&mut LineageTree> {
        match self {
            Self::Loaded(tree) => Some(tree),
            Self::NotLoaded | Self::Scanning(_) => None,
        }
    }
}

/// Parent by child, and children by parent. Snapshots without a parent have no entry.
#[derive(Debug, Default)]
pub(crate) struct LineageTree {
    /// Parents by id of the child.
    parents: HashMap<String, String>,
    /// Children by id of the parent.
    children: HashMap<String, BTreeSet<String>>,
}

impl LineageTree {
    /// Adds the published snapshot `id` with its parent.
    pub fn insert(&mut self, id: &str, parent: Option<&str>) {
        self.remove(id);
        if let Some(parent) = parent {
            self.parents.insert(id.to_owned(), parent.to_owned());
            let children = self.children.entry(parent.to_owned()).or_default();
            children.insert(id.to_owned());
        }
    }

    /// Removes `id`. Its children remain.
    pub fn remove(&mut self, id: &str) {
        let Some(parent) = self.parents.remove(id) else {
            return;
        };
        if let Some(children) = self.children.get_mut(&parent) {
            children.remove(id);
            if children.is_empty() {
                self.children.remove(&parent);
            }
        }
    }

    /// Returns whether `child` is the only child of `id`.
    pub fn is_only_child(&self, id: &str, child: &str) -> bool {
        let children = self.children.get(id);
        children.is_some_and(|children| children.len() == 1 && children.contains(child))
    }

    /// Returns one of the children of `id`.
    pub fn child(&self, id: &str) -> Option<&str> {
        let children = self.children.get(id)?;
        children.first().map(String::as_str)
    }
}

/// Locked index. No snapshot is removed while the lock is held.
pub(crate) type LockedIndex<'a> = MutexGuard<'a, IndexState>;

impl StoreIndex {
    /// Returns the index of the directory `root`.
    pub fn of(root: &Path) -> io::Result<Arc<Self>> {
        let metadata = fs::metadata(root)?;
        // Identify the directory by its inode, because several paths may lead to it.
        let dir_id = (metadata.dev(), metadata.ino());
        // Hold the lock until the new index is inserted, so that no second index of the directory
        // is created.
        let indexes = STORE_INDEXES.get_or_init(Mutex::default);
        let mut indexes = indexes.lock();
        indexes.retain(|_, index| index.strong_count() > 0);
        if let Some(index) = indexes.get(&dir_id).and_then(Weak::upgrade) {
            return Ok(index);
        }
        let index = Arc::new(Self {
            root: root.to_owned(),
            state: Mutex::default(),
            scanned: Condvar::new(),
            checked: CheckedSnapshots::default(),
        });
        indexes.insert(dir_id, Arc::downgrade(&index));
        Ok(index)
    }

    /// Locks the index. Reads the manifests first if necessary; the lock is released meanwhile, so
    /// that other threads can publish snapshots.
    pub fn loaded(&self) -> Result<LockedIndex<'_>, SnapshotError> {
        let mut state = self.state.lock();
        loop {
            match *state {
                IndexState::Loaded(_) => return Ok(state),
                IndexState::Scanning(_) => self.scanned.wait(&mut state),
                IndexState::NotLoaded => {
                    *state = IndexState::Scanning(Vec::new());
                    let tree = MutexGuard::unlocked(&mut state, || scan(&self.root));
                    // `take` leaves `NotLoaded`: if the scan failed, the next query repeats the
                    // scan.
                    let before = mem::take(&mut *state);
                    self.scanned.notify_all();
                    let mut tree = tree?;
                    // Apply these last: the scan may have read an older manifest of the same
                    // snapshot.
                    if let IndexState::Scanning(published) = before {
                        for (id, parent) in published {
                            tree.insert(&id, parent.as_deref());
                        }
                    }
                    *state = IndexState::Loaded(tree);
                }
            }
        }
    }

    /// Records that `parent` was folded into `id`, whose parent is now `grandparent`. The folded
    /// snapshot will be removed, so it no longer counts as a child.
    pub fn fold(&self, id: &str, parent: &str, grandparent: Option<&str>) {
        self.insert(id, grandparent);
        if let Some(tree) = self.state.lock().tree() {
            tree.remove(parent);
        }
    }

    /// Adds the published snapshot `id` with its parent.
    pub fn insert(&self, id: &str, parent: Option<&str>) {
        match &mut *self.state.lock() {
            // The snapshot will be read from the directory.
            IndexState::NotLoaded => {}
            IndexState::Scanning(published) => {
                published.push((id.to_owned(), parent.map(str::to_owned)));
            }
            IndexState::Loaded(tree) => tree.insert(id, parent),
        }
    }
}

/// Returns the ids of the snapshots in `root`, sorted.
pub(crate) fn ids(root: &Path) -> Result<Vec<String>, SnapshotError> {
    let mut ids = names(root)?.collect::<Result<Vec<String>, _>>()?;
    ids.sort_unstable();
    Ok(ids)
}

/// Iterates over the ids of the snapshots in `root`, in no particular order.
fn names(
    root: &Path,
) -> Result<impl Iterator<Item = Result<String, SnapshotError>>, SnapshotError> {
    let failed = |e| SnapshotError::io(root)(e);
    let entries = fs::read_dir(root).map_err(failed)?;
    Ok(entries.filter_map(move |entry| {
        let name = entry.map(|entry| entry.file_name());
        let id = name.map(|name| name.into_string().ok().filter(|id| check_id(id).is_ok()));
        id.map_err(failed).transpose()
    }))
}

/// Reads all manifests. A snapshot with a damaged manifest counts as independent: it can only be
/// removed.
fn scan(root: &Path) -> Result<LineageTree, SnapshotError> {
    let mut lineages = LineageTree::default();
    let mut began = Instant::now();
    // The names are not sorted because the directory may contain very many.
    for (at, id) in (1..).zip(names(root)?) {
        let id = id?;
        let manifest = manifest(root, &id).ok();
        lineages.insert(&id, manifest.and_then(|m| m.parent).as_deref());
        // Pause: other threads wait for the directory's lock in the kernel.
        if at % MANIFESTS_WITHOUT_PAUSE == 0 {
            thread::sleep((began.elapsed() * SCAN_PAUSES).min(MAX_SCAN_PAUSE));
            began = Instant::now();
        }
    }
    Ok(lineages)
}

/// Reads the manifest of snapshot `id`, without checking its files.
pub(crate) fn manifest(root: &Path, id: &str) -> Result<Manifest, SnapshotError> {
    check_id(id)?;
    let path = root.join(id);
    if !path.is_dir() {
        return Err(SnapshotError::Missing(id.to_owned()));
    }
    let file = path.join(MANIFEST);
    Manifest::parse(&read(&file, MAX_MANIFEST_BYTES)?, id, &file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_are_listed_until_they_are_removed() {
        let mut lineages = LineageTree::default();
        lineages.insert("a", None);
        lineages.insert("b", Some("a"));
        lineages.insert("c", Some("a"));
        assert_eq!(
            (lineages.child("a"), lineages.child("b")),
            (Some("b"), None)
        );
        lineages.remove("b");
        assert_eq!(lineages.child("a"), Some("c"));
        // A merge of `c` with its ancestors leaves this state: `c` has no parent.
        lineages.insert("c", None);
        assert_eq!(lineages.child("a"), None);
        lineages.remove("a");
        lineages.remove("a");
        assert!(lineages.parents.is_empty() && lineages.children.is_empty());
    }

    #[test]
    fn a_snapshot_that_is_published_while_manifests_are_read_is_in_the_index() {
        let dir = tempfile::tempdir().unwrap();
        let index = StoreIndex::of(dir.path()).unwrap();
        index.insert("before", Some("a"));
        *index.state.lock() = IndexState::Scanning(Vec::new());
        index.insert("meanwhile", Some("a"));
        let IndexState::Scanning(published) = mem::take(&mut *index.state.lock()) else {
            panic!("the index is already loaded");
        };
        assert_eq!(published, [("meanwhile".to_owned(), Some("a".to_owned()))]);
        // On a real host, the scan would find the snapshot `before` on disk. In this test, no
        // snapshot is on disk.
        assert_eq!(index.loaded().unwrap().tree().unwrap().child("a"), None);
        index.insert("after", Some("a"));
        let mut loaded = index.loaded().unwrap();
        assert_eq!(loaded.tree().unwrap().child("a"), Some("after"));
    }

    #[test]
    fn stores_of_one_directory_share_one_index() {
        let dir = tempfile::tempdir().unwrap();
        let (one, other) = (
            StoreIndex::of(dir.path()),
            StoreIndex::of(&dir.path().join(".")),
        );
        assert!(Arc::ptr_eq(&one.unwrap(), &other.unwrap()));
    }
}
