//! Journal: every acknowledged state of a sandbox or snapshot survives the death of the daemon.
//!
//! A change is one SQLite transaction in a write-ahead log, so whoever opens the journal finds the
//! state before it or after it. The log is not flushed to storage at every commit: a power failure
//! may cost the last changes, but not their order.
//!
//! A change that can be refused is refused when the disk is full ([`Journal::commit`]); one that
//! has happened finds the room that is kept for it ([`Journal::commit_write_behind`]).

mod tables;

use crate::journal_space::{CHECKPOINT_PAGES, ReservedSpace, SpaceError};
use crate::private_database::keep_private;
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

/// Sandboxes or snapshots, each at its final place in memory: a large host has many, and moving
/// them costs fresh pages.
pub(crate) type BoxedRecords<T> = Vec<Box<T>>;

/// Version of the tables; another one is refused.
const SCHEMA_VERSION: i64 = 3;

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

/// Table that version 2 added: the guests of running sandboxes, by which they are found again.
const SCHEMA_V2: &str =
    "CREATE TABLE guests (sandbox TEXT PRIMARY KEY, handle TEXT NOT NULL) STRICT;";

/// Table that version 3 added: what is still to be removed from stores that hosts share.
const SCHEMA_V3: &str = "CREATE TABLE retractions (retraction TEXT PRIMARY KEY) STRICT;";

/// The journal cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// SQLite says no.
    #[error("the journal {} failed: {source}; check that its disk is writable and not full", path.display())]
    Database {
        /// Its file.
        path: PathBuf,
        /// Why.
        source: rusqlite::Error,
    },
    /// The room that is kept for the journal is not whole, and the disk has none.
    #[error("the journal {} can keep no room for itself: {source}; make some on its disk, by removing snapshots and sandboxes that nobody needs for example", path.display())]
    Full {
        /// Its file.
        path: PathBuf,
        /// Error of the disk.
        source: io::Error,
    },
    /// From another version.
    #[error("the journal {} has version {found}, and this program reads version {SCHEMA_VERSION}: use the version of jiffy that wrote it, or move it away", path.display())]
    Version {
        /// Its file.
        path: PathBuf,
        /// Version in the file.
        found: i64,
    },
    /// A record that does not parse.
    #[error("the journal {} has a record of {what} {id} that is not readable: {problem}; use the version of jiffy that wrote it, or restore a copy of the file", path.display())]
    Record {
        /// Its file.
        path: PathBuf,
        /// Kind of the record.
        what: &'static str,
        /// Its id.
        id: String,
        /// Description of the problem.
        problem: String,
    },
}

/// One change; all changes of one [`Journal::commit`] happen or none.
#[derive(Debug, Clone)]
// A commit has a handful, and most of them are the large one: a box would only move it.
#[allow(clippy::large_enum_variant)]
pub(crate) enum JournalChange {
    /// A sandbox is now as it says. One that does not run has no guest.
    Sandbox(Sandbox),
    /// The guest of a running sandbox is this one.
    Guest(String, GuestHandle),
    /// There is no such sandbox any more.
    NoSandbox(String),
    /// A snapshot is about to be written.
    Intent(Snapshot),
    /// A snapshot is complete.
    Snapshot(Snapshot),
    /// There is no such snapshot any more.
    NoSnapshot(String),
    /// A copy in a store is to be removed.
    Retraction(StoreRetraction),
    /// It was removed.
    Retracted(StoreRetraction),
}

/// A snapshot as the journal knows it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct JournalledSnapshot {
    /// The snapshot.
    pub snapshot: Box<Snapshot>,
    /// True once it was acknowledged.
    pub complete: bool,
}

/// A journal and the records in it, as they were when it was opened.
#[derive(Debug)]
pub struct OpenedJournal {
    pub(crate) path: PathBuf,
    pub(crate) journal: Journal,
    pub(crate) sandboxes: BoxedRecords<Sandbox>,
    pub(crate) snapshots: Vec<JournalledSnapshot>,
}

impl OpenedJournal {
    /// Opens or creates the journal in `file` and reads its tables, on all processors. Blocks.
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

/// The journal of one host.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    database: Mutex<Database>,
}

#[derive(Debug)]
struct Database {
    connection: Connection,
    /// Changes that happened and could not be written yet; they are written together with the next
    /// ones.
    pending: Vec<JournalChange>,
    // Closed after the connection.
    space: ReservedSpace,
}

impl Database {
    /// Makes what is owed and all changes, or none.
    fn write(&mut self, changes: &[JournalChange]) -> rusqlite::Result<()> {
        if self.pending.is_empty() && changes.is_empty() {
            return Ok(());
        }
        let tx = self.connection.transaction()?;
        let mut all = self.pending.iter().chain(changes);
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
        // Environments of sandboxes are in it. What stands in the way is told by the database.
        let _ = keep_private(file);
        let mut connection = Connection::open(file).map_err(failed)?;
        connection
            .pragma_update(None, "journal_mode", "WAL")
            .and_then(|()| connection.pragma_update(None, "synchronous", "NORMAL"))
            .and_then(|()| connection.pragma_update(None, "wal_autocheckpoint", CHECKPOINT_PAGES))
            // The log stays, with the room it has: on a full disk there would be none for another
            // one.
            .and_then(|()| {
                connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)
            })
            .map_err(failed)?;
        let found: i64 = connection
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .map_err(failed)?;
        match found {
            0..SCHEMA_VERSION => {
                let tx = connection.transaction().map_err(failed)?;
                let schemas = [SCHEMA_V1, SCHEMA_V2, SCHEMA_V3];
                let mut missing = (0..).zip(schemas).filter(|(version, _)| *version >= found);
                missing
                    .try_for_each(|(_, schema)| tx.execute_batch(schema))
                    .and_then(|()| tx.pragma_update(None, "user_version", SCHEMA_VERSION))
                    .and_then(|()| tx.commit())
                    .map_err(failed)?;
            }
            SCHEMA_VERSION => {}
            found => {
                return Err(JournalError::Version {
                    path: file.to_owned(),
                    found,
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
        if let Err(e) = journal.keep_space(&mut journal.database()) {
            // On a full disk there must be somebody who can be asked to remove things.
            tracing::warn!("{e}");
        }
        Ok(journal)
    }

    fn keep_space(&self, database: &mut Database) -> Result<(), JournalError> {
        let kept = database.space.ensure(&database.connection);
        kept.map_err(|e| match e {
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

    /// Makes all changes or none. For what can still be refused: it is when the disk has no room
    /// but what is kept.
    pub fn commit(&self, changes: &[JournalChange]) -> Result<(), JournalError> {
        let mut database = self.database();
        self.keep_space(&mut database)?;
        database.write(changes).map_err(|e| self.failed(e))
    }

    /// Takes down what has happened and cannot be refused any more, in the room that is kept where
    /// there is no other. If the disk fails, it is taken down together with the next changes; until
    /// then it is as if the daemon had not come to it.
    pub fn commit_write_behind(&self, changes: &[JournalChange]) {
        let mut database = self.database();
        if let Err(e) = database.write(changes) {
            let e = self.failed(e);
            tracing::error!("{e}; what has happened is written down with the next change");
            database.pending.extend_from_slice(changes);
        }
    }

    /// All sandboxes.
    pub fn sandboxes(&self) -> Result<Vec<Sandbox>, JournalError> {
        let rows = TableReader::open(self)?.sandboxes(&ALL_ROWS);
        Ok(rows?.into_iter().map(|record| *record).collect())
    }

    /// The guests of running sandboxes, by sandbox.
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

    /// All snapshots, also those that were never completed.
    pub fn snapshots(&self) -> Result<Vec<JournalledSnapshot>, JournalError> {
        TableReader::open(self)?.snapshots(&ALL_ROWS)
    }

    /// Copies that are still to be removed from stores, the oldest first.
    pub fn retractions(&self) -> Result<Vec<StoreRetraction>, JournalError> {
        TableReader::open(self)?.retractions()
    }
}

fn apply(tx: &Transaction<'_>, change: &JournalChange) -> rusqlite::Result<()> {
    match change {
        JournalChange::Sandbox(sandbox) => {
            tx.prepare_cached(
                "INSERT INTO sandboxes (id, record) VALUES (?1, ?2)
                 ON CONFLICT (id) DO UPDATE SET record = ?2",
            )?
            .execute(params![sandbox.id, json(&SandboxRecord::from(sandbox))?])?;
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
