//! Registration of this host as a reader of snapshots that it has not fetched completely. The store
//! retains these snapshots even if another host removes them. File `<home>/store/readers.json`
//! lists the registrations, so that a killed daemon leaves none behind in the store.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors.

use crate::host::fetch_grants::hash;
use crate::host::{LayerOrigin, RemoteError, RemoteStore};
use crate::{Hash, READER_TIME};
use data_encoding::HEXLOWER;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::time::{Duration, SystemTime};

/// Interval after which a registration is renewed: one day.
const RENEWAL_TIME: Duration = Duration::from_secs(READER_TIME.as_secs() / 7);

/// Registrations of this host in the store.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReaderBook {
    /// Random id of this data directory.
    host: String,
    /// URL of the store.
    store: String,
    readers: Vec<Reader>,
}

/// Snapshot that this host reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reader {
    tenant: String,
    #[serde(with = "hash")]
    snapshot: Hash,
    /// Time of the last renewal in milliseconds since 1970. 0 until the first
    /// registration has succeeded.
    renewed_ms: u64,
}

impl RemoteStore {
    /// Registers this host as a reader of exactly the snapshots with layers in `missing`: the
    /// layers that this host has not fetched completely. Sends requests only for changes and for
    /// daily renewals. Must not be called concurrently.
    pub async fn keep_readers(&self, missing: &[LayerOrigin]) -> Result<(), RemoteError> {
        let needed = missing.iter().map(|layer| (&layer.tenant, layer.snapshot));
        let needed: BTreeSet<(&String, Hash)> = needed.collect();
        let mut book = self.reader_book()?;
        if book.readers.is_empty() && needed.is_empty() {
            return Ok(());
        }
        for (tenant, snapshot) in &needed {
            let mut readers = book.readers.iter();
            if !readers.any(|known| (&known.tenant, known.snapshot) == (*tenant, *snapshot)) {
                book.readers.push(Reader {
                    tenant: (*tenant).clone(),
                    snapshot: *snapshot,
                    renewed_ms: 0,
                });
            }
        }
        // Record the registration before sending it, so that a later daemon can revoke it.
        self.write_reader_book(&book)?;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(0));
        let mut failure = None;
        let mut retained = Vec::new();
        for mut reader in std::mem::take(&mut book.readers) {
            let is_needed = needed.contains(&(&reader.tenant, reader.snapshot));
            // `abs_diff` also renews after the clock was set back.
            let age = Duration::from_millis(now.abs_diff(reader.renewed_ms));
            let updated = if is_needed && age < RENEWAL_TIME {
                Ok(())
            } else {
                self.update_reader(&book.host, &reader, is_needed).await
            };
            match (updated, is_needed) {
                (Ok(()), false) => continue,
                (Ok(()), true) if age >= RENEWAL_TIME => reader.renewed_ms = now,
                (Ok(()), true) => {}
                (Err(e), _) => failure = Some(e),
            }
            retained.push(reader);
        }
        book.readers = retained;
        self.write_reader_book(&book)?;
        failure.map_or(Ok(()), Err)
    }

    /// Registers or unregisters this host as a reader of a snapshot. `needed` states that this host
    /// still reads the snapshot.
    async fn update_reader(
        &self,
        host: &str,
        reader: &Reader,
        needed: bool,
    ) -> Result<(), RemoteError> {
        let Some(tenant) = self.find_tenant(&reader.tenant).await? else {
            // Without the tenant, the store has no snapshot to retain.
            return Ok(());
        };
        let (shared, root) = (&self.shared, reader.snapshot);
        if needed {
            shared.set_reader(&tenant, root, host).await?
        } else {
            shared.remove_reader(&tenant, root, host).await?
        }
        Ok(())
    }

    /// Reads the local list of this host's registrations as a reader of snapshots in the store.
    fn reader_book(&self) -> Result<ReaderBook, RemoteError> {
        let path = self.reader_book_path();
        let failed = RemoteError::io(path);
        let text = match std::fs::read(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(failed(e)),
            Ok(text) => text,
        };
        // If the file is missing or malformed, start without registrations: those in the store
        // expire.
        let mut book: ReaderBook = serde_json::from_slice(&text).unwrap_or_default();
        // Registrations in another store expire there.
        if book.store != self.url() {
            book.store = self.url().to_owned();
            book.readers.clear();
        }
        if book.host.is_empty() {
            let mut id = [0; 16];
            getrandom::fill(&mut id).map_err(|e| failed(io::Error::other(e)))?;
            book.host = HEXLOWER.encode(&id);
        }
        Ok(book)
    }

    /// Replaces the file of the registrations atomically.
    fn write_reader_book(&self, book: &ReaderBook) -> Result<(), RemoteError> {
        let path = self.reader_book_path();
        let new = path.with_extension("new");
        let write = || -> io::Result<()> {
            std::fs::write(&new, serde_json::to_vec(book)?)?;
            std::fs::rename(&new, path)
        };
        write().map_err(RemoteError::io(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SHARED_TENANT;
    use crate::host::{LOCAL_TENANT, RemoteSettings};
    use std::path::{Path, PathBuf};
    use std::sync::Arc;

    fn open(dir: &Path, home: &str) -> Arc<RemoteStore> {
        let keys = dir.join("one/store/keys.toml");
        let remote = RemoteStore::open(&RemoteSettings {
            url: format!("file://{}/bucket", dir.display()).parse().unwrap(),
            keyring: keys.exists().then_some(keys),
            home: dir.join(home),
            cache_bytes: 1 << 20,
            upload_bytes_per_second: None,
            timeout: Duration::from_secs(2),
        });
        remote.unwrap()
    }

    fn missing(tenant: &str, snapshot: u8) -> LayerOrigin {
        LayerOrigin {
            tenant: tenant.to_owned(),
            snapshot: Hash([snapshot; 32]),
            part: 2,
            layer: Hash([9; 32]),
        }
    }

    /// Returns the files of the store in folders named `readers`, with their modification times.
    fn registered(dir: &Path) -> BTreeSet<(PathBuf, SystemTime)> {
        let (mut files, mut pending) = (BTreeSet::new(), vec![dir.join("bucket")]);
        while let Some(path) = pending.pop() {
            for entry in std::fs::read_dir(path).unwrap().flatten() {
                if entry.path().is_dir() {
                    pending.push(entry.path());
                } else {
                    let modified = entry.metadata().unwrap().modified().unwrap();
                    files.insert((entry.path(), modified));
                }
            }
        }
        files.retain(|(path, _)| path.iter().any(|part| part == "readers"));
        files
    }

    #[tokio::test]
    async fn the_store_has_registrations_of_the_needed_snapshots_only() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (open(dir.path(), "one"), open(dir.path(), "two"));
        one.keep_readers(&[]).await.unwrap();
        assert!(!dir.path().join("one/store/readers.json").exists());
        one.tenant(None).await.unwrap();
        one.tenant(Some(SHARED_TENANT)).await.unwrap();
        let needed = [missing(LOCAL_TENANT, 1), missing(SHARED_TENANT, 2)];
        one.keep_readers(&needed).await.unwrap();
        two.keep_readers(&needed[..1]).await.unwrap();
        let all = registered(dir.path());
        assert_eq!(all.len(), 3, "{all:?}");
        // An unchanged registration causes no write, even after a restart of the daemon.
        let one = open(dir.path(), "one");
        one.keep_readers(&needed).await.unwrap();
        assert_eq!(registered(dir.path()), all);
        one.keep_readers(&needed[1..]).await.unwrap();
        assert_eq!(registered(dir.path()).len(), 2);
        two.keep_readers(&[]).await.unwrap();
        assert_eq!(registered(dir.path()).len(), 1);
    }

    #[tokio::test]
    async fn registrations_are_written_when_the_store_is_available_again() {
        let dir = tempfile::tempdir().unwrap();
        let one = open(dir.path(), "one");
        one.tenant(None).await.unwrap();
        let (bucket, away) = (dir.path().join("bucket"), dir.path().join("away"));
        let needed = [missing(LOCAL_TENANT, 1)];
        for (needed, expected) in [(&needed[..], 1), (&[], 0)] {
            std::fs::rename(&bucket, &away).unwrap();
            one.keep_readers(needed).await.unwrap_err();
            std::fs::rename(&away, &bucket).unwrap();
            // The daemon was killed and restarted.
            open(dir.path(), "one").keep_readers(needed).await.unwrap();
            assert_eq!(registered(dir.path()).len(), expected);
        }
    }
}
