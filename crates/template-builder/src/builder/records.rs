//! What the builder knows, in `<home>/builds.db`: templates that were built here, their builds, and what those said.

use super::ended::Unwritten;
use jiffy_image::DEFAULT_TAG;
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

const VERSION: i64 = 2;
/// Most lines that are kept of one build; what it says after them is counted, and not kept.
pub const MAX_LINES: u64 = 50_000;
/// Longest line, in bytes.
const MAX_LINE: usize = 4096;

/// Schema of version 1. Later versions are made from it by [`MIGRATIONS`], also in a new file.
const TABLES: &str = "
    CREATE TABLE templates (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        owner TEXT,
        public INTEGER NOT NULL DEFAULT 0,
        created_ms INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE builds (
        id TEXT PRIMARY KEY,
        template TEXT NOT NULL REFERENCES templates (id) ON DELETE CASCADE,
        tags TEXT NOT NULL,
        size TEXT NOT NULL,
        status TEXT NOT NULL,
        reason TEXT,
        steps TEXT NOT NULL DEFAULT '[]',
        version TEXT,
        created_ms INTEGER NOT NULL,
        changed_ms INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX builds_of ON builds (template, created_ms);
    CREATE TABLE lines (
        build TEXT NOT NULL REFERENCES builds (id) ON DELETE CASCADE,
        number INTEGER NOT NULL,
        at_ms INTEGER NOT NULL,
        level TEXT NOT NULL,
        step TEXT,
        message TEXT NOT NULL,
        PRIMARY KEY (build, number)
    ) STRICT, WITHOUT ROWID;
";
/// Schema changes; the first makes version 2 from version 1, and so on. Foreign keys are not
/// enforced meanwhile: a table that is made anew would take the rows that refer to it along.
const MIGRATIONS: &[&str] = &["
    CREATE TABLE templates_2 (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        owner TEXT,
        public INTEGER NOT NULL DEFAULT 0,
        created_ms INTEGER NOT NULL
    ) STRICT;
    INSERT INTO templates_2 SELECT id, name, owner, public, created_ms FROM templates ORDER BY rowid;
    DROP TABLE templates;
    ALTER TABLE templates_2 RENAME TO templates;
    CREATE UNIQUE INDEX templates_by_name ON templates (ifnull(owner, ''), name);
    ALTER TABLE builds ADD COLUMN caller TEXT;
    CREATE INDEX builds_by_status ON builds (status, created_ms);
    CREATE TABLE migrations (name TEXT PRIMARY KEY) STRICT, WITHOUT ROWID;
"];
const BUILD: &str =
    "id, template, tags, size, status, reason, steps, version, created_ms, changed_ms, caller";
const TEMPLATE: &str = "id, name, owner, public, created_ms";

/// Why the records cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// SQLite says no.
    #[error("the builds in {} cannot be used: {source}; check that the disk is writable and not full", path.display())]
    Database {
        /// The file.
        path: PathBuf,
        /// Why.
        source: rusqlite::Error,
    },
    /// From another version.
    #[error("{} has version {found}, and this program reads version {VERSION}: use the version of jiffy that wrote it, or move it away", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// What it says.
        found: i64,
    },
}

/// A template that was built here, or is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateRecord {
    /// Letters and digits.
    pub id: String,
    /// By which it is found, without a tag.
    pub name: String,
    /// API key in whose namespace its name is; none: the owner of this host.
    pub owner: Option<String>,
    /// Visible to every key when it is built for the first time; from then on its manifest says.
    pub public: bool,
    /// Milliseconds since 1970.
    pub created_ms: u64,
}

impl TemplateRecord {
    /// `[owner/]name[:tag]`, by which the image store finds it.
    pub fn called(&self, tag: &str) -> String {
        let owner = self.owner.as_ref();
        let owner = owner.map_or_else(String::new, |owner| format!("{owner}/"));
        match tag {
            DEFAULT_TAG => format!("{owner}{}", self.name),
            tag => format!("{owner}{}:{tag}", self.name),
        }
    }
}

/// What its sandboxes get, as far as its author said.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WantedSize {
    /// Virtual CPUs.
    pub vcpus: Option<u8>,
    /// Memory in MiB.
    pub memory_mib: Option<u32>,
    /// Free space on the writable disk in MiB.
    pub disk_mib: Option<u64>,
}

/// Where a build is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Not begun: its files are still to come, or others build.
    Waiting,
    /// Under way.
    Building,
    /// There is a template.
    Ready,
    /// There is none.
    Error,
}

impl Status {
    /// One word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Building => "building",
            Self::Ready => "ready",
            Self::Error => "error",
        }
    }

    /// Whether it is over.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Ready | Self::Error)
    }

    fn from_name(name: &str) -> Self {
        let all = [Self::Waiting, Self::Building, Self::Ready];
        let found = all.into_iter().find(|s| s.name() == name);
        found.unwrap_or(Self::Error)
    }
}

/// Why a build failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// What failed, on what, and what to do.
    pub message: String,
    /// Number of the step that failed, from 1, or `base` or `finalize`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
}

/// A build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildRecord {
    /// A UUID.
    pub id: String,
    /// Template it is of.
    pub template: String,
    /// API key that asked for it; none: the owner of this host. Its sandboxes are this key's, and
    /// count for it.
    pub caller: Option<String>,
    /// Tags it gets.
    pub tags: Vec<String>,
    /// What its sandboxes get.
    pub size: WantedSize,
    /// Where it is.
    pub status: Status,
    /// Why it failed, if it did.
    pub reason: Option<Reason>,
    /// Keys of the steps it is made of.
    pub steps: Vec<String>,
    /// What it became.
    pub version: Option<String>,
    /// Milliseconds since 1970.
    pub created_ms: u64,
    /// When its status changed last, in milliseconds since 1970.
    pub changed_ms: u64,
}

/// How much a line matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// What programs wrote to their standard output, and details.
    Debug,
    /// What happens.
    Info,
    /// What its author should know.
    Warn,
    /// What went wrong.
    Error,
}

impl Level {
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
pub struct Line {
    /// From 0.
    pub number: u64,
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// How much it matters.
    pub level: Level,
    /// Step it belongs to, as in [`Reason::step`].
    pub step: Option<String>,
    /// What it says.
    pub message: String,
}

/// Which lines are wanted.
#[derive(Debug, Clone, Copy)]
pub struct Lines {
    /// From this one on.
    pub from: u64,
    /// At most so many.
    pub limit: usize,
    /// Backwards.
    pub backwards: bool,
    /// Those that matter at least so much.
    pub level: Level,
}

/// The records.
pub struct Records {
    path: PathBuf,
    connection: Mutex<Connection>,
    pub(super) unwritten: Unwritten,
}

impl Records {
    /// Opens or creates `<home>/builds.db`.
    pub fn open(home: &Path) -> Result<Self, RecordError> {
        let path = home.join("builds.db");
        let failed = |source| RecordError::Database {
            path: path.clone(),
            source,
        };
        // What stands in the way is told by the database.
        let _ = jiffy_image::keep_private(&path);
        let connection = Connection::open(&path).map_err(failed)?;
        let prepared = connection
            .pragma_update(None, "journal_mode", "WAL")
            .and_then(|()| connection.pragma_update(None, "synchronous", "NORMAL"))
            .and_then(|()| connection.pragma_update(None, "foreign_keys", false));
        prepared.map_err(failed)?;
        let found: i64 = connection
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .map_err(failed)?;
        if !(0..=VERSION).contains(&found) {
            return Err(RecordError::Version { path, found });
        }
        migrate(&connection, found).map_err(failed)?;
        connection
            .pragma_update(None, "foreign_keys", true)
            .map_err(failed)?;
        connection
            .execute_batch(super::steps::TABLE)
            .map_err(failed)?;
        Ok(Self {
            path,
            connection: Mutex::new(connection),
            unwritten: Unwritten::default(),
        })
    }

    pub(super) fn with<T>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, RecordError> {
        let connection: MutexGuard<'_, Connection> = self
            .connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        work(&connection).map_err(|source| RecordError::Database {
            path: self.path.clone(),
            source,
        })
    }

    /// All templates, the oldest first.
    pub fn templates(&self) -> Result<Vec<TemplateRecord>, RecordError> {
        let query = format!("SELECT {TEMPLATE} FROM templates ORDER BY rowid");
        self.with(|c| c.prepare_cached(&query)?.query_map([], template)?.collect())
    }

    /// The template with this id.
    pub fn template(&self, id: &str) -> Result<Option<TemplateRecord>, RecordError> {
        let query = format!("SELECT {TEMPLATE} FROM templates WHERE id = ?1");
        self.with(|c| {
            let mut query = c.prepare_cached(&query)?;
            query.query_row([id], template).optional()
        })
    }

    /// The template of this name in the namespace of `owner`; none: of the host's owner.
    pub fn named(
        &self,
        owner: Option<&str>,
        name: &str,
    ) -> Result<Option<TemplateRecord>, RecordError> {
        let query =
            format!("SELECT {TEMPLATE} FROM templates WHERE ifnull(owner, '') = ?1 AND name = ?2");
        self.with(|c| {
            let mut query = c.prepare_cached(&query)?;
            let found = query.query_row([owner.unwrap_or_default(), name], template);
            found.optional()
        })
    }

    /// Enters a template unless its owner has one of its name; returns the one there is.
    pub fn enter_template(&self, new: &TemplateRecord) -> Result<TemplateRecord, RecordError> {
        self.with(|c| {
            let insert = "INSERT OR IGNORE INTO templates (id, name, owner, public, created_ms)
                VALUES (?1, ?2, ?3, ?4, ?5)";
            let created = stored(new.created_ms);
            c.execute(
                insert,
                params![new.id, new.name, new.owner, new.public, created],
            )
        })?;
        let found = self.named(new.owner.as_deref(), &new.name)?;
        Ok(found.unwrap_or_else(|| new.clone()))
    }

    /// Gives a template to the host's owner, with its name.
    pub(super) fn give_to_host(&self, id: &str) -> Result<(), RecordError> {
        let change = "UPDATE templates SET owner = NULL WHERE id = ?1";
        self.with(|c| c.execute(change, [id]).map(drop))
    }

    /// Shows a template to everybody, or only to its owner.
    pub fn set_public(&self, id: &str, public: bool) -> Result<(), RecordError> {
        self.with(|c| {
            c.execute(
                "UPDATE templates SET public = ?2 WHERE id = ?1",
                params![id, public],
            )
            .map(drop)
        })
    }

    /// Forgets a template with its builds.
    pub fn forget_template(&self, id: &str) -> Result<(), RecordError> {
        self.with(|c| {
            c.execute("DELETE FROM templates WHERE id = ?1", [id])
                .map(drop)
        })
    }

    /// Enters a build.
    pub fn enter_build(&self, b: &BuildRecord) -> Result<(), RecordError> {
        self.with(|c| {
            c.execute(
                "INSERT INTO builds (id, template, tags, size, status, created_ms, changed_ms, caller)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
                params![
                    b.id,
                    b.template,
                    json(&b.tags),
                    json(&b.size),
                    b.status.name(),
                    stored(b.created_ms),
                    stored(b.changed_ms),
                    b.caller
                ],
            )
            .map(drop)
        })
    }

    /// One build.
    pub fn build(&self, id: &str) -> Result<Option<BuildRecord>, RecordError> {
        let query = format!("SELECT {BUILD} FROM builds WHERE id = ?1");
        let found = self.with(|c| c.prepare_cached(&query)?.query_row([id], build).optional())?;
        Ok(found.map(|build| self.unwritten.applied(build)))
    }

    /// The builds of a template, the newest first.
    pub fn builds(&self, template: &str) -> Result<Vec<BuildRecord>, RecordError> {
        let query = format!(
            "SELECT {BUILD} FROM builds WHERE template = ?1 ORDER BY created_ms DESC, rowid DESC LIMIT 1000"
        );
        let found: Vec<BuildRecord> = self.with(|c| {
            c.prepare_cached(&query)?
                .query_map([template], build)?
                .collect()
        })?;
        let applied = |build| self.unwritten.applied(build);
        Ok(found.into_iter().map(applied).collect())
    }

    /// Moves a build on from `from`; false if it was not there.
    pub fn move_on(&self, id: &str, from: Status, to: Status) -> Result<bool, RecordError> {
        self.with(|c| {
            let change =
                "UPDATE builds SET status = ?3, changed_ms = ?4 WHERE id = ?1 AND status = ?2";
            let now = stored(now_ms());
            Ok(c.execute(change, params![id, from.name(), to.name(), now])? == 1)
        })
    }

    /// Ends a build as ready.
    pub fn succeed(&self, id: &str, steps: &[String], version: &str) -> Result<(), RecordError> {
        self.with(|c| {
            let change = "UPDATE builds SET status = 'ready', steps = ?2, version = ?3, changed_ms = ?4 WHERE id = ?1";
            c.execute(change, params![id, json(&steps), version, stored(now_ms())])
                .map(drop)
        })
    }

    /// Ends a build that is not over.
    pub fn fail(&self, id: &str, reason: &Reason) -> Result<(), RecordError> {
        self.with(|c| {
            let change = "UPDATE builds SET status = 'error', reason = ?2, changed_ms = ?3
                WHERE id = ?1 AND status NOT IN ('ready', 'error')";
            c.execute(change, params![id, json(reason), stored(now_ms())])
                .map(drop)
        })
    }

    /// Moves tags of a template from whichever of its builds have them to `build`.
    pub fn retag(
        &self,
        template: &str,
        build: Option<&str>,
        tags: &[String],
    ) -> Result<(), RecordError> {
        for mut other in self.builds(template)? {
            let before = other.tags.clone();
            other.tags.retain(|t| !tags.contains(t));
            if build == Some(other.id.as_str()) {
                other.tags.extend(tags.iter().cloned());
            }
            if other.tags != before {
                self.set_tags(&other.id, &other.tags)?;
            }
        }
        Ok(())
    }

    /// Which tags a build has from here on.
    pub fn set_tags(&self, build: &str, tags: &[String]) -> Result<(), RecordError> {
        self.with(|c| {
            let change = "UPDATE builds SET tags = ?2 WHERE id = ?1";
            c.execute(change, params![build, json(&tags)]).map(drop)
        })
    }

    /// Ends every build that is not over: whoever carried them out is gone. Returns how many there were.
    pub fn abandon(&self, reason: &Reason) -> Result<usize, RecordError> {
        self.with(|c| {
            let change = "UPDATE builds SET status = 'error', reason = ?1, changed_ms = ?2
                WHERE status NOT IN ('ready', 'error')";
            c.execute(change, params![json(reason), stored(now_ms())])
        })
    }

    /// Writes down a line.
    pub fn say(
        &self,
        build: &str,
        number: u64,
        level: Level,
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
    pub fn lines(&self, build: &str, which: Lines) -> Result<Vec<Line>, RecordError> {
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

/// Makes the newest schema of version `found`; 0: of nothing.
fn migrate(connection: &Connection, found: i64) -> rusqlite::Result<()> {
    let mut version = found;
    while version < VERSION {
        let change = match version {
            0 => TABLES,
            // Never out of bounds: there is one change for each version.
            n => usize::try_from(n - 1).map_or("", |n| MIGRATIONS.get(n).copied().unwrap_or("")),
        };
        version += 1;
        connection.execute_batch(&format!(
            "BEGIN IMMEDIATE; {change} PRAGMA user_version = {version}; COMMIT;"
        ))?;
    }
    Ok(())
}

fn template(row: &Row<'_>) -> rusqlite::Result<TemplateRecord> {
    Ok(TemplateRecord {
        id: row.get(0)?,
        name: row.get(1)?,
        owner: row.get(2)?,
        public: row.get(3)?,
        created_ms: loaded(row.get(4)?),
    })
}

fn build(row: &Row<'_>) -> rusqlite::Result<BuildRecord> {
    let text = |column| row.get::<_, String>(column);
    let reason: Option<String> = row.get(5)?;
    Ok(BuildRecord {
        id: row.get(0)?,
        template: row.get(1)?,
        tags: serde_json::from_str(&text(2)?).unwrap_or_default(),
        size: serde_json::from_str(&text(3)?).unwrap_or_default(),
        status: Status::from_name(&text(4)?),
        reason: reason.and_then(|r| serde_json::from_str(&r).ok()),
        steps: serde_json::from_str(&text(6)?).unwrap_or_default(),
        version: row.get(7)?,
        created_ms: loaded(row.get(8)?),
        changed_ms: loaded(row.get(9)?),
        caller: row.get(10)?,
    })
}

fn line(row: &Row<'_>) -> rusqlite::Result<Line> {
    let level: String = row.get(2)?;
    Ok(Line {
        number: loaded(row.get(0)?),
        at_ms: loaded(row.get(1)?),
        level: Level::from_name(&level).unwrap_or(Level::Info),
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
    if text.len() > MAX_LINE {
        let mut end = MAX_LINE;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
    text
}

fn json<T: Serialize + ?Sized>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

pub(super) fn stored(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

pub(super) fn loaded(n: i64) -> u64 {
    u64::try_from(n).unwrap_or_default()
}

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests;
