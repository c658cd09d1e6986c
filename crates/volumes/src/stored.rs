//! Snapshots of volumes in the store of the host.
//!
//! A snapshot consists of one file, the image of the volume. The store divides it into chunks and
//! shares equal ones.

use crate::volume::Volume;
use crate::{HostVolumes, VolumeError};
use jiffy_database::{DURABLE, Schema, open};
use jiffy_engine_api::{new_id, now_ms};
use jiffy_store::host::{RemoteError, RemoteStore};
use jiffy_volume_server::image::{ImageHead, unpack};
use parking_lot::Mutex;
use rusqlite::{Connection, OptionalExtension, Row, params};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Schema. The owner is the id of an API key; empty for the owner of the host. `root` is the
/// content in the store, known from the start of the upload. A row whose snapshot is not complete
/// is an upload or a removal that has not ended.
const SCHEMA: Schema = Schema {
    version: 1,
    tables: "
    CREATE TABLE snapshots (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        volume TEXT NOT NULL,
        name TEXT NOT NULL,
        size INTEGER NOT NULL,
        files INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        store TEXT NOT NULL,
        root TEXT,
        is_complete INTEGER NOT NULL,
        created_ms INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX owners ON snapshots (owner, id);
",
};
/// Columns that [`snapshot`] reads by position.
const COLUMNS: &str = "id, owner, volume, name, size, files, bytes, created_ms";
/// Start of ids.
const SNAPSHOT_PREFIX: &str = "volsnap-";
/// Maximum number of snapshots of a key.
pub const MAX_SNAPSHOTS: usize = 1000;

/// Snapshot of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeSnapshot {
    /// Id.
    pub id: String,
    /// Owner: the id of an API key, or empty for the owner of the host.
    pub owner: String,
    /// Id of the volume.
    pub volume: String,
    /// Name of the volume at the time of the snapshot.
    pub name: String,
    /// Size of the volume in bytes.
    pub size: u64,
    /// Maximum number of files of the volume.
    pub files: u64,
    /// Charged bytes of the files: their lengths, each rounded up to 4 KiB.
    pub bytes: u64,
    /// Time of the creation in milliseconds since 1970.
    pub created_ms: u64,
}

/// Snapshots of volumes.
#[derive(Debug)]
pub struct StoredVolumes {
    volumes: Arc<HostVolumes>,
    remote: Arc<RemoteStore>,
    /// Directory of the volumes, for temporary files.
    directory: PathBuf,
    path: PathBuf,
    connection: Mutex<Connection>,
    /// Held while a snapshot is written, because each needs as much disk space as its volume.
    turn: tokio::sync::Mutex<()>,
}

/// Sizes of a snapshot of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotSizes {
    /// Size of the volume in bytes.
    pub size: u64,
    /// Maximum number of files of the volume.
    pub files: u64,
    /// Charged bytes of the files: their lengths, each rounded up to 4 KiB.
    pub bytes: u64,
}

impl SnapshotSizes {
    /// Checks that a volume of `bytes` bytes can have the files of the snapshot.
    ///
    /// # Errors
    /// [`VolumeError::Small`] if it cannot.
    pub fn check(&self, bytes: u64) -> Result<(), VolumeError> {
        if bytes < self.bytes {
            return Err(VolumeError::Small(self.bytes));
        }
        Ok(())
    }
}

/// Decodes a row of the table of snapshots.
fn snapshot(row: &Row<'_>) -> rusqlite::Result<VolumeSnapshot> {
    Ok(VolumeSnapshot {
        id: row.get(0)?,
        owner: row.get(1)?,
        volume: row.get(2)?,
        name: row.get(3)?,
        size: row.get(4)?,
        files: row.get(5)?,
        bytes: row.get(6)?,
        created_ms: row.get(7)?,
    })
}

/// Returns the owner as the store names it.
fn tenant(owner: &str) -> Option<&str> {
    Some(owner).filter(|owner| !owner.is_empty())
}

/// Runs `work`, which blocks.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, VolumeError> + Send + 'static,
) -> Result<T, VolumeError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| VolumeError::File {
        path: PathBuf::new(),
        source: std::io::Error::other(e),
    })?
}

impl StoredVolumes {
    /// Opens the snapshots of the data directory `home`. Blocks.
    pub fn open(
        home: &Path,
        volumes: Arc<HostVolumes>,
        remote: Arc<RemoteStore>,
    ) -> Result<Arc<Self>, VolumeError> {
        let path = home.join("volume-snapshots.db");
        let connection = open(&path, &SCHEMA, DURABLE)?;
        Ok(Arc::new(Self {
            volumes,
            remote,
            directory: home.join("volumes"),
            path,
            connection: Mutex::new(connection),
            turn: tokio::sync::Mutex::default(),
        }))
    }

    fn failed(&self) -> impl Fn(rusqlite::Error) -> VolumeError + '_ {
        |source| VolumeError::Database {
            path: self.path.clone(),
            source,
        }
    }

    /// Stores a snapshot of a volume of `owner`. `which` is an id or a name. Changes of the volume
    /// wait while its files are copied on the disk of the host, but not while they are sent.
    pub async fn create(
        self: &Arc<Self>,
        owner: &str,
        which: &str,
    ) -> Result<VolumeSnapshot, VolumeError> {
        let _turn = self.turn.lock().await;
        let (this, owner, which) = (self.clone(), owner.to_owned(), which.to_owned());
        let (image, created) = blocking(move || this.write(&owner, &which)).await?;
        let record = |root: String| {
            let recorded = self.record(&created, &root);
            recorded.map_err(|e| RemoteError::Io {
                path: self.path.clone(),
                source: std::io::Error::other(e),
            })
        };
        let owner = tenant(&created.owner);
        let storing =
            self.remote
                .store_image(owner, &created.id, image, created.created_ms, record);
        if let Err(e) = storing.await {
            // A removal that fails is repeated by the next daemon.
            if let Err(e) = self.discard(&created.id).await {
                tracing::warn!(snapshot = created.id, error = %e, "cannot remove a snapshot of a volume");
            }
            return Err(e.into());
        }
        let update = "UPDATE snapshots SET is_complete = 1 WHERE id = ?1";
        let done = self.connection.lock().execute(update, params![created.id]);
        done.map_err(self.failed())?;
        Ok(created)
    }

    /// Writes the image of a volume to a file without a name.
    fn write(&self, owner: &str, which: &str) -> Result<(File, VolumeSnapshot), VolumeError> {
        let volume = self.volumes.volumes().get(owner, which)?;
        let select = "SELECT count(*) FROM snapshots WHERE owner = ?1";
        let connection = self.connection.lock();
        let count: usize = connection
            .query_row(select, params![owner], |row| row.get(0))
            .map_err(self.failed())?;
        if count >= MAX_SNAPSHOTS {
            return Err(VolumeError::FullOfSnapshots);
        }
        let id = format!("{SNAPSHOT_PREFIX}{}", new_id()?);
        let path = self.directory.join(&id);
        let failed = |source| VolumeError::File {
            path: path.clone(),
            source,
        };
        let mut options = File::options();
        let image = options.read(true).write(true).create_new(true).open(&path);
        let image = image.map_err(failed)?;
        std::fs::remove_file(&path).map_err(failed)?;
        let written = self.volumes.servers().write_image(&volume, &image);
        let bytes = written.map_err(|source| VolumeError::File {
            path: self.directory.join(&volume.id),
            source,
        })?;
        let created = VolumeSnapshot {
            id,
            owner: volume.owner,
            volume: volume.id,
            name: volume.name,
            size: volume.bytes,
            files: volume.files,
            bytes,
            created_ms: now_ms(),
        };
        Ok((image, created))
    }

    /// Records a snapshot that is about to be sent.
    fn record(&self, new: &VolumeSnapshot, root: &str) -> Result<(), VolumeError> {
        let insert = "INSERT INTO snapshots
            (id, owner, volume, name, size, files, bytes, store, root, is_complete, created_ms)
            VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, 0, ?10)";
        let values = params![
            new.id,
            new.owner,
            new.volume,
            new.name,
            new.size,
            new.files,
            new.bytes,
            self.remote.url(),
            root,
            new.created_ms
        ];
        let inserted = self.connection.lock().execute(insert, values);
        inserted.map(|_| ()).map_err(self.failed())
    }

    /// Returns at most `limit` complete snapshots of `owner` in the order of their ids, after the
    /// id `after`. Blocks.
    pub fn list(
        &self,
        owner: &str,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Vec<VolumeSnapshot>, VolumeError> {
        let connection = self.connection.lock();
        let select = || {
            let mut statement = connection.prepare_cached(&format!(
                "SELECT {COLUMNS} FROM snapshots WHERE owner = ?1 AND id > ?2 AND is_complete = 1
                    ORDER BY id LIMIT ?3"
            ))?;
            let after = after.unwrap_or_default();
            let all = statement.query_map(params![owner, after, limit], snapshot)?;
            all.collect::<rusqlite::Result<Vec<_>>>()
        };
        select().map_err(self.failed())
    }

    /// Returns a complete snapshot of `owner`. Blocks.
    pub fn get(&self, owner: &str, id: &str) -> Result<VolumeSnapshot, VolumeError> {
        let connection = self.connection.lock();
        let select = format!(
            "SELECT {COLUMNS} FROM snapshots WHERE owner = ?1 AND id = ?2 AND is_complete = 1"
        );
        let found = connection.query_row(&select, params![owner, id], snapshot);
        let found = found.optional().map_err(self.failed())?;
        found.ok_or_else(|| unknown(id))
    }

    /// Returns the sizes of a snapshot of `owner`. With `of_any_host`, the snapshot may also be one
    /// that another host with the same store has taken.
    pub async fn sizes(
        &self,
        owner: &str,
        id: &str,
        of_any_host: bool,
    ) -> Result<SnapshotSizes, VolumeError> {
        match self.get(owner, id) {
            // A snapshot that this host has not stored completely, or removes, is unknown.
            Err(VolumeError::UnknownSnapshot(_)) if of_any_host && !self.is_recorded(id)? => {}
            found => {
                return found.map(|found| SnapshotSizes {
                    size: found.size,
                    files: found.files,
                    bytes: found.bytes,
                });
            }
        }
        let image = self.image(owner, id).await?;
        let head = blocking(move || Ok(ImageHead::read(&image)?)).await?;
        Ok(SnapshotSizes {
            size: head.quota.bytes,
            files: head.quota.nodes,
            bytes: head.bytes,
        })
    }

    /// Returns whether this host has a record of a snapshot, which may be incomplete.
    fn is_recorded(&self, id: &str) -> Result<bool, VolumeError> {
        Ok(!self.ids("id = ?1", id)?.is_empty())
    }

    /// Fetches the image of a snapshot from the store.
    async fn image(&self, owner: &str, id: &str) -> Result<File, VolumeError> {
        let image = self.remote.fetch_image(tenant(owner), id).await?;
        image.ok_or_else(|| unknown(id))
    }

    /// Creates a volume with the files of a snapshot of its owner. [`Self::sizes`] must have
    /// returned the sizes of the snapshot.
    pub async fn restore(self: &Arc<Self>, id: &str, created: &Volume) -> Result<(), VolumeError> {
        let image = self.image(&created.owner, id).await?;
        let (this, created) = (self.clone(), created.clone());
        blocking(move || {
            ImageHead::read(&image)?;
            let fill = |directory: &Path| unpack(&image, directory, created.bytes);
            this.volumes.create_with(&created, fill)
        })
        .await
    }

    /// Removes a snapshot of `owner`. A collection of the store (`jiffy store gc`) then removes
    /// content that no other snapshot needs.
    pub async fn remove(&self, owner: &str, id: &str) -> Result<(), VolumeError> {
        self.get(owner, id)?;
        self.discard(id).await
    }

    /// Removes all snapshots of `owner`.
    pub async fn remove_all(&self, owner: &str) -> Result<(), VolumeError> {
        for id in self.ids("owner = ?1", owner)? {
            self.discard(&id).await?;
        }
        Ok(())
    }

    /// Completes removals, and removes snapshots that an earlier daemon has not stored completely.
    pub async fn clean(&self) -> Result<(), VolumeError> {
        for id in self.ids("is_complete = 0 AND store = ?1", self.remote.url())? {
            self.discard(&id).await?;
        }
        Ok(())
    }

    /// Returns the ids of the snapshots that meet an SQL condition on `?1`, which is `value`.
    fn ids(&self, condition: &str, value: &str) -> Result<Vec<String>, VolumeError> {
        let connection = self.connection.lock();
        let select = || {
            let select = format!("SELECT id FROM snapshots WHERE {condition}");
            let mut statement = connection.prepare(&select)?;
            let all = statement.query_map(params![value], |row| row.get(0))?;
            all.collect::<rusqlite::Result<Vec<_>>>()
        };
        select().map_err(self.failed())
    }

    /// Removes a snapshot. The record remains until the store has confirmed the removal.
    async fn discard(&self, id: &str) -> Result<(), VolumeError> {
        let begin = |connection: &Connection| -> rusqlite::Result<Option<(String, String)>> {
            let update = "UPDATE snapshots SET is_complete = 0 WHERE id = ?1";
            connection.execute(update, params![id])?;
            let select = "SELECT owner, root FROM snapshots WHERE id = ?1";
            let found =
                connection.query_row(select, params![id], |row| Ok((row.get(0)?, row.get(1)?)));
            found.optional()
        };
        let found = begin(&self.connection.lock()).map_err(self.failed())?;
        let Some((owner, root)) = found else {
            return Ok(());
        };
        let removing = self.remote.remove_image(tenant(&owner), id, Some(&root));
        removing.await?;
        let delete = "DELETE FROM snapshots WHERE id = ?1";
        let deleted = self.connection.lock().execute(delete, params![id]);
        deleted.map(|_| ()).map_err(self.failed())
    }
}

fn unknown(id: &str) -> VolumeError {
    let shown: String = id.chars().take(crate::MAX_NAME).collect();
    VolumeError::UnknownSnapshot(shown.escape_debug().to_string())
}
