//! File of the usage ledger: `<home>/usage.db`, an SQLite database.
//!
//! The ledger adds up the usage of each owner by day. It is written periodically.

use super::day_clock::UsageMoment;
use super::meter::Meter;
use super::{Day, OTHER_OWNERS, UsageAmounts, UsageError, UsageQuery};
use crate::private_database::restrict_to_owner;
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// Version of the tables.
const SCHEMA_VERSION: i64 = 1;
/// Statements that create the tables.
const SCHEMA: &str = "
    CREATE TABLE usage (
        day INTEGER NOT NULL,
        owner TEXT NOT NULL,
        sandbox_ms INTEGER NOT NULL,
        cpu_us INTEGER NOT NULL,
        memory_mib_ms INTEGER NOT NULL,
        stored_kib_s INTEGER NOT NULL,
        max_stored_bytes INTEGER NOT NULL,
        sent_bytes INTEGER NOT NULL,
        function_requests INTEGER NOT NULL,
        PRIMARY KEY (day, owner)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX usage_by_owner ON usage (owner, day);
    CREATE TABLE meters (
        sandbox TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        memory_mib INTEGER NOT NULL,
        up_ms INTEGER NOT NULL,
        cpu_us INTEGER,
        sent_bytes INTEGER
    ) STRICT;
    CREATE TABLE run (boot TEXT NOT NULL, wall_ms INTEGER NOT NULL, up_ms INTEGER NOT NULL) STRICT;
";
/// Number of days that are retained: the newest ones with usage. The time is not compared, because
/// a step of the host's clock must not remove days.
const MAX_DAYS: i64 = 400;
/// Maximum number of owners of one day. Usage of further owners is counted together.
const MAX_OWNERS: i64 = 10_000;

/// Columns of the usage of an owner, in the order in which rows are read.
const COLUMNS: &str = "day, owner, sandbox_ms, cpu_us, memory_mib_ms, stored_kib_s, \
    max_stored_bytes, sent_bytes, function_requests";
/// Maximum stored amount. Its sum with [`MAX_ADDED`] fits into a signed number of 64 bits: SQLite
/// would store a larger sum as an inexact number.
const MAX_SUM: u64 = 1 << 62;
/// Maximum amount that is added to a stored amount.
const MAX_ADDED: u64 = 1 << 61;
/// Statement that adds amounts to the stored ones.
const ADD: &str = "INSERT INTO usage VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)
    ON CONFLICT (day, owner) DO UPDATE SET
        sandbox_ms = min(sandbox_ms + excluded.sandbox_ms, ?10),
        cpu_us = min(cpu_us + excluded.cpu_us, ?10),
        memory_mib_ms = min(memory_mib_ms + excluded.memory_mib_ms, ?10),
        stored_kib_s = min(stored_kib_s + excluded.stored_kib_s, ?10),
        sent_bytes = min(sent_bytes + excluded.sent_bytes, ?10),
        function_requests = min(function_requests + excluded.function_requests, ?10),
        max_stored_bytes = max(max_stored_bytes, excluded.max_stored_bytes)";

/// Usage by day and owner.
pub(super) type UsageRows = BTreeMap<(Day, String), UsageAmounts>;

/// Content of a database that an earlier ledger wrote since the last boot of the host.
#[derive(Debug, Default)]
pub(super) struct EarlierLedger {
    pub clock: Option<UsageMoment>,
    pub meters: HashMap<String, Meter>,
}

/// Database of a ledger.
#[derive(Debug)]
pub(super) struct UsageDatabase {
    path: PathBuf,
    connection: Connection,
    /// Newest day for which older days were removed.
    pruned: Option<Day>,
}

impl UsageDatabase {
    /// Opens or creates the database. Also returns the meters and the clock that an earlier ledger
    /// wrote in the run of the host with the boot id `boot`.
    pub fn open(path: &Path, boot: &str) -> Result<(Self, EarlierLedger), UsageError> {
        let failed = |source| UsageError::Database {
            path: path.to_owned(),
            source,
        };
        restrict_to_owner(path).map_err(|source| UsageError::File {
            path: path.to_owned(),
            source,
        })?;
        let connection = Connection::open(path).map_err(failed)?;
        let version = prepare(&connection).map_err(failed)?;
        if version != SCHEMA_VERSION {
            return Err(UsageError::Version {
                path: path.to_owned(),
                version,
            });
        }
        let earlier = earlier(&connection, boot).map_err(failed)?;
        let database = Self {
            path: path.to_owned(),
            connection,
            pruned: None,
        };
        Ok((database, earlier))
    }

    /// Adds `rows`, and replaces the meters and the clock, in one transaction.
    pub fn write(
        &mut self,
        rows: &UsageRows,
        meters: &HashMap<String, Meter>,
        boot: &str,
        clock: UsageMoment,
    ) -> Result<(), UsageError> {
        let is_pruned = |day: Day| self.pruned.is_some_and(|pruned| day <= pruned);
        let newest = rows.keys().next_back().map(|(day, _)| *day);
        let new_day = newest.filter(|day| !is_pruned(*day));
        let path = self.path.clone();
        let failed = |source| UsageError::Database { path, source };
        let connection = &mut self.connection;
        let mut write = || -> rusqlite::Result<()> {
            let transaction = connection.transaction()?;
            add_rows(&transaction, rows)?;
            replace_meters(&transaction, meters)?;
            transaction.execute("DELETE FROM run", [])?;
            transaction.execute(
                "INSERT INTO run VALUES (?1, ?2, ?3)",
                params![boot, signed(clock.wall_ms), signed(clock.up_ms)],
            )?;
            if new_day.is_some() {
                remove_old_days(&transaction)?;
            }
            transaction.commit()
        };
        write().map_err(failed)?;
        self.pruned = new_day.or(self.pruned);
        Ok(())
    }

    /// Returns the first rows of a query.
    pub fn rows(&self, query: &UsageQuery) -> Result<UsageRows, UsageError> {
        let failed = |source| UsageError::Database {
            path: self.path.clone(),
            source,
        };
        let (after_day, after_owner) = match &query.after {
            Some((day, owner)) => (i64::from(day.0), owner.as_str()),
            None => (-1, ""),
        };
        let limit = i64::try_from(query.limit.saturating_add(1)).unwrap_or(i64::MAX);
        let read = || {
            let filter = match query.owner {
                Some(_) => "owner = ?6",
                None => "?6 IS NULL",
            };
            let mut statement = self.connection.prepare_cached(&format!(
                "SELECT {COLUMNS} FROM usage
                 WHERE day BETWEEN ?1 AND ?2 AND (day, owner) > (?3, ?4) AND {filter}
                 ORDER BY day, owner LIMIT ?5"
            ))?;
            let rows = statement.query_map(
                params![
                    query.from.0,
                    query.to.0,
                    after_day,
                    after_owner,
                    limit,
                    query.owner
                ],
                row,
            )?;
            rows.collect::<rusqlite::Result<UsageRows>>()
        };
        read().map_err(failed)
    }
}

/// Creates missing tables. Returns the version of the tables.
fn prepare(connection: &Connection) -> rusqlite::Result<i64> {
    connection.pragma_update(None, "journal_mode", "WAL")?;
    // A power failure may lose the newest transactions, but does not damage the file.
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    let version = |connection: &Connection| {
        connection.pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0))
    };
    if version(connection)? == 0 {
        let set = format!("BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;");
        connection.execute_batch(&set)?;
    }
    version(connection)
}

/// Reads the state of the meters that an earlier daemon of this boot has written.
fn earlier(connection: &Connection, boot: &str) -> rusqlite::Result<EarlierLedger> {
    let clock = connection
        .query_row(
            "SELECT wall_ms, up_ms FROM run WHERE boot = ?1 AND boot <> ''",
            [boot],
            |row| {
                Ok(UsageMoment {
                    wall_ms: unsigned(row, 0)?,
                    up_ms: unsigned(row, 1)?,
                })
            },
        )
        .optional()?;
    // After a restart of the host, no guest continues.
    if clock.is_none() {
        return Ok(EarlierLedger::default());
    }
    let mut statement = connection
        .prepare("SELECT sandbox, owner, memory_mib, up_ms, cpu_us, sent_bytes FROM meters")?;
    let meters = statement.query_map([], |row| {
        let meter = Meter {
            owner: row.get(1)?,
            memory_mib: row.get(2)?,
            up_ms: unsigned(row, 3)?,
            cpu_us: row.get::<_, Option<i64>>(4)?.map(i64::unsigned_abs),
            sent_bytes: row.get::<_, Option<i64>>(5)?.map(i64::unsigned_abs),
        };
        Ok((row.get(0)?, meter))
    })?;
    Ok(EarlierLedger {
        clock,
        meters: meters.collect::<rusqlite::Result<_>>()?,
    })
}

/// Adds amounts to the rows of their days and owners. Beyond [`MAX_OWNERS`] of a day, further
/// owners share one row.
fn add_rows(transaction: &Transaction<'_>, rows: &UsageRows) -> rusqlite::Result<()> {
    let mut add = transaction.prepare_cached(ADD)?;
    let mut exists =
        transaction.prepare_cached("SELECT 1 FROM usage WHERE day = ?1 AND owner = ?2")?;
    let mut count = transaction.prepare_cached("SELECT count(*) FROM usage WHERE day = ?1")?;
    // Number of owners of the day of the last row.
    let mut owners: Option<(Day, i64)> = None;
    for ((day, owner), amounts) in rows {
        let number = match owners {
            Some((counted, number)) if counted == *day => number,
            _ => count.query_row([day.0], |row| row.get(0))?,
        };
        let is_new = !exists.exists(params![day.0, owner])?;
        let is_full = is_new && number >= MAX_OWNERS;
        let owner = if is_full { OTHER_OWNERS } else { owner };
        owners = Some((*day, number + i64::from(is_new && !is_full)));
        add.execute(params![
            day.0,
            owner,
            signed(amounts.sandbox_ms),
            signed(amounts.cpu_us),
            signed(amounts.memory_mib_ms),
            signed(amounts.stored_kib_s),
            signed(amounts.max_stored_bytes),
            signed(amounts.sent_bytes),
            signed(amounts.function_requests),
            MAX_SUM.cast_signed(),
        ])?;
    }
    Ok(())
}

/// Replaces the stored meters, which continue the measurement after a restart.
fn replace_meters(
    transaction: &Transaction<'_>,
    meters: &HashMap<String, Meter>,
) -> rusqlite::Result<()> {
    transaction.execute("DELETE FROM meters", [])?;
    let mut insert =
        transaction.prepare_cached("INSERT INTO meters VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?;
    for (sandbox, meter) in meters {
        insert.execute(params![
            sandbox,
            meter.owner,
            meter.memory_mib,
            signed(meter.up_ms),
            meter.cpu_us.map(signed),
            meter.sent_bytes.map(signed),
        ])?;
    }
    Ok(())
}

/// Removes all but the newest [`MAX_DAYS`] days that have usage.
fn remove_old_days(transaction: &Transaction<'_>) -> rusqlite::Result<()> {
    let newest = "SELECT DISTINCT day FROM usage ORDER BY day DESC LIMIT 1 OFFSET ?1";
    let removed: Option<i64> = transaction
        .query_row(newest, [MAX_DAYS], |row| row.get(0))
        .optional()?;
    if let Some(day) = removed {
        transaction.execute("DELETE FROM usage WHERE day <= ?1", [day])?;
    }
    Ok(())
}

/// Reads a row with the columns [`COLUMNS`].
fn row(row: &Row<'_>) -> rusqlite::Result<((Day, String), UsageAmounts)> {
    let amounts = UsageAmounts {
        sandbox_ms: unsigned(row, 2)?,
        cpu_us: unsigned(row, 3)?,
        memory_mib_ms: unsigned(row, 4)?,
        stored_kib_s: unsigned(row, 5)?,
        max_stored_bytes: unsigned(row, 6)?,
        sent_bytes: unsigned(row, 7)?,
        function_requests: unsigned(row, 8)?,
    };
    Ok(((Day(row.get(0)?), row.get(1)?), amounts))
}

/// Returns an amount as SQLite stores it.
fn signed(amount: u64) -> i64 {
    amount.min(MAX_ADDED).cast_signed()
}

fn unsigned(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    Ok(u64::try_from(row.get::<_, i64>(column)?).unwrap_or(0))
}
