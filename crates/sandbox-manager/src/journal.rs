//! Journal: every acknowledged state of a sandbox or snapshot survives a crash of the daemon.
//!
//! A change is one SQLite transaction in a write-ahead log, so a reader finds the state before or
//! after the change. The log is not flushed to storage at every commit: a power failure may lose
//! the last changes but does not reorder them.
//!
//! A change that can still be rejected fails if the disk is full ([`Journal::commit`]). A change
//! that has already happened is written into reserved disk space
//! ([`Journal::commit_write_behind`]).
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.

mod tables;

use crate::journal_space::{CHECKPOINT_PAGES, ReservedSpace, SpaceError};
use crate::private_database::restrict_to_owner;
use crate::records::{SandboxRecord, SnapshotRecord};
use crate::sandbox::Sandbox;
use crate::snapshot::Snapshot;
use crate::store_copies::StoreRetraction;
use jiffy_api_types::SandboxState;
use jiffy_engine_api::GuestHandle;
use parking_lot::{Mutex, MutexGuard};

use rusqlite::config::DbConfig;
use rusqlite::{Connection, Transaction, params};
use serde::Serialize;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use tables::{ALL_ROWS, TableReader};

/// Sandboxes or snapshots, each in its final heap allocation. A large host has many of them, and
/// moving them would use further pages of memory.
pub(crate) type BoxedRecords<T> = Vec<Box<T>>;

/// Version of the tables. A newer version is rejected.
const SCHEMA_VERSION: i64 = 3;

/// Tables of version 1. The schemas of later versions are applied to databases of earlier versions.
const SCHEMA_V1: &str = "
    CREATE TABLE sandboxes (id TEXT PRIMARY KEY, record TEXT NOT NULL) STRICT;
    CREATE TABLE snapshots (
        id TEXT PRIMARY KEY,
        parent TEXT,
        complete INTEGER NOT NULL,
        record TEXT NOT NULL
    ) STRICT;
    CREATE INDEX snapshots_by_parent ON snapshots (parent);
";

/// Table added in version 2: engine handles of the guests of running sandboxes, for their adoption.
const SCHEMA_V2: &str =
    "CREATE TABLE guests (sandbox TEXT PRIMARY KEY, handle TEXT NOT NULL) STRICT;";

/// Table added in version 3: removals from shared stores that are still to be done.
const SCHEMA_V3: &str = "CREATE TABLE retractions (retraction TEXT PRIMARY KEY) STRICT;";

/// Reason why the journal cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// SQLite failed.
    #[error("the journal {} failed: {source}; check that its disk is writable and not full, and restore a damaged file from a backup", path.display())]
    Database {
        /// File of the journal.
        path: PathBuf,
        /// Error of SQLite.
        source: rusqlite::Error,
    },
    /// The disk space reserved for the journal is incomplete, and the disk is full.
    #[error("cannot reserve disk space for the journal {}: {source}; free space on its disk, for example by removing snapshots and sandboxes", path.display())]
    Full {
        /// File of the journal.
        path: PathBuf,
        /// Error of the disk.
        source: io::Error,
    },
    /// The journal has another version.
    #[error("the journal {} has version {version}, but this program reads version {SCHEMA_VERSION}: use the version of jiffy that wrote it, or move it away", path.display())]
    Version {
        /// File of the journal.
        path: PathBuf,
        /// Version in the file.
        version: i64,
    },
    /// A record cannot be parsed.
    #[error("the journal {} has an invalid record of {what} {id}: {problem}; use the version of jiffy that wrote it, or restore a copy of the file", path.display())]
    Record {
        /// File of the journal.
        path: PathBuf,
        /// Kind of the record.
        what: &'static str,
        /// Id of the record.
        id: String,
        /// Description of the problem.
        problem: String,
    },
}

/// Change of the journal. The changes of one [`Journal::commit`] are written all or not at all.
#[derive(Debug, Clone)]
// A commit has few changes, and most of them are the largest variant. A box would only add an
// allocation.
#[allow(clippy::large_enum_variant)]
pub(crate) enum JournalChange {
    /// Stores the sandbox. If it is not running, its guest is removed.
    Sandbox(Sandbox),
    /// Stores the engine's handle of a running sandbox's guest.
    Guest(String, GuestHandle),
    /// Removes the sandbox and its guest.
    NoSandbox(String),
    /// Stores a snapshot that is about to be written.
    Intent(Snapshot),
    /// Stores a snapshot that is complete.
    Snapshot(Snapshot),
    /// Removes the snapshot.
    NoSnapshot(String),
    /// Stores that a copy must be removed from a store.
    Retraction(StoreRetraction),
    /// Removes a [`Self::Retraction`] that is done.
    Retracted(StoreRetraction),
}

/// Record of a snapshot in the journal.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct JournalledSnapshot {
    /// The snapshot.
    pub snapshot: Box<Snapshot>,
    /// False until the commit that ends the snapshot's operation. A captured snapshot (`storing`),
    /// whose memory is frozen but not stored, is acknowledged to its client before this commit.
    pub complete: bool,
}

/// Journal and its records at the time of opening.
#[derive(Debug)]
pub struct OpenedJournal {
    pub(crate) path: PathBuf,
    pub(crate) journal: Journal,
    pub(crate) sandboxes: BoxedRecords<Sandbox>,
    pub(crate) snapshots: Vec<JournalledSnapshot>,
}

impl OpenedJournal {
    /// Opens or creates the journal in `file` and reads its tables with several threads. Blocks.
    pub fn read(file: &Path) -> Result<Self, JournalError> {
        let journal = Journal::open(file)?;
        let (sandboxes, snapshots) = tables::read_all(&journal)?;
        Ok(Self {
            path: file.to_owned(),
            sandboxes,
            snapshots,
            journal,
        })
    }
}

/// Journal of one host.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    database: Mutex<Database>,
}

/// Open database of the journal.
#[derive(Debug)]
struct Database {
    connection: Connection,
    /// Changes that have happened but could not be written. They are written together with the next
    /// changes.
    pending: Vec<JournalChange>,
    // This field is declared last, so that it is dropped after the connection: closing the
    // descriptors of the space earlier would release SQLite's locks.
    space: ReservedSpace,
}

impl Database {
    /// Writes the pending changes and then `changes`, all or none.
    fn write(&mut self, changes: &[JournalChange]) -> rusqlite::Result<()> {
        if self.pending.is_empty() && changes.is_empty() {
            return Ok(());
        }
        let tx = self.connection.transaction()?;
        let mut all = self.pending.iter().chain(changes);
        // An error drops the transaction, which rolls it back.
        all.try_for_each(|c| apply(&tx, c))?;
        tx.commit()?;
        self.pending.clear();
        Ok(())
    }
}

impl Journal {
    /// Opens or creates the journal in `file`.
    pub fn open(file: &Path) -> Result<Self, JournalError> {
        let failed = |source| JournalError::Database {
            path: file.to_owned(),
            source,
        };
        // The journal contains environment variables of sandboxes. Errors are ignored: if the file
        // cannot be created or opened, `Connection::open` fails too.
        let _ = restrict_to_owner(file);
        let mut connection = Connection::open(file).map_err(failed)?;
        connection
            .pragma_update(None, "journal_mode", "WAL")
            .and_then(|()| connection.pragma_update(None, "synchronous", "NORMAL"))
            .and_then(|()| connection.pragma_update(None, "wal_autocheckpoint", CHECKPOINT_PAGES))
            // The log and its disk space remain when the connection is closed: on a full disk, no
            // space for another log would be available.
            .and_then(|()| {
                connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)
            })
            .map_err(failed)?;
        let version: i64 = connection
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .map_err(failed)?;
        // Version 0 is a new file. All missing schemas are applied in one transaction.
        match version {
            0..SCHEMA_VERSION => {
                let tx = connection.transaction().map_err(failed)?;
                let schemas = [SCHEMA_V1, SCHEMA_V2, SCHEMA_V3];
                // The n-th schema, counted from 0, upgrades version n to version n + 1.
                let mut missing = (0..)
                    .zip(schemas)
                    .filter(|(schema_version, _)| *schema_version >= version);
                missing
                    .try_for_each(|(_, schema)| tx.execute_batch(schema))
                    .and_then(|()| tx.pragma_update(None, "user_version", SCHEMA_VERSION))
                    .and_then(|()| tx.commit())
                    .map_err(failed)?;
            }
            SCHEMA_VERSION => {}
            version => {
                return Err(JournalError::Version {
                    path: file.to_owned(),
                    version,
                });
            }
        }
        let space = ReservedSpace::of(file).map_err(|source| JournalError::Full {
            path: file.to_owned(),
            source,
        })?;
        let journal = Self {
            path: file.to_owned(),
            database: Mutex::new(Database {
                connection,
                pending: Vec::new(),
                space,
            }),
        };
        if let Err(e) = journal.ensure_space(&mut journal.database()) {
            // A full disk must not prevent the start: clients can remove data only while the daemon
            // runs.
            tracing::warn!(error = %e, "cannot reserve disk space for the journal");
        }
        Ok(journal)
    }

    /// Reserves the disk space of the journal again, if a part of it was used.
    fn ensure_space(&self, database: &mut Database) -> Result<(), JournalError> {
        let ensured = database.space.ensure(&database.connection);
        ensured.map_err(|e| match e {
            SpaceError::Database(source) => self.failed(source),
            SpaceError::Disk(source) => JournalError::Full {
                path: self.path.clone(),
                source,
            },
        })
    }

    fn database(&self) -> MutexGuard<'_, Database> {
        self.database.lock()
    }

    fn failed(&self, source: rusqlite::Error) -> JournalError {
        JournalError::Database {
            path: self.path.clone(),
            source,
        }
    }

    /// Writes all changes or none. For changes that can still be rejected: fails if the disk has no
    /// space except the reserved space.
    pub fn commit(&self, changes: &[JournalChange]) -> Result<(), JournalError> {
        let mut database = self.database();
        self.ensure_space(&mut database)?;
        database.write(changes).map_err(|e| self.failed(e))
    }

    /// Writes changes that have happened and cannot be undone. May use the reserved disk space. If
    /// writing fails, the changes remain pending and are written together with the next ones. A
    /// crash before that has the same effect as a crash before the change.
    pub fn commit_write_behind(&self, changes: &[JournalChange]) {
        let mut database = self.database();
        if let Err(e) = database.write(changes) {
            let e = self.failed(e);
            tracing::error!(error = %e, "cannot write changes to the journal, retrying with the next write");
            // The list is unbounded, but while the disk is full, most operations that would add
            // changes fail.
            database.pending.extend_from_slice(changes);
        }
    }

    /// Returns all sandboxes.
    pub fn sandboxes(&self) -> Result<Vec<Sandbox>, JournalError> {
        let rows = TableReader::open(self)?.sandboxes(&ALL_ROWS);
        Ok(rows?.into_iter().map(|record| *record).collect())
    }

    /// Returns the handles of the guests of running sandboxes, by sandbox.
    pub fn guests(&self) -> Result<HashMap<String, GuestHandle>, JournalError> {
        let database = self.database();
        let read = || -> rusqlite::Result<HashMap<String, GuestHandle>> {
            let mut statement = database
                .connection
                .prepare("SELECT sandbox, handle FROM guests")?;
            let rows =
                statement.query_map([], |row| Ok((row.get(0)?, GuestHandle(row.get(1)?))))?;
            rows.collect()
        };
        read().map_err(|e| self.failed(e))
    }

    /// Returns all snapshots, including incomplete ones.
    pub fn snapshots(&self) -> Result<Vec<JournalledSnapshot>, JournalError> {
        TableReader::open(self)?.snapshots(&ALL_ROWS)
    }

    /// Returns the removals that are still to be done in shared stores, oldest first.
    pub fn retractions(&self) -> Result<Vec<StoreRetraction>, JournalError> {
        TableReader::open(self)?.retractions()
    }
}

/// Executes one change in a transaction.
fn apply(tx: &Transaction<'_>, change: &JournalChange) -> rusqlite::Result<()> {
    match change {
        JournalChange::Sandbox(sandbox) => {
            tx.prepare_cached(
                "INSERT INTO sandboxes (id, record) VALUES (?1, ?2)
                 ON CONFLICT (id) DO UPDATE SET record = ?2",
            )?
            .execute(params![sandbox.id, json(&SandboxRecord::from(sandbox))?])?;
            // A handle without a running sandbox would make the next daemon adopt a dead guest.
            if sandbox.state != SandboxState::Running {
                tx.prepare_cached("DELETE FROM guests WHERE sandbox = ?1")?
                    .execute([&sandbox.id])?;
            }
        }
        JournalChange::Guest(sandbox, handle) => {
            tx.prepare_cached("INSERT OR REPLACE INTO guests (sandbox, handle) VALUES (?1, ?2)")?
                .execute(params![sandbox, handle.0])?;
        }
        JournalChange::NoSandbox(id) => {
            tx.prepare_cached("DELETE FROM sandboxes WHERE id = ?1")?
                .execute([id])?;
            tx.prepare_cached("DELETE FROM guests WHERE sandbox = ?1")?
                .execute([id])?;
        }
        JournalChange::Intent(snapshot) | JournalChange::Snapshot(snapshot) => {
            let complete = matches!(change, JournalChange::Snapshot(_));
            tx.prepare_cached(
                "INSERT INTO snapshots (id, parent, complete, record) VALUES (?1, ?2, ?3, ?4)
                 ON CONFLICT (id) DO UPDATE SET parent = ?2, complete = ?3, record = ?4",
            )?
            .execute(params![
                snapshot.id,
                snapshot.parent,
                complete,
                json(&SnapshotRecord::from(snapshot))?
            ])?;
        }
        JournalChange::NoSnapshot(id) => {
            tx.prepare_cached("DELETE FROM snapshots WHERE id = ?1")?
                .execute([id])?;
        }
        JournalChange::Retraction(retraction) => {
            tx.prepare_cached("INSERT OR IGNORE INTO retractions (retraction) VALUES (?1)")?
                .execute([json(retraction)?])?;
        }
        JournalChange::Retracted(retraction) => {
            tx.prepare_cached("DELETE FROM retractions WHERE retraction = ?1")?
                .execute([json(retraction)?])?;
        }
    }
    Ok(())
}

fn json(value: &impl Serialize) -> rusqlite::Result<String> {
    serde_json::to_string(value).map_err(|e| rusqlite::Error::ToSqlConversionFailure(Box::new(e)))
}

#[cfg(test)]
mod tests;
