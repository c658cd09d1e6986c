//! In-memory index of parents and children of the snapshots in one directory.
//!
//! The manifests are read once, at the first query; from then on every published or removed
//! snapshot updates the index. One process at a time writes to a directory; its stores of the same
//! directory share one index.

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

/// Manifests that are read without a pause: a lookup holds the directory's lock, for which others
/// wait that publish snapshots.
const MANIFESTS_WITHOUT_PAUSE: usize = 64;
/// Pause after them, in times of how long they took, and the longest: on a busy host most of that
/// is waiting.
const SCAN_PAUSES: u32 = 3;
const MAX_SCAN_PAUSE: Duration = Duration::from_millis(10);

/// Device and inode of a directory.
type DirId = (u64, u64);

/// Indexes of this process.
static STORE_INDEXES: OnceLock<Mutex<HashMap<DirId, Weak<StoreIndex>>>> = OnceLock::new();

/// Index of one directory.
#[derive(Debug)]
pub(crate) struct StoreIndex {
    root: PathBuf,
    state: Mutex<IndexState>,
    /// Told when the manifests were read, or could not be.
    scanned: Condvar,
    /// Snapshots that were read and checked.
    pub checked: CheckedSnapshots,
}

/// Lineages as far as they are known.
#[derive(Debug, Default)]
pub(crate) enum IndexState {
    /// Nothing asked for them yet.
    #[default]
    Unknown,
    /// The manifests are being read. What is published meanwhile is noted, with its parent.
    Scanning(Vec<(String, Option<String>)>),
    /// Known.
    Known(LineageTree),
}

impl IndexState {
    /// The lineages, if they are known.
    pub fn tree(&mut self) -> Option<&mut LineageTree> {
        match self {
            Self::Known(tree) => Some(tree),
            Self::Unknown | Self::Scanning(_) => None,
        }
    }
}

/// Parents by child, and children by parent. Snapshots without a parent are not in it.
#[derive(Debug, Default)]
pub(crate) struct LineageTree {
    parents: HashMap<String, String>,
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

    /// Removes `id`. Its children stay.
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

    /// Returns true if `child` is the only child of `id`.
    pub fn is_only_child(&self, id: &str, child: &str) -> bool {
        let children = self.children.get(id);
        children.is_some_and(|children| children.len() == 1 && children.contains(child))
    }

    /// One of the children of `id`.
    pub fn child(&self, id: &str) -> Option<&str> {
        let children = self.children.get(id)?;
        children.first().map(String::as_str)
    }
}

/// Locked index. No snapshot is removed while it is held.
pub(crate) type LockedIndex<'a> = MutexGuard<'a, IndexState>;

impl StoreIndex {
    /// Returns the index of the directory `root`.
    pub fn of(root: &Path) -> io::Result<Arc<Self>> {
        let metadata = fs::metadata(root)?;
        let place = (metadata.dev(), metadata.ino());
        let all = STORE_INDEXES.get_or_init(Mutex::default);
        let mut all = all.lock();
        all.retain(|_, index| index.strong_count() > 0);
        if let Some(index) = all.get(&place).and_then(Weak::upgrade) {
            return Ok(index);
        }
        let index = Arc::new(Self {
            root: root.to_owned(),
            state: Mutex::default(),
            scanned: Condvar::new(),
            checked: CheckedSnapshots::default(),
        });
        all.insert(place, Arc::downgrade(&index));
        Ok(index)
    }

    /// Locks the index, and reads the manifests first if it is not known. Meanwhile others publish
    /// snapshots.
    pub fn loaded(&self) -> Result<LockedIndex<'_>, SnapshotError> {
        let mut state = self.state.lock();
        loop {
            match *state {
                IndexState::Known(_) => return Ok(state),
                IndexState::Scanning(_) => self.scanned.wait(&mut state),
                IndexState::Unknown => {
                    *state = IndexState::Scanning(Vec::new());
                    let tree = MutexGuard::unlocked(&mut state, || scan(&self.root));
                    let before = mem::take(&mut *state);
                    self.scanned.notify_all();
                    let mut tree = tree?;
                    if let IndexState::Scanning(published) = before {
                        for (id, parent) in published {
                            tree.insert(&id, parent.as_deref());
                        }
                    }
                    *state = IndexState::Known(tree);
                }
            }
        }
    }

    /// Notes that `parent` was folded into `id`, which lies on `grandparent` now. The parent is
    /// removed soon, and does not count as lying on anything until then.
    pub fn fold(&self, id: &str, parent: &str, grandparent: Option<&str>) {
        self.insert(id, grandparent);
        if let Some(tree) = self.state.lock().tree() {
            tree.remove(parent);
        }
    }

    /// Adds the published snapshot `id` with its parent.
    pub fn insert(&self, id: &str, parent: Option<&str>) {
        match &mut *self.state.lock() {
            // It is read from the directory later.
            IndexState::Unknown => {}
            IndexState::Scanning(published) => {
                published.push((id.to_owned(), parent.map(str::to_owned)));
            }
            IndexState::Known(tree) => tree.insert(id, parent),
        }
    }
}

/// Ids of the snapshots in `root`, sorted.
pub(crate) fn ids(root: &Path) -> Result<Vec<String>, SnapshotError> {
    let mut ids = names(root)?.collect::<Result<Vec<String>, _>>()?;
    ids.sort_unstable();
    Ok(ids)
}

/// Ids of the snapshots in `root`, in no order.
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

/// Reads every manifest. A snapshot with a damaged manifest has no parent: it cannot be used, only
/// removed.
fn scan(root: &Path) -> Result<LineageTree, SnapshotError> {
    let mut lineages = LineageTree::default();
    let mut began = Instant::now();
    // Not sorted: there may be very many.
    for (at, id) in (1..).zip(names(root)?) {
        let id = id?;
        let manifest = manifest(root, &id).ok();
        lineages.insert(&id, manifest.and_then(|m| m.parent).as_deref());
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
    fn children_are_known_until_they_are_removed() {
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
        // As after a merge.
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
            panic!("it was known");
        };
        assert_eq!(published, [("meanwhile".to_owned(), Some("a".to_owned()))]);
        // The first is on the disk, where it is not in this test.
        assert_eq!(index.loaded().unwrap().tree().unwrap().child("a"), None);
        index.insert("after", Some("a"));
        let mut known = index.loaded().unwrap();
        assert_eq!(known.tree().unwrap().child("a"), Some("after"));
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
