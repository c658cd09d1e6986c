//! Highest versions of records that this host has seen, in a file of the data directory. They
//! detect that a store returned to older records.
//!
//! A *tenant* is an owner of snapshots in the store, usually an API key. The objects of a tenant
//! are encrypted with its keys.
//!
//! Records of tenants have versions, and so have names that can be assigned to other objects (such
//! as names of templates). The encrypted content of a record includes its version, except in a
//! tenant's first record and in records that earlier releases of Jiffy wrote.

use crate::StoreError;
use nix::fcntl::{Flock, FlockArg};
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Maximum size in bytes of the file: far more than the tenants and templates of any store require.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Version of a record.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RecordVersion {
    /// Version of the record.
    pub version: u64,
    /// Newest generation of data keys in a tenant's record; 0 for names. Detects an old record that
    /// was copied to the object name of a newer record. Records written by earlier releases of
    /// Jiffy do not contain their version, so the version alone does not detect this.
    #[serde(default)]
    pub generation: u32,
}

/// Versions by store and record.
type Versions = BTreeMap<String, BTreeMap<String, RecordVersion>>;

/// Highest versions that this host has seen of a store's records.
#[derive(Debug, Default)]
pub struct VersionMemory {
    /// File of the versions. `None` if the versions exist in memory only.
    path: Option<PathBuf>,
    store: String,
    seen: Mutex<Seen>,
}

/// Cached content of the file.
#[derive(Debug, Default)]
struct Seen {
    /// Newest version that this host has seen, by record.
    versions: BTreeMap<String, RecordVersion>,
    /// Inode and modification time of the file when it was last read. Each write replaces the file.
    file: Option<(u64, i64, i64)>,
}

impl Seen {
    /// Merges versions that another process of this host has written.
    fn refresh(&mut self, path: &Path, store: &str) {
        let file = fs::metadata(path).ok();
        let file = file.map(|file| (file.ino(), file.mtime(), file.mtime_nsec()));
        if file.is_none() || file == self.file {
            return;
        }
        match read(path) {
            Ok(mut versions) => {
                self.file = file;
                let written = versions.remove(store).unwrap_or_default();
                raise(&mut self.versions, &written);
            }
            Err(e) => tracing::warn!(error = %e, "cannot read the version memory of the store"),
        }
    }
}

/// Raises the versions in `known` to those in `seen`.
fn raise(known: &mut BTreeMap<String, RecordVersion>, seen: &BTreeMap<String, RecordVersion>) {
    for (record, seen) in seen {
        let known = known.entry(record.clone()).or_default();
        known.version = known.version.max(seen.version);
        known.generation = known.generation.max(seen.generation);
    }
}

impl VersionMemory {
    /// Reads the versions of `store` from the file at `path`. The file is created when the first
    /// version is recorded.
    ///
    /// # Errors
    /// Fails if the file exists but cannot be read.
    pub fn open(path: &Path, store: &str) -> Result<Self, StoreError> {
        let mut versions = read(path).map_err(StoreError::io(path))?;
        Ok(Self {
            path: Some(path.to_owned()),
            store: store.to_owned(),
            seen: Mutex::new(Seen {
                versions: versions.remove(store).unwrap_or_default(),
                file: None,
            }),
        })
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock()
    }

    /// Returns the highest version of `record` that this host has seen.
    pub(crate) fn known(&self, record: &str) -> RecordVersion {
        self.known_in(&mut self.seen(), record)
    }

    fn known_in(&self, seen: &mut Seen, record: &str) -> RecordVersion {
        if let Some(path) = &self.path {
            seen.refresh(path, &self.store);
        }
        seen.versions.get(record).copied().unwrap_or_default()
    }

    /// Records a version of `record` that was read from the store.
    ///
    /// # Errors
    /// [`StoreError::Regressed`] if this host has seen a higher version.
    pub(crate) fn check(&self, record: &str, current: RecordVersion) -> Result<(), StoreError> {
        // Hold the lock from the comparison to the change: a concurrent check may insert a higher
        // version.
        let mut seen = self.seen();
        let known = self.known_in(&mut seen, record);
        if current.version < known.version || current.generation < known.generation {
            let file = self.path.as_deref().unwrap_or(Path::new(""));
            return Err(StoreError::Regressed {
                object: record.to_owned(),
                version: current.version,
                known: known.version,
                file: file.to_owned(),
            });
        }
        if current != known {
            seen.versions.insert(record.to_owned(), current);
            drop(seen);
            self.save();
        }
        Ok(())
    }

    /// Removes the version of `record`, which this host removed from the store.
    pub(crate) fn forget(&self, record: &str) {
        if self.seen().versions.remove(record).is_none() {
            return;
        }
        let forgotten = self.update(|versions| {
            versions.remove(record);
        });
        if let Err(e) = forgotten {
            tracing::warn!(record, error = %e, "cannot remove the version of a record");
        }
    }

    /// Writes all versions to the file. If the write fails, the versions remain valid in memory.
    fn save(&self) {
        let seen = self.seen().versions.clone();
        // Merge instead of overwriting: another process of this host may have seen higher versions.
        let saved = self.update(|versions| raise(versions, &seen));
        if let Err(e) = saved {
            tracing::warn!(error = %e, "cannot write the versions of the store's records");
        }
    }

    /// Changes the store's versions in the file. A file lock orders the processes of this host.
    fn update(&self, change: impl FnOnce(&mut BTreeMap<String, RecordVersion>)) -> io::Result<()> {
        let Some(path) = &self.path else {
            return Ok(());
        };
        let lock = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path.with_extension("lock"))?;
        let _lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, e)| e)?;
        let mut versions = read(path)?;
        change(versions.entry(self.store.clone()).or_default());
        let new = path.with_extension("new");
        let mut file = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)?;
        file.write_all(&serde_json::to_vec(&versions)?)?;
        file.sync_all()?;
        fs::rename(&new, path)
    }
}

/// Reads the versions from a file. Empty if the file does not exist.
fn read(path: &Path) -> io::Result<Versions> {
    let file = match File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Versions::new()),
        other => other?,
    };
    let mut text = Vec::new();
    file.take(MAX_FILE_BYTES).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(version: u64, generation: u32) -> RecordVersion {
        RecordVersion {
            version,
            generation,
        }
    }

    #[test]
    fn versions_outlive_the_process_and_only_rise() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("versions.json");
        let open = |store: &str| VersionMemory::open(&path, store).unwrap();
        let (first, second) = (open("s3://a"), open("s3://a"));
        first.check("x", version(3, 1)).unwrap();
        // A process learns the higher versions that another process wrote.
        assert!(second.check("x", version(2, 1)).is_err());
        second.check("y", version(1, 1)).unwrap();
        let later = open("s3://a");
        assert_eq!(later.known("x"), version(3, 1));
        later.check("x", version(4, 2)).unwrap();
        for lower in [version(3, 2), version(5, 1), version(0, 0)] {
            let refused = later.check("x", lower).unwrap_err();
            assert!(matches!(refused, StoreError::Regressed { .. }), "{refused}");
            assert!(refused.to_string().contains("versions.json"), "{refused}");
        }
        assert_eq!(open("s3://b").known("x"), version(0, 0));
        later.forget("x");
        assert_eq!(open("s3://a").known("x"), version(0, 0));
        assert_eq!(open("s3://a").known("y"), version(1, 1));
    }
}
