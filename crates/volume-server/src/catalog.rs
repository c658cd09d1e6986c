//! Catalog of a volume: nodes, their names and attributes, in SQLite.
//!
//! A *node* is a file, directory or link of a volume, identified by a number as in FUSE. Its
//! content is in a separate file.

mod entries;
mod nodes;

pub(crate) use entries::{DirectoryEntry, Found};

use crate::VolumeError;
use crate::contents::{errno, log_of};
use jiffy_database::{Schema, open};
use nix::errno::Errno;
use rusqlite::{Connection, ErrorCode, OptionalExtension, TransactionBehavior, params};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Schema. The column `parent` of a node is used for directories only. `position` orders the
/// entries of a directory, so that a listing continues correctly after changes.
const SCHEMA: Schema = Schema {
    version: 1,
    tables: "
    CREATE TABLE nodes (
        id INTEGER PRIMARY KEY,
        mode INTEGER NOT NULL,
        links INTEGER NOT NULL,
        uid INTEGER NOT NULL,
        gid INTEGER NOT NULL,
        device INTEGER NOT NULL,
        parent INTEGER NOT NULL,
        accessed INTEGER NOT NULL,
        modified INTEGER NOT NULL,
        changed INTEGER NOT NULL,
        target BLOB
    ) STRICT;
    CREATE INDEX orphans ON nodes (links) WHERE links = 0;
    CREATE TABLE entries (
        position INTEGER PRIMARY KEY,
        parent INTEGER NOT NULL,
        name BLOB NOT NULL,
        node INTEGER NOT NULL,
        UNIQUE (parent, name)
    ) STRICT;
    CREATE INDEX listings ON entries (parent);
    CREATE TABLE numbers (reserved INTEGER NOT NULL) STRICT;
    INSERT INTO numbers VALUES (1);
",
};
/// Node numbers that are reserved at once.
const RESERVED: u64 = 1 << 20;
/// Number of cached statements.
const STATEMENTS: usize = 64;

/// Catalog of a volume.
#[derive(Debug)]
pub(crate) struct Catalog {
    connection: Connection,
    /// Write-ahead log, to which each transaction is appended.
    log: File,
    path: PathBuf,
    /// Number of the next node.
    next: u64,
    /// End of the reserved numbers.
    reserved: u64,
}

/// Returns the error number of a failure of SQLite.
pub(crate) fn failed(error: rusqlite::Error) -> Errno {
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => Errno::ENOSPC,
        _ => {
            tracing::error!(error = %error, "the catalog of the volume failed");
            Errno::EIO
        }
    }
}

impl Catalog {
    /// Opens or creates the catalog in `directory`.
    pub(crate) fn open(directory: &Path) -> Result<Self, VolumeError> {
        let path = directory.join("catalog.db");
        let file_failed = |source| VolumeError::File {
            path: path.clone(),
            source,
        };
        let settings = [
            // One process uses the catalog, which needs no shared memory then.
            ("locking_mode", "EXCLUSIVE"),
            ("journal_mode", "WAL"),
            // The server synchronises the log itself when a client requests it.
            ("synchronous", "NORMAL"),
            ("temp_store", "MEMORY"),
        ];
        let mut connection = open(&path, &SCHEMA, &settings)?;
        connection.set_prepared_statement_cache_capacity(STATEMENTS);
        let failed = |source| VolumeError::Catalog {
            path: path.clone(),
            source,
        };
        let next = reserve(&mut connection).map_err(failed)?;
        // Open the log after the first transaction, which creates it.
        let log = File::open(log_of(&path)).map_err(file_failed)?;
        let catalog = Self {
            connection,
            log,
            path: path.clone(),
            next,
            reserved: next + RESERVED,
        };
        // Numbers are used only after their reservation is on the disk.
        catalog.sync().map_err(|e| file_failed(e.into()))?;
        let parent = File::open(directory).map_err(file_failed)?;
        parent.sync_all().map_err(file_failed)?;
        Ok(catalog)
    }

    /// Writes all transactions to the disk.
    pub(crate) fn sync(&self) -> Result<(), Errno> {
        self.log.sync_data().map_err(|e| errno(&e))
    }

    /// Returns the number of a new node. No two nodes of a volume ever have the same number, also
    /// after a power failure: a restored guest may still use old numbers.
    pub(crate) fn new_number(&mut self) -> Result<u64, Errno> {
        if self.next >= self.reserved {
            let next = reserve(&mut self.connection).map_err(failed)?;
            self.sync()?;
            (self.next, self.reserved) = (next, next + RESERVED);
        }
        let number = self.next;
        self.next += 1;
        Ok(number)
    }

    /// Runs `work` in a transaction, which is undone if `work` fails.
    pub(crate) fn change<T>(
        &mut self,
        work: impl FnOnce(&Connection) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let behavior = TransactionBehavior::Immediate;
        let tx = self
            .connection
            .transaction_with_behavior(behavior)
            .map_err(failed)?;
        let done = work(&tx)?;
        tx.commit().map_err(failed)?;
        Ok(done)
    }

    /// Returns a copy of the catalog, a file without a name.
    pub(crate) fn copy(&self) -> Result<File, Errno> {
        let path = self.path.with_file_name("image.db");
        let remove = || match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(errno(&e)),
            _ => Ok(()),
        };
        // A process that was killed may have left the file.
        remove()?;
        let text = path.to_str().ok_or(Errno::EINVAL)?;
        let copied = self.connection.execute("VACUUM INTO ?1", params![text]);
        let file = copied
            .map_err(failed)
            .and_then(|_| File::open(&path).map_err(|e| errno(&e)));
        remove()?;
        file
    }

    /// Returns the connection for reads.
    pub(crate) fn read(&self) -> &Connection {
        &self.connection
    }

    /// Returns the path of the catalog.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Reserves [`RESERVED`] numbers. Returns the first of them.
fn reserve(connection: &mut Connection) -> rusqlite::Result<u64> {
    let first: Option<u64> = connection
        .query_row("SELECT reserved FROM numbers", [], |row| row.get(0))
        .optional()?;
    // The root has the number 1.
    let first = first.unwrap_or(1).max(2);
    connection.execute(
        "UPDATE numbers SET reserved = ?1",
        params![first + RESERVED],
    )?;
    Ok(first)
}
