//! Volumes of one host: `<home>/volumes.db`.
//!
//! A *volume* is a directory of files that sandboxes of an API key share.

use crate::volume::{ID_PREFIX, MAX_KEY_BYTES, MAX_KEY_FILES, MAX_VOLUMES, check_name, check_size};
use crate::{NewVolume, Volume, VolumeError};
use data_encoding::BASE32_NOPAD;
use jiffy_database::{DURABLE, Schema, open};
use jiffy_engine_api::{new_id, now_ms};
use jiffy_secrets::HostKey;
use parking_lot::Mutex;
use rusqlite::{Connection, OptionalExtension, Row, TransactionBehavior, params};
use std::path::{Path, PathBuf};

/// Schema. The owner is the id of an API key; empty for the owner of the host.
const SCHEMA: Schema = Schema {
    version: 1,
    tables: "
    CREATE TABLE volumes (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        name TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        files INTEGER NOT NULL,
        token BLOB NOT NULL,
        created_ms INTEGER NOT NULL,
        UNIQUE (owner, name)
    ) STRICT;
",
};
/// Columns that [`volume`] reads by position.
const COLUMNS: &str = "id, owner, name, bytes, files, created_ms";
/// Random bytes of a token.
const TOKEN_BYTES: usize = 25;

/// Volumes of one host. All methods block.
#[derive(Debug)]
pub struct Volumes {
    key: HostKey,
    path: PathBuf,
    connection: Mutex<Connection>,
}

/// Decodes a row of the table of volumes.
fn volume(row: &Row<'_>) -> rusqlite::Result<Volume> {
    Ok(Volume {
        id: row.get(0)?,
        owner: row.get(1)?,
        name: row.get(2)?,
        bytes: row.get(3)?,
        files: row.get(4)?,
        created_ms: row.get(5)?,
    })
}

/// Returns the context of an encrypted token, which cannot be moved to another volume.
fn context(id: &str) -> String {
    format!("volume token {id}")
}

impl Volumes {
    /// Opens or creates the volumes of the data directory `home`.
    pub fn open(home: &Path) -> Result<Self, VolumeError> {
        let key = HostKey::open(home)?;
        let path = home.join("volumes.db");
        let connection = open(&path, &SCHEMA, DURABLE)?;
        Ok(Self {
            key,
            path,
            connection: Mutex::new(connection),
        })
    }

    fn failed(&self) -> impl Fn(rusqlite::Error) -> VolumeError + '_ {
        |source| VolumeError::Database {
            path: self.path.clone(),
            source,
        }
    }

    /// Returns a new volume of `owner`, which is empty for the owner of the host. The volume is not
    /// stored yet.
    pub(crate) fn prepare(owner: &str, new: &NewVolume) -> Result<Volume, VolumeError> {
        check_size(new)?;
        let id = format!("{ID_PREFIX}{}", new_id()?);
        let name = if new.name.is_empty() {
            id.clone()
        } else {
            check_name(&new.name)?;
            new.name.clone()
        };
        Ok(Volume {
            id,
            owner: owner.to_owned(),
            name,
            bytes: new.bytes,
            files: new.files,
            created_ms: now_ms(),
        })
    }

    /// Stores a new volume.
    pub(crate) fn add(&self, created: &Volume) -> Result<(), VolumeError> {
        let token = self
            .key
            .seal(&context(&created.id), new_token()?.as_bytes())?;
        let failed = self.failed();
        let mut connection = self.connection.lock();
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate);
        let tx = tx.map_err(&failed)?;
        // Number and total sizes of the owner's volumes, and whether one of them has this name.
        let (count, bytes, files, exists): (usize, u64, u64, bool) = tx
            .query_row(
                "SELECT count(*), coalesce(sum(bytes), 0), coalesce(sum(files), 0),
                    coalesce(max(name = ?2), 0) FROM volumes WHERE owner = ?1",
                params![created.owner, created.name],
                |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)),
            )
            .map_err(&failed)?;
        if exists {
            return Err(VolumeError::Exists(created.name.clone()));
        }
        if count >= MAX_VOLUMES {
            return Err(VolumeError::Full);
        }
        if bytes + created.bytes > MAX_KEY_BYTES || files + created.files > MAX_KEY_FILES {
            return Err(VolumeError::Total);
        }
        tx.execute(
            "INSERT INTO volumes (id, owner, name, bytes, files, token, created_ms)
                VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            params![
                created.id,
                created.owner,
                created.name,
                created.bytes,
                created.files,
                token,
                created.created_ms
            ],
        )
        .map_err(&failed)?;
        tx.commit().map_err(&failed)
    }

    /// Returns a volume of `owner`. `which` is an id or a name.
    pub fn get(&self, owner: &str, which: &str) -> Result<Volume, VolumeError> {
        let connection = self.connection.lock();
        let found = find(&connection, owner, which).map_err(self.failed())?;
        found.ok_or_else(|| unknown(which))
    }

    /// Returns the volume with this id, of any owner.
    pub fn by_id(&self, id: &str) -> Result<Option<Volume>, VolumeError> {
        let connection = self.connection.lock();
        let select = format!("SELECT {COLUMNS} FROM volumes WHERE id = ?1");
        let found = connection.query_row(&select, params![id], volume);
        found.optional().map_err(self.failed())
    }

    /// Returns the token of a volume.
    pub fn token(&self, volume: &Volume) -> Result<String, VolumeError> {
        let connection = self.connection.lock();
        let select = "SELECT token FROM volumes WHERE id = ?1";
        let sealed = connection.query_row(select, params![volume.id], |row| row.get(0));
        let sealed: Option<Vec<u8>> = sealed.optional().map_err(self.failed())?;
        let sealed = sealed.ok_or_else(|| unknown(&volume.id))?;
        let token = self.key.open_sealed(&context(&volume.id), &sealed);
        let token = token.and_then(|token| String::from_utf8(token.to_vec()).ok());
        token.ok_or_else(|| VolumeError::Sealed(volume.id.clone()))
    }

    /// Returns the volume with this id if `token` is its token.
    pub fn authenticate(&self, id: &str, token: &str) -> Result<Option<Volume>, VolumeError> {
        let Some(found) = self.by_id(id)? else {
            return Ok(None);
        };
        let right = self.token(&found)?;
        Ok(is_equal(right.as_bytes(), token.as_bytes()).then_some(found))
    }

    /// Returns at most `limit` volumes of `owner` in the order of their names, after the name
    /// `after`.
    pub fn list(
        &self,
        owner: &str,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Vec<Volume>, VolumeError> {
        let connection = self.connection.lock();
        let select = || {
            let mut statement = connection.prepare_cached(&format!(
                "SELECT {COLUMNS} FROM volumes WHERE owner = ?1 AND name > ?2 ORDER BY name LIMIT ?3"
            ))?;
            let all =
                statement.query_map(params![owner, after.unwrap_or_default(), limit], volume)?;
            all.collect::<rusqlite::Result<Vec<Volume>>>()
        };
        select().map_err(self.failed())
    }

    /// Returns all volumes of all owners.
    pub fn all(&self) -> Result<Vec<Volume>, VolumeError> {
        let connection = self.connection.lock();
        let select = || {
            let select = format!("SELECT {COLUMNS} FROM volumes ORDER BY id");
            let mut statement = connection.prepare_cached(&select)?;
            let all = statement.query_map([], volume)?;
            all.collect::<rusqlite::Result<Vec<Volume>>>()
        };
        select().map_err(self.failed())
    }

    /// Returns the sum of the sizes of the volumes of `owner` in bytes.
    pub fn total_bytes(&self, owner: &str) -> Result<u64, VolumeError> {
        let connection = self.connection.lock();
        let sum = || {
            let select = "SELECT coalesce(sum(bytes), 0) FROM volumes WHERE owner = ?1";
            let mut statement = connection.prepare_cached(select)?;
            statement.query_row(params![owner], |row| row.get(0))
        };
        sum().map_err(self.failed())
    }

    /// Removes a volume. The caller removes its files.
    pub fn remove(&self, id: &str) -> Result<(), VolumeError> {
        let connection = self.connection.lock();
        let removed = connection.execute("DELETE FROM volumes WHERE id = ?1", params![id]);
        match removed.map_err(self.failed())? {
            0 => Err(unknown(id)),
            _ => Ok(()),
        }
    }
}

/// Compares in a time that does not depend on the position of a difference.
fn is_equal(a: &[u8], b: &[u8]) -> bool {
    let differences = a.iter().zip(b).fold(0, |sum, (a, b)| sum | (a ^ b));
    a.len() == b.len() && differences == 0
}

/// Returns a new random token of a volume.
fn new_token() -> Result<String, VolumeError> {
    let mut random = [0; TOKEN_BYTES];
    let filled = getrandom::fill(&mut random);
    filled.map_err(|e| VolumeError::File {
        path: "/dev/urandom".into(),
        source: std::io::Error::other(e),
    })?;
    let text = BASE32_NOPAD.encode(&random).to_ascii_lowercase();
    Ok(format!("jiffy_volume_{text}"))
}

fn unknown(which: &str) -> VolumeError {
    let shown: String = which.chars().take(crate::MAX_NAME).collect();
    VolumeError::Unknown(shown.escape_debug().to_string())
}

/// Finds a volume of `owner` by id or name.
fn find(connection: &Connection, owner: &str, which: &str) -> rusqlite::Result<Option<Volume>> {
    let mut statement = connection.prepare_cached(&format!(
        "SELECT {COLUMNS} FROM volumes WHERE owner = ?1 AND (id = ?2 OR name = ?2)"
    ))?;
    statement
        .query_row(params![owner, which], volume)
        .optional()
}
