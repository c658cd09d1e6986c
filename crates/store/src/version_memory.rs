//! Highest versions of records that this host has seen, so that a store cannot go back to older
//! ones unnoticed: a file in the data directory.
//!
//! Records that change are those of tenants and names that move (templates). Each has its version
//! in its encrypted content.

use crate::StoreError;
use nix::fcntl::{Flock, FlockArg};
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Maximum size in bytes of the file: far more than the tenants and templates of any store need.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Version of a record.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RecordVersion {
    /// Version.
    pub version: u64,
    /// Newest generation of data keys, of a tenant's record. Records that earlier versions of Jiffy
    /// wrote have no version in their content, but cannot lack a generation.
    #[serde(default)]
    pub generation: u32,
}

/// Versions by record, by store.
type Versions = BTreeMap<String, BTreeMap<String, RecordVersion>>;

/// Highest versions that this host has seen of a store's records.
#[derive(Debug, Default)]
pub struct VersionMemory {
    /// `None`: versions are forgotten with this value.
    path: Option<PathBuf>,
    store: String,
    seen: Mutex<Seen>,
}

/// Versions in memory.
#[derive(Debug, Default)]
struct Seen {
    versions: BTreeMap<String, RecordVersion>,
    /// Inode and time of the file that was read last, which each write replaces.
    file: Option<(u64, i64, i64)>,
}

impl Seen {
    /// Takes over what another process of this host has written down meanwhile.
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
            Err(e) => tracing::warn!(error = %e, "cannot read the versions of the store's records"),
        }
    }
}

/// Raises `known` to the versions in `seen`.
fn raise(known: &mut BTreeMap<String, RecordVersion>, seen: &BTreeMap<String, RecordVersion>) {
    for (record, seen) in seen {
        let known = known.entry(record.clone()).or_default();
        known.version = known.version.max(seen.version);
        known.generation = known.generation.max(seen.generation);
    }
}

impl VersionMemory {
    /// Reads the versions of `store` from the file at `path`, which is created when a version is
    /// seen first.
    ///
    /// # Errors
    /// Fails if the file exists and cannot be read.
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

    /// Highest version of `record` that this host has seen.
    pub(crate) fn known(&self, record: &str) -> RecordVersion {
        let mut seen = self.seen();
        if let Some(path) = &self.path {
            seen.refresh(path, &self.store);
        }
        seen.versions.get(record).copied().unwrap_or_default()
    }

    /// Remembers a version of `record` that the store has.
    ///
    /// # Errors
    /// [`StoreError::Regressed`] if this host has seen a higher one.
    pub(crate) fn check(&self, record: &str, found: RecordVersion) -> Result<(), StoreError> {
        let known = self.known(record);
        if found.version < known.version || found.generation < known.generation {
            let file = self.path.as_deref().unwrap_or(Path::new(""));
            return Err(StoreError::Regressed {
                object: record.to_owned(),
                version: found.version,
                known: known.version,
                file: file.to_owned(),
            });
        }
        if found != known {
            self.seen().versions.insert(record.to_owned(), found);
            self.save();
        }
        Ok(())
    }

    /// Forgets `record`, which this host removed.
    pub(crate) fn forget(&self, record: &str) {
        if self.seen().versions.remove(record).is_none() {
            return;
        }
        let forgotten = self.update(|versions| {
            versions.remove(record);
        });
        if let Err(e) = forgotten {
            tracing::warn!(error = %e, "cannot forget the version of a record");
        }
    }

    /// Writes all versions down. A host whose disk is full goes on: it remembers them in memory.
    fn save(&self) {
        let seen = self.seen().versions.clone();
        // Another process of this host may have seen higher ones.
        let saved = self.update(|versions| raise(versions, &seen));
        if let Err(e) = saved {
            tracing::warn!(error = %e, "cannot write the versions of the store's records");
        }
    }

    /// Changes the versions of the store in the file. Processes of this host take turns.
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
        // A process that has seen less learns what another one wrote.
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
