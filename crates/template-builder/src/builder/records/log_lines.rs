//! Log lines of builds.

use super::{BuildRecords, RecordError, loaded, now_ms, stored};
use rusqlite::{Row, params};

/// Most lines that are kept of one build; what it says after them is counted, and not kept.
pub const MAX_LOG_LINES: u64 = 50_000;
/// Longest line, in bytes.
const MAX_LOG_LINE_BYTES: usize = 4096;

/// How much a line matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// What programs wrote to their standard output, and details.
    Debug,
    /// What happens.
    Info,
    /// What its author should know.
    Warn,
    /// What went wrong.
    Error,
}

impl LogLevel {
    /// One word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
        }
    }

    /// The level of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        let all = [Self::Debug, Self::Info, Self::Warn, Self::Error];
        all.into_iter().find(|l| l.name() == name)
    }
}

/// A line that a build said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    /// From 0.
    pub number: u64,
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// How much it matters.
    pub level: LogLevel,
    /// Step it belongs to, as in [`FailureReason::step`].
    pub step: Option<String>,
    /// What it says.
    pub message: String,
}

/// Which lines are wanted.
#[derive(Debug, Clone, Copy)]
pub struct LogQuery {
    /// From this one on.
    pub from: u64,
    /// At most so many.
    pub limit: usize,
    /// Backwards.
    pub backwards: bool,
    /// Those that matter at least so much.
    pub level: LogLevel,
}

impl BuildRecords {
    /// Writes down a line.
    pub fn say(
        &self,
        build: &str,
        number: u64,
        level: LogLevel,
        step: Option<&str>,
        message: &str,
    ) -> Result<(), RecordError> {
        let message = clean(message);
        self.with(|c| {
            let insert = "INSERT OR IGNORE INTO lines (build, number, at_ms, level, step, message)
                VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
            let at = stored(now_ms());
            c.prepare_cached(insert)?
                .execute(params![
                    build,
                    stored(number),
                    at,
                    level.name(),
                    step,
                    message
                ])
                .map(drop)
        })
    }

    /// Lines of a build.
    pub fn lines(&self, build: &str, which: LogQuery) -> Result<Vec<LogLine>, RecordError> {
        let order = if which.backwards { "DESC" } else { "ASC" };
        let compare = if which.backwards { "<=" } else { ">=" };
        let query = format!(
            "SELECT number, at_ms, level, step, message FROM lines
             WHERE build = ?1 AND number {compare} ?2
             AND CASE level WHEN 'debug' THEN 0 WHEN 'info' THEN 1 WHEN 'warn' THEN 2 ELSE 3 END >= ?4
             ORDER BY number {order} LIMIT ?3"
        );
        self.with(|c| {
            let limit = i64::try_from(which.limit).unwrap_or(i64::MAX);
            c.prepare_cached(&query)?
                .query_map(
                    params![build, stored(which.from), limit, which.level as i64],
                    line,
                )?
                .collect()
        })
    }
}

fn line(row: &Row<'_>) -> rusqlite::Result<LogLine> {
    let level: String = row.get(2)?;
    Ok(LogLine {
        number: loaded(row.get(0)?),
        at_ms: loaded(row.get(1)?),
        level: LogLevel::from_name(&level).unwrap_or(LogLevel::Info),
        step: row.get(3)?,
        message: row.get(4)?,
    })
}

/// What people can read of a line: no control characters, and not too long.
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
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
    text
}
