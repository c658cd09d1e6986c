//! Reads the tables of a journal at the start of the daemon, in parallel.
//!
//! The *journal* is the database of the daemon with the records of sandboxes and snapshots.

use super::{BoxedRecords, Journal, JournalError, JournalledSnapshot};
use crate::records::{SandboxRecord, SnapshotRecord};
use crate::sandbox::Sandbox;
use crate::store_copies::StoreRetraction;
use rusqlite::types::ValueRef;
use rusqlite::{Connection, OpenFlags, Row, params};
use serde::de::DeserializeOwned;
use std::ops::RangeInclusive;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Number of parts into which a large table is divided: several for each thread, since the parts
/// take different times.
const PARTS: i64 = 8;
/// Minimum number of row ids in a part.
const MIN_PART_ROWS: i64 = 500;
/// Maximum number of reading threads.
const MAX_READERS: usize = 4;

/// Range of row ids.
type RowIds = RangeInclusive<i64>;

/// All rows.
pub(super) const ALL_ROWS: RowIds = i64::MIN..=i64::MAX;

/// Part of a table.
enum Part {
    Sandboxes(RowIds),
    Snapshots(RowIds),
}

/// Records in a part.
enum Rows {
    Sandboxes(BoxedRecords<Sandbox>),
    Snapshots(Vec<JournalledSnapshot>),
}

/// Reads all sandboxes and snapshots, in the order of their creation. Each sandbox is in its final
/// heap allocation.
pub(super) fn read_all(
    journal: &Journal,
) -> Result<(BoxedRecords<Sandbox>, Vec<JournalledSnapshot>), JournalError> {
    let reader = TableReader::open(journal)?;
    let snapshots = reader.parts("snapshots")?.into_iter().map(Part::Snapshots);
    let sandboxes = reader.parts("sandboxes")?.into_iter().map(Part::Sandboxes);
    let parts: Vec<Part> = snapshots.chain(sandboxes).collect();
    let next = AtomicUsize::new(0);
    let read_some = |reader: &TableReader| {
        let mut read = Vec::new();
        loop {
            // The counter only hands out numbers. Joining the threads makes their results visible.
            let at = next.fetch_add(1, Ordering::Relaxed);
            let rows = match parts.get(at) {
                Some(Part::Sandboxes(ids)) => Rows::Sandboxes(reader.sandboxes(ids)?),
                Some(Part::Snapshots(ids)) => Rows::Snapshots(reader.snapshots(ids)?),
                None => return Ok(read),
            };
            read.push((at, rows));
        }
    };
    let processors = thread::available_parallelism().map_or(1, usize::from);
    // This thread reads too, so one thread fewer is started.
    let readers = processors.min(MAX_READERS).min(parts.len());
    let mut read: Vec<(usize, Rows)> = thread::scope(|threads| {
        let others: Vec<_> = (1..readers)
            .map(|_| threads.spawn(|| read_some(&TableReader::open(journal)?)))
            .collect();
        let mut all = read_some(&reader)?;
        for other in others {
            all.extend(other.join().unwrap_or_else(|panic| resume_unwind(panic))?);
        }
        Ok(all)
    })?;
    // Restore the order of creation.
    read.sort_unstable_by_key(|(at, _)| *at);
    let (mut sandboxes, mut snapshots) = (Vec::new(), Vec::new());
    for (_, rows) in read {
        match rows {
            Rows::Sandboxes(rows) => sandboxes.extend(rows),
            Rows::Snapshots(rows) => snapshots.extend(rows),
        }
    }
    Ok((sandboxes, snapshots))
}

/// Connection of a thread that reads tables. Rows are parsed one by one, so the text of a whole
/// table is never in memory. Pages are read rather than mapped, so that a bad disk block is an
/// error and not a signal.
pub(super) struct TableReader<'a> {
    journal: &'a Journal,
    connection: Connection,
}

impl<'a> TableReader<'a> {
    pub fn open(journal: &'a Journal) -> Result<Self, JournalError> {
        // Each connection is used by one thread, so SQLite needs no mutex.
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(&journal.path, flags);
        let connection = connection.map_err(|e| journal.failed(e))?;
        Ok(Self {
            journal,
            connection,
        })
    }

    /// Returns ranges that together contain all rows of `table`.
    fn parts(&self, table: &str) -> Result<Vec<RowIds>, JournalError> {
        // Two subqueries: SQLite finds a minimum or maximum in the index only if a query has no
        // other aggregate.
        let query =
            format!("SELECT (SELECT min(rowid) FROM {table}), (SELECT max(rowid) FROM {table})");
        let ends = self
            .connection
            .query_row(&query, [], |row| Ok((row.get(0)?, row.get(1)?)));
        let (Some(first), Some(last)): (Option<i64>, Option<i64>) =
            ends.map_err(|e| self.journal.failed(e))?
        else {
            return Ok(Vec::new());
        };
        // Saturating, since row ids may span the whole range of an `i64`.
        let rows = (last.saturating_sub(first) / PARTS + 1).max(MIN_PART_ROWS);
        let end = |first: i64| first.saturating_add(rows - 1).min(last);
        let next = |part: &RowIds| (*part.end() < last).then(|| part.end() + 1);
        let parts = std::iter::successors(Some(first..=end(first)), |part| {
            next(part).map(|first| first..=end(first))
        });
        Ok(parts.collect())
    }

    pub fn sandboxes(&self, ids: &RowIds) -> Result<BoxedRecords<Sandbox>, JournalError> {
        let query = "SELECT id, record, 1 FROM sandboxes
             WHERE rowid BETWEEN ?1 AND ?2 ORDER BY rowid";
        self.rows("sandbox", query, ids, |record: SandboxRecord, _| {
            record.try_into()
        })
    }

    pub fn snapshots(&self, ids: &RowIds) -> Result<Vec<JournalledSnapshot>, JournalError> {
        let query = "SELECT id, record, complete FROM snapshots
             WHERE rowid BETWEEN ?1 AND ?2 ORDER BY rowid";
        self.rows(
            "snapshot",
            query,
            ids,
            |record: SnapshotRecord, complete| {
                Ok(JournalledSnapshot {
                    snapshot: record.into(),
                    complete,
                })
            },
        )
    }

    pub fn retractions(&self) -> Result<Vec<StoreRetraction>, JournalError> {
        let query = "SELECT rowid, retraction, 1 FROM retractions
             WHERE rowid BETWEEN ?1 AND ?2 ORDER BY rowid";
        self.rows("removal", query, &ALL_ROWS, |retraction, _| Ok(retraction))
    }

    /// Reads rows (id, record, flag) one by one, and converts each record with its flag. The flag
    /// is `complete` for snapshots, and always 1 in other tables.
    fn rows<T: DeserializeOwned, R>(
        &self,
        what: &'static str,
        query: &str,
        ids: &RowIds,
        convert: impl Fn(T, bool) -> Result<R, &'static str>,
    ) -> Result<Vec<R>, JournalError> {
        let failed = |e| self.journal.failed(e);
        let mut statement = self.connection.prepare(query).map_err(failed)?;
        let rows = statement.query(params![ids.start(), ids.end()]);
        let mut rows = rows.map_err(failed)?;
        let mut records = Vec::new();
        while let Some(row) = rows.next().map_err(failed)? {
            let text = row.get_ref(1).map_err(failed)?.as_bytes();
            let text = text.map_err(|e| failed(e.into()))?;
            let unreadable = |problem| JournalError::Record {
                path: self.journal.path.clone(),
                what,
                id: row_name(row),
                problem,
            };
            let record = serde_json::from_slice(text).map_err(|e| unreadable(e.to_string()))?;
            let record = convert(record, row.get(2).map_err(failed)?);
            records.push(record.map_err(|problem| unreadable(problem.to_owned()))?);
        }
        Ok(records)
    }
}

/// Returns the id of a row, for error messages.
fn row_name(row: &Row<'_>) -> String {
    match row.get_ref(0) {
        Ok(ValueRef::Integer(number)) => number.to_string(),
        Ok(value) => value.as_str().unwrap_or_default().to_owned(),
        Err(_) => String::new(),
    }
}
