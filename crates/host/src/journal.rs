//! What this host knows, on disk: every state a sandbox or snapshot was ever acknowledged in survives the death of the daemon.
//!
//! A change is one SQLite transaction in a write-ahead log, so whoever opens the journal finds the state before it or after it.
//! The log is not flushed to storage at every commit: a power failure may cost the last changes, but not their order.

use crate::record::{SandboxRecord, SnapshotRecord};
use rusqlite::{Connection, Transaction, params};
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Version of the tables; another one is refused.
const VERSION: i64 = 1;

const TABLES: &str = "
    CREATE TABLE sandboxes (id TEXT PRIMARY KEY, record TEXT NOT NULL) STRICT;
    CREATE TABLE snapshots (
        id TEXT PRIMARY KEY,
        parent TEXT,
        complete INTEGER NOT NULL,
        record TEXT NOT NULL
    ) STRICT;
    CREATE INDEX snapshots_by_parent ON snapshots (parent);
";

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
    /// From another version.
    #[error("the journal {} has version {found}, and this program reads version {VERSION}: use the version of jiffy that wrote it, or move it away", path.display())]
    Version {
        /// Its file.
        path: PathBuf,
        /// What it says.
        found: i64,
    },
    /// A record that does not parse.
    #[error("the journal {} has a record that is not readable: {problem}", path.display())]
    Record {
        /// Its file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

/// One change; all changes of one [`Journal::commit`] happen or none.
#[derive(Debug, Clone)]
pub enum Change {
    /// A sandbox is now as it says.
    Sandbox(SandboxRecord),
    /// There is no such sandbox any more.
    NoSandbox(String),
    /// A snapshot is about to be written.
    Intent(SnapshotRecord),
    /// A snapshot is complete.
    Snapshot(SnapshotRecord),
    /// There is no such snapshot any more.
    NoSnapshot(String),
}

/// A snapshot as the journal knows it.
#[derive(Debug, Clone, PartialEq)]
pub struct JournalledSnapshot {
    /// The snapshot.
    pub record: SnapshotRecord,
    /// Whether it was acknowledged.
    pub complete: bool,
}

/// The journal of one host.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    connection: Mutex<Connection>,
}

impl Journal {
    /// Opens or creates the journal in `file`.
    pub fn open(file: &Path) -> Result<Self, JournalError> {
        let failed = |source| JournalError::Database {
            path: file.to_owned(),
            source,
        };
        let mut connection = Connection::open(file).map_err(failed)?;
        connection
            .pragma_update(None, "journal_mode", "WAL")
            .and_then(|()| connection.pragma_update(None, "synchronous", "NORMAL"))
            .map_err(failed)?;
        let found: i64 = connection
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .map_err(failed)?;
        match found {
            0 => {
                let tx = connection.transaction().map_err(failed)?;
                tx.execute_batch(TABLES)
                    .and_then(|()| tx.pragma_update(None, "user_version", VERSION))
                    .and_then(|()| tx.commit())
                    .map_err(failed)?;
            }
            VERSION => {}
            found => {
                return Err(JournalError::Version {
                    path: file.to_owned(),
                    found,
                });
            }
        }
        Ok(Self {
            path: file.to_owned(),
            connection: Mutex::new(connection),
        })
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, source: rusqlite::Error) -> JournalError {
        JournalError::Database {
            path: self.path.clone(),
            source,
        }
    }

    /// Makes all changes or none.
    pub fn commit(&self, changes: &[Change]) -> Result<(), JournalError> {
        let mut connection = self.connection();
        let write = |tx: &Transaction<'_>| changes.iter().try_for_each(|c| apply(tx, c));
        connection
            .transaction()
            .and_then(|tx| {
                write(&tx)?;
                tx.commit()
            })
            .map_err(|e| self.failed(e))
    }

    /// All sandboxes.
    pub fn sandboxes(&self) -> Result<Vec<SandboxRecord>, JournalError> {
        let rows = self.rows("SELECT record, 1 FROM sandboxes ORDER BY rowid")?;
        rows.iter().map(|(text, _)| self.parse(text)).collect()
    }

    /// All snapshots, also those that were never completed.
    pub fn snapshots(&self) -> Result<Vec<JournalledSnapshot>, JournalError> {
        let rows = self.rows("SELECT record, complete FROM snapshots ORDER BY rowid")?;
        rows.iter()
            .map(|(text, complete)| {
                Ok(JournalledSnapshot {
                    record: self.parse(text)?,
                    complete: *complete,
                })
            })
            .collect()
    }

    fn rows(&self, query: &str) -> Result<Vec<(String, bool)>, JournalError> {
        let connection = self.connection();
        let read = || -> rusqlite::Result<Vec<(String, bool)>> {
            let mut statement = connection.prepare_cached(query)?;
            let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
            rows.collect()
        };
        read().map_err(|e| self.failed(e))
    }

    fn parse<T: DeserializeOwned>(&self, text: &str) -> Result<T, JournalError> {
        serde_json::from_str(text).map_err(|e| JournalError::Record {
            path: self.path.clone(),
            problem: e.to_string(),
        })
    }
}

fn apply(tx: &Transaction<'_>, change: &Change) -> rusqlite::Result<()> {
    let json = |value: serde_json::Result<String>| {
        value.map_err(|e| rusqlite::Error::ToSqlConversionFailure(Box::new(e)))
    };
    match change {
        Change::Sandbox(record) => {
            tx.prepare_cached(
                "INSERT INTO sandboxes (id, record) VALUES (?1, ?2)
                 ON CONFLICT (id) DO UPDATE SET record = ?2",
            )?
            .execute(params![record.id, json(serde_json::to_string(record))?])?;
        }
        Change::NoSandbox(id) => {
            tx.execute("DELETE FROM sandboxes WHERE id = ?1", [id])?;
        }
        Change::Intent(record) | Change::Snapshot(record) => {
            let complete = matches!(change, Change::Snapshot(_));
            tx.prepare_cached(
                "INSERT INTO snapshots (id, parent, complete, record) VALUES (?1, ?2, ?3, ?4)
                 ON CONFLICT (id) DO UPDATE SET parent = ?2, complete = ?3, record = ?4",
            )?
            .execute(params![
                record.id,
                record.parent,
                complete,
                json(serde_json::to_string(record))?
            ])?;
        }
        Change::NoSnapshot(id) => {
            tx.execute("DELETE FROM snapshots WHERE id = ?1", [id])?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Purpose, State};
    use jiffy_engine::SandboxSize;
    use std::collections::BTreeMap;

    fn sandbox(id: &str) -> SandboxRecord {
        SandboxRecord {
            id: id.into(),
            state: State::Broken { cause: "x".into() },
            template: "base".into(),
            size: SandboxSize::default(),
            env: BTreeMap::from([("A".into(), "1".into())]),
            snapshot: None,
            forked_from: None,
            boot_mode: None,
            boot_ms: Some(1.5),
            created_ms: 1,
            changed_ms: 2,
        }
    }

    fn snapshot(id: &str) -> SnapshotRecord {
        SnapshotRecord {
            id: id.into(),
            name: None,
            purpose: Purpose::Asked,
            sandbox: "a".into(),
            template: "base".into(),
            fingerprint: String::new(),
            size: SandboxSize::default(),
            parent: Some("p".into()),
            kept: true,
            stopped_ms: 0.0,
            total_ms: 0.0,
            created_ms: 1,
        }
    }

    #[test]
    fn what_was_committed_is_there_when_it_is_opened_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("state.db");
        let journal = Journal::open(&file).unwrap();
        journal
            .commit(&[
                Change::Sandbox(sandbox("a")),
                Change::Sandbox(sandbox("b")),
                Change::Intent(snapshot("s")),
                Change::Intent(snapshot("t")),
            ])
            .unwrap();
        journal
            .commit(&[
                Change::NoSandbox("b".into()),
                Change::Snapshot(snapshot("s")),
            ])
            .unwrap();
        // Not closed: as after a kill.
        std::mem::forget(journal);
        let journal = Journal::open(&file).unwrap();
        assert_eq!(journal.sandboxes().unwrap(), [sandbox("a")]);
        let complete: Vec<(String, bool)> = journal
            .snapshots()
            .unwrap()
            .into_iter()
            .map(|s| (s.record.id, s.complete))
            .collect();
        assert_eq!(complete, [("s".into(), true), ("t".into(), false)]);
    }

    #[test]
    fn a_journal_of_another_version_is_refused_with_advice() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("state.db");
        drop(Journal::open(&file).unwrap());
        let connection = Connection::open(&file).unwrap();
        connection.pragma_update(None, "user_version", 99).unwrap();
        drop(connection);
        let message = Journal::open(&file).unwrap_err().to_string();
        assert!(message.contains("version 99"), "{message}");
    }
}
