//! Parents and children of the snapshots of one directory, in memory.
//!
//! The manifests are read once, when the first question comes; from then on every snapshot that gets or loses its name is
//! noted. One process at a time writes to a directory; its stores of the same directory share one family.

use crate::SnapshotError;
use crate::manifest::{Manifest, check_id};
use crate::snapshot::{MANIFEST, MAX_MANIFEST, read};
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// Device and inode of a directory.
type Place = (u64, u64);

/// The families of this process.
static FAMILIES: OnceLock<Mutex<HashMap<Place, Weak<Family>>>> = OnceLock::new();

/// The family of one directory.
#[derive(Debug)]
pub(crate) struct Family {
    root: PathBuf,
    /// None until it is asked for.
    tree: Mutex<Option<Tree>>,
}

/// Parents by child, and children by parent.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    parents: HashMap<String, Option<String>>,
    children: HashMap<String, BTreeSet<String>>,
}

impl Tree {
    /// Notes that `id` has its name, and lies on `parent`.
    pub fn insert(&mut self, id: &str, parent: Option<&str>) {
        self.remove(id);
        self.parents
            .insert(id.to_owned(), parent.map(str::to_owned));
        if let Some(parent) = parent {
            let children = self.children.entry(parent.to_owned()).or_default();
            children.insert(id.to_owned());
        }
    }

    /// Notes that `id` is gone. Its children stay what they are.
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

    /// The parent of `id`; none if there is no snapshot of that name.
    pub fn parent(&self, id: &str) -> Option<Option<&str>> {
        self.parents.get(id).map(Option::as_deref)
    }

    /// One of the children of `id`.
    pub fn child(&self, id: &str) -> Option<&str> {
        let children = self.children.get(id)?;
        children.first().map(String::as_str)
    }
}

/// The family, locked. No file is removed while it is.
pub(crate) type Locked<'a> = MutexGuard<'a, Option<Tree>>;

impl Family {
    /// The family of the directory `root`.
    pub fn of(root: &Path) -> io::Result<Arc<Self>> {
        let metadata = fs::metadata(root)?;
        let place = (metadata.dev(), metadata.ino());
        let all = FAMILIES.get_or_init(Mutex::default);
        let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, family| family.strong_count() > 0);
        if let Some(family) = all.get(&place).and_then(Weak::upgrade) {
            return Ok(family);
        }
        let family = Arc::new(Self {
            root: root.to_owned(),
            tree: Mutex::default(),
        });
        all.insert(place, Arc::downgrade(&family));
        Ok(family)
    }

    /// Locks it as it is, for a change.
    pub fn lock(&self) -> Locked<'_> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks it and reads the manifests if that was not done yet. Call [`tree`] for the content.
    pub fn known(&self) -> Result<Locked<'_>, SnapshotError> {
        let mut locked = self.lock();
        if locked.is_none() {
            *locked = Some(scan(&self.root)?);
        }
        Ok(locked)
    }

    /// Notes that `id` has its name, and lies on `parent`.
    pub fn insert(&self, id: &str, parent: Option<&str>) {
        // Where nothing is known yet, the directory tells.
        if let Some(tree) = self.lock().as_mut() {
            tree.insert(id, parent);
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

/// Reads every manifest. A snapshot whose manifest is none lies on nothing: it cannot be used, only removed.
fn scan(root: &Path) -> Result<Tree, SnapshotError> {
    let mut tree = Tree::default();
    for id in ids(root)? {
        let manifest = manifest(root, &id).ok();
        tree.insert(&id, manifest.and_then(|m| m.parent).as_deref());
    }
    Ok(tree)
}

/// The manifest of snapshot `id`, without a look at the files it speaks of.
pub(crate) fn manifest(root: &Path, id: &str) -> Result<Manifest, SnapshotError> {
    check_id(id)?;
    let path = root.join(id);
    if !path.is_dir() {
        return Err(SnapshotError::Missing(id.to_owned()));
    }
    let file = path.join(MANIFEST);
    Manifest::parse(&read(&file, MAX_MANIFEST)?, id, &file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_are_known_as_long_as_they_are_there() {
        let mut tree = Tree::default();
        tree.insert("a", None);
        tree.insert("b", Some("a"));
        tree.insert("c", Some("a"));
        assert_eq!(
            (tree.parent("b"), tree.parent("x")),
            (Some(Some("a")), None)
        );
        tree.remove("b");
        assert_eq!(tree.child("a"), Some("c"));
        // Merged.
        tree.insert("c", None);
        assert_eq!((tree.child("a"), tree.parent("c")), (None, Some(None)));
        tree.remove("a");
        tree.remove("a");
        assert_eq!(tree.parent("a"), None);
    }

    #[test]
    fn stores_of_one_directory_have_one_family() {
        let dir = tempfile::tempdir().unwrap();
        let (one, other) = (Family::of(dir.path()), Family::of(&dir.path().join(".")));
        assert!(Arc::ptr_eq(&one.unwrap(), &other.unwrap()));
    }
}
