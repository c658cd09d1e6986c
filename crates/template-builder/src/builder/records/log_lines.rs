//! Log lines of builds in the builder's database.
//!
//! Clients read the log of a build page by page while the build runs, and afterwards.

use super::{BuildRecords, RecordError, from_sql, to_sql};
use jiffy_engine_api::now_ms;
use rusqlite::{Row, params};

/// Maximum number of stored lines of one build. `BuildLog` replaces the next line by a warning and
/// drops all later lines.
pub const MAX_LOG_LINES: u64 = 50_000;
/// Maximum length of a line in bytes.
const MAX_LOG_LINE_BYTES: usize = 4096;

/// Severity of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// Details and phases of imports and image writes.
    Debug,
    /// Steps, and the output of their programs.
    Info,
    /// Warning to the author.
    Warn,
    /// Failure.
    Error,
}

impl LogLevel {
    /// Returns the name in the database and the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
        }
    }

    /// Returns the level with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        let all = [Self::Debug, Self::Info, Self::Warn, Self::Error];
        all.into_iter().find(|l| l.name() == name)
    }
}

/// Line of a build's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    /// Number from 0.
    pub number: u64,
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// Severity.
    pub level: LogLevel,
    /// Step of the line, as in [`FailureReason::step`](super::FailureReason::step).
    pub step: Option<String>,
    /// Text.
    pub message: String,
}

/// First line of a selection.
#[derive(Debug, Clone, Copy)]
pub enum LogPosition {
    /// Line number.
    Number(u64),
    /// Time in milliseconds since 1970.
    Moment(u64),
}

/// Selection of log lines.
#[derive(Debug, Clone, Copy)]
pub struct LogQuery {
    /// First line.
    pub from: LogPosition,
    /// Maximum number of lines.
    pub limit: usize,
    /// Descending order.
    pub backwards: bool,
    /// Minimum severity.
    pub level: LogLevel,
}

impl BuildRecords {
    /// Inserts a line.
    pub fn insert_log_line(
        &self,
        build: &str,
        number: u64,
        level: LogLevel,
        step: Option<&str>,
        message: &str,
    ) -> Result<(), RecordError> {
        let message = clean(message);
        self.with_connection(|c| {
            let insert = "INSERT OR IGNORE INTO lines (build, number, at_ms, level, step, message)
                VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
            let at = to_sql(now_ms());
            c.prepare_cached(insert)?
                .execute(params![
                    build,
                    to_sql(number),
                    at,
                    level.name(),
                    step,
                    message
                ])
                .map(drop)
        })
    }

    /// Returns lines of a build's log.
    pub fn log_lines(&self, build: &str, which: LogQuery) -> Result<Vec<LogLine>, RecordError> {
        let order = if which.backwards { "DESC" } else { "ASC" };
        let compare = if which.backwards { "<=" } else { ">=" };
        let (column, from) = match which.from {
            LogPosition::Number(number) => ("number", number),
            LogPosition::Moment(at_ms) => ("at_ms", at_ms),
        };
        // The order of the numbers after THEN is the order of `LogLevel`.
        let query = format!(
            "SELECT number, at_ms, level, step, message FROM lines
             WHERE build = ?1 AND {column} {compare} ?2
             AND CASE level WHEN 'debug' THEN 0 WHEN 'info' THEN 1 WHEN 'warn' THEN 2 ELSE 3 END >= ?4
             ORDER BY number {order} LIMIT ?3"
        );
        self.with_connection(|c| {
            let limit = i64::try_from(which.limit).unwrap_or(i64::MAX);
            c.prepare_cached(&query)?
                .query_map(
                    params![build, to_sql(from), limit, which.level as i64],
                    line,
                )?
                .collect()
        })
    }
}

/// Decodes a row of [`BuildRecords::log_lines`].
fn line(row: &Row<'_>) -> rusqlite::Result<LogLine> {
    let level: String = row.get(2)?;
    Ok(LogLine {
        number: from_sql(row.get(0)?),
        at_ms: from_sql(row.get(1)?),
        level: LogLevel::from_name(&level).unwrap_or(LogLevel::Info),
        step: row.get(3)?,
        message: row.get(4)?,
    })
}

/// Replaces control characters except tabs and escape sequences of terminals, and truncates the
/// text.
fn clean(message: &str) -> String {
    let shown = |c: char| {
        if c.is_control() && c != '\t' && c != '\u{1b}' {
            ' '
        } else {
            c
        }
    };
    let mut text: String = message.chars().map(shown).collect();
    if text.len() > MAX_LOG_LINE_BYTES {
        let mut end = MAX_LOG_LINE_BYTES;
        // A character has at most four bytes.
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
    text
}
