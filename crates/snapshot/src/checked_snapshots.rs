//! Cache of snapshots whose files were read and checked. Opening a cached snapshot only compares
//! the attributes of its files.

use crate::SnapshotError;
use crate::manifest::Manifest;
use crate::snapshot::{MANIFEST, MEMORY_INDEX, MEMORY_LAYER, STATE, disk_index, disk_layer};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

/// Maximum number of cached snapshots.
const MAX_CACHED: usize = 1024;

/// Attributes of a file that change when the file is written or replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileStamp {
    /// Numbers of device and inode.
    file: (u64, u64),
    /// Size of the file.
    bytes: u64,
    /// Time of the last change of the content: seconds and nanoseconds.
    modified: (i64, i64),
    /// Time of the last change of the inode: seconds and nanoseconds.
    changed: (i64, i64),
}

impl FileStamp {
    /// Returns the stamp of a file.
    pub fn of(path: &Path) -> Result<Self, SnapshotError> {
        let metadata = fs::metadata(path).map_err(SnapshotError::io(path))?;
        Ok(Self {
            file: (metadata.dev(), metadata.ino()),
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}

/// Stamps of all files of a snapshot.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SnapshotStamps(Vec<FileStamp>);

impl SnapshotStamps {
    /// Returns the stamps of the files of `manifest` in the directory `path`.
    pub fn of(path: &Path, manifest: &Manifest) -> Result<Self, SnapshotError> {
        let stamp = |name: &str| FileStamp::of(&path.join(name));
        let mut stamps = vec![
            stamp(MANIFEST)?,
            stamp(STATE)?,
            stamp(MEMORY_LAYER)?,
            stamp(MEMORY_INDEX)?,
        ];
        for number in 0..manifest.disks.len() {
            stamps.push(stamp(&disk_layer(number))?);
            stamps.push(stamp(&disk_index(number))?);
        }
        Ok(Self(stamps))
    }

    /// Returns whether the manifest's stamp is still `before`: the manifest was not replaced.
    pub fn is_of_manifest(&self, before: FileStamp) -> bool {
        self.0.first() == Some(&before)
    }
}

/// Snapshot whose files were checked, with their state at that time.
#[derive(Debug)]
struct CheckedSnapshot {
    stamps: SnapshotStamps,
    manifest: Arc<Manifest>,
    /// Value of [`CheckedSnapshotMap::uses`] at the last use.
    last_use: u64,
}

/// Checked snapshots of one directory, by id.
#[derive(Debug, Default)]
pub(crate) struct CheckedSnapshots(Mutex<CheckedSnapshotMap>);

/// Checked snapshots. The least recently used one is removed first.
#[derive(Debug, Default)]
struct CheckedSnapshotMap {
    by_id: HashMap<String, CheckedSnapshot>,
    /// Logical clock of `last_use`.
    uses: u64,
}

impl CheckedSnapshots {
    /// Returns the manifest of snapshot `id` in the directory `path`. `None` if the snapshot is not
    /// cached, or if its files have changed since they were checked.
    pub fn find(&self, id: &str, path: &Path) -> Option<Arc<Manifest>> {
        // Do not hold the lock while the attributes are read from the file system.
        let manifest = self.0.lock().by_id.get(id)?.manifest.clone();
        // If a file is missing, the caller opens the snapshot itself and reports the error.
        let stamps = SnapshotStamps::of(path, &manifest).ok()?;
        // The entry may have been removed or replaced meanwhile.
        let mut cache = self.0.lock();
        cache.uses += 1;
        let now = cache.uses;
        let snapshot = cache.by_id.get_mut(id)?;
        if snapshot.stamps != stamps {
            return None;
        }
        snapshot.last_use = now;
        Some(snapshot.manifest.clone())
    }

    /// Adds a snapshot whose files had `stamps` before they were read. Removes the least recently
    /// used snapshot if the cache is full.
    pub fn insert(&self, manifest: Arc<Manifest>, stamps: SnapshotStamps) {
        let mut cache = self.0.lock();
        cache.uses += 1;
        let snapshot = CheckedSnapshot {
            stamps,
            last_use: cache.uses,
            manifest,
        };
        let id = snapshot.manifest.id.clone();
        cache.by_id.insert(id, snapshot);
        // A linear search is sufficient: it happens only when an uncached snapshot is opened.
        if cache.by_id.len() > MAX_CACHED {
            let all = cache.by_id.iter();
            let oldest = all.min_by_key(|(_, snapshot)| snapshot.last_use);
            if let Some(oldest) = oldest.map(|(id, _)| id.clone()) {
                cache.by_id.remove(&oldest);
            }
        }
    }

    /// Removes a snapshot from the cache.
    pub fn remove(&self, id: &str) {
        self.0.lock().by_id.remove(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::SNAPSHOT_FORMAT;
    use serde_json::json;

    fn manifest(id: &str) -> Arc<Manifest> {
        let manifest = json!({
            "format": SNAPSHOT_FORMAT, "id": id, "parent": null, "template": "base", "cpu": "",
            "vcpus": 1, "created_ms": 0, "versions": { "vmm": "", "kernel": "", "agent": "" },
            "memory": { "bytes": 0, "stored": 0, "zero": 0 }, "disks": [{ "bytes": 0, "stored": 0 }],
        });
        Arc::new(serde_json::from_value(manifest).unwrap())
    }

    #[test]
    fn a_snapshot_is_found_until_one_of_its_files_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        let names = ["memory.index", "disk0.layer", "disk0.index"];
        let names = [MANIFEST, STATE, MEMORY_LAYER].into_iter().chain(names);
        let names: Vec<&str> = names.collect();
        for name in &names {
            fs::write(path.join(name), b"a").unwrap();
        }
        let snapshots = CheckedSnapshots::default();
        let manifest = manifest("s");
        let insert = || {
            let stamps = SnapshotStamps::of(path, &manifest).unwrap();
            snapshots.insert(manifest.clone(), stamps);
        };
        for name in names {
            insert();
            assert_eq!(snapshots.find("s", path).as_deref(), Some(&*manifest));
            assert_eq!(snapshots.find("other", path), None);
            let file = path.join(name);
            // Another file of the same length.
            fs::write(path.join("new"), b"b").unwrap();
            fs::rename(path.join("new"), &file).unwrap();
            assert_eq!(snapshots.find("s", path), None, "{name}");
            insert();
            fs::write(&file, b"longer").unwrap();
            assert_eq!(snapshots.find("s", path), None, "{name}");
            fs::remove_file(&file).unwrap();
            assert_eq!(snapshots.find("s", path), None, "{name}");
            fs::write(&file, b"a").unwrap();
        }
        insert();
        snapshots.remove("s");
        assert_eq!(snapshots.find("s", path), None);
    }

    #[test]
    fn the_least_recently_used_snapshot_is_removed_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        for name in [MANIFEST, STATE, MEMORY_LAYER, MEMORY_INDEX] {
            fs::write(path.join(name), b"a").unwrap();
        }
        for name in [disk_layer(0), disk_index(0)] {
            fs::write(path.join(name), b"a").unwrap();
        }
        let snapshots = CheckedSnapshots::default();
        let insert = |number: usize| {
            let manifest = manifest(&format!("s{number}"));
            let stamps = SnapshotStamps::of(path, &manifest).unwrap();
            snapshots.insert(manifest, stamps);
        };
        (0..MAX_CACHED).for_each(insert);
        assert!(snapshots.find("s0", path).is_some());
        insert(MAX_CACHED);
        assert!(snapshots.find("s0", path).is_some());
        assert!(snapshots.find("s1", path).is_none());
        assert!(snapshots.find("s2", path).is_some());
        assert_eq!(snapshots.0.lock().by_id.len(), MAX_CACHED);
    }
}
