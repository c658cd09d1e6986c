//! In-memory index of parents and children of the snapshots in one directory.
//!
//! The manifests are read once, at the first query; from then on every published or removed
//! snapshot updates the index. One process at a time writes to a directory; its stores of the same
//! directory share one index.

use crate::SnapshotError;
use crate::manifest::{Manifest, check_id};
use crate::snapshot::{MANIFEST, MAX_MANIFEST_BYTES, read};
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak};

/// Device and inode of a directory.
type DirId = (u64, u64);

/// Indexes of this process.
static STORE_INDEXES: OnceLock<Mutex<HashMap<DirId, Weak<StoreIndex>>>> = OnceLock::new();

/// Index of one directory.
#[derive(Debug)]
pub(crate) struct StoreIndex {
    root: PathBuf,
    /// None until the first query.
    lineages: Mutex<Option<LineageTree>>,
}

/// Parents by child, and children by parent.
#[derive(Debug, Default)]
pub(crate) struct LineageTree {
    parents: HashMap<String, Option<String>>,
    children: HashMap<String, BTreeSet<String>>,
}

impl LineageTree {
    /// Adds the published snapshot `id` with its parent.
    pub fn insert(&mut self, id: &str, parent: Option<&str>) {
        self.remove(id);
        self.parents
            .insert(id.to_owned(), parent.map(str::to_owned));
        if let Some(parent) = parent {
            let children = self.children.entry(parent.to_owned()).or_default();
            children.insert(id.to_owned());
        }
    }

    /// Removes `id`. Its children stay.
    pub fn remove(&mut self, id: &str) {
        let Some(Some(parent)) = self.parents.remove(id) else {
            return;
        };
        if let Some(children) = self.children.get_mut(&parent) {
            children.remove(id);
            if children.is_empty() {
                self.children.remove(&parent);
            }
        }
    }

    /// Parent of `id`; none if there is no such snapshot.
    pub fn parent(&self, id: &str) -> Option<Option<&str>> {
        self.parents.get(id).map(Option::as_deref)
    }

    /// One of the children of `id`.
    pub fn child(&self, id: &str) -> Option<&str> {
        let children = self.children.get(id)?;
        children.first().map(String::as_str)
    }
}

/// Locked index. No snapshot is removed while it is held.
pub(crate) type LockedIndex<'a> = MutexGuard<'a, Option<LineageTree>>;

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
            lineages: Mutex::default(),
        });
        all.insert(place, Arc::downgrade(&index));
        Ok(index)
    }

    /// Locks the index for an update, without loading it.
    pub fn lock(&self) -> LockedIndex<'_> {
        self.lineages.lock()
    }

    /// Locks the index, and reads the manifests first if it is not loaded.
    pub fn loaded(&self) -> Result<LockedIndex<'_>, SnapshotError> {
        let mut locked = self.lock();
        if locked.is_none() {
            *locked = Some(scan(&self.root)?);
        }
        Ok(locked)
    }

    /// Adds the published snapshot `id` with its parent.
    pub fn insert(&self, id: &str, parent: Option<&str>) {
        // An index that is not loaded yet reads it from the directory later.
        if let Some(lineages) = self.lock().as_mut() {
            lineages.insert(id, parent);
        }
    }
}

/// Ids of the snapshots in `root`, sorted.
pub(crate) fn ids(root: &Path) -> Result<Vec<String>, SnapshotError> {
    let failed = |e| SnapshotError::io(root)(e);
    let mut ids = Vec::new();
    for entry in fs::read_dir(root).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if let Some(id) = name.to_str().filter(|id| check_id(id).is_ok()) {
            ids.push(id.to_owned());
        }
    }
    ids.sort();
    Ok(ids)
}

/// Reads every manifest. A snapshot with a damaged manifest has no parent: it cannot be used, only
/// removed.
fn scan(root: &Path) -> Result<LineageTree, SnapshotError> {
    let mut lineages = LineageTree::default();
    for id in ids(root)? {
        let manifest = manifest(root, &id).ok();
        lineages.insert(&id, manifest.and_then(|m| m.parent).as_deref());
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
            (lineages.parent("b"), lineages.parent("x")),
            (Some(Some("a")), None)
        );
        lineages.remove("b");
        assert_eq!(lineages.child("a"), Some("c"));
        // As after a merge.
        lineages.insert("c", None);
        assert_eq!(
            (lineages.child("a"), lineages.parent("c")),
            (None, Some(None))
        );
        lineages.remove("a");
        lineages.remove("a");
        assert_eq!(lineages.parent("a"), None);
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
