//! Records of builds in the builder's database.
//!
//! A *permit* counts towards a limit until it is dropped.
//!
//! The database has templates, builds, their log lines and the uses of cached steps. It continues
//! to exist after a restart of the daemon.

use super::{BuildRecords, RecordError, from_sql, json, to_sql};
use jiffy_engine_api::now_ms;
use rusqlite::{OptionalExtension, Row, params};
use serde::{Deserialize, Serialize};

/// Columns that [`build`] decodes, in this order.
const BUILD_COLUMNS: &str =
    "id, template, tags, size, status, reason, steps, version, created_ms, changed_ms, caller";

/// Requested size of sandboxes. A field that is `None` defaults to the base's size.
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

/// Status of a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BuildStatus {
    /// Waiting for the files, for the start, or, if started, for a permit or another build.
    Waiting,
    /// Running.
    Building,
    /// The template exists.
    Ready,
    /// Failed.
    Error,
}

impl BuildStatus {
    /// Returns the name in the database and the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Building => "building",
            Self::Ready => "ready",
            Self::Error => "error",
        }
    }

    /// Returns whether the build has finished.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Ready | Self::Error)
    }

    /// Returns the status with this name. An unknown name counts as failed.
    fn from_name(name: &str) -> Self {
        let all = [Self::Waiting, Self::Building, Self::Ready];
        let found = all.into_iter().find(|s| s.name() == name);
        found.unwrap_or(Self::Error)
    }
}

/// Cause of a failed build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureReason {
    /// Message with the failure, its object and a remedy.
    pub message: String,
    /// Number of the failed step, from 1, or `base` or `finalize`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
}

/// Record of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildRecord {
    /// A UUID.
    pub id: String,
    /// Id of its template.
    pub template: String,
    /// Key that requested the build, and that owns the sandboxes in which the steps run. `None` for
    /// the host's owner.
    pub caller: Option<String>,
    /// Requested tags. For a ready build, the tags that refer to this build now.
    pub tags: Vec<String>,
    /// Requested size of the build's sandboxes and of the template's sandboxes.
    pub size: WantedSize,
    /// Current status.
    pub status: BuildStatus,
    /// Cause of a failure.
    pub reason: Option<FailureReason>,
    /// Keys of its steps.
    pub steps: Vec<String>,
    /// Version of the finished template.
    pub version: Option<String>,
    /// Milliseconds since 1970.
    pub created_ms: u64,
    /// Time of the last change of status, in milliseconds since 1970.
    pub changed_ms: u64,
}

impl BuildRecords {
    /// Inserts a build.
    pub fn insert_build(&self, b: &BuildRecord) -> Result<(), RecordError> {
        self.with_connection(|c| {
            c.execute(
                "INSERT INTO builds (id, template, tags, size, status, created_ms, changed_ms, caller)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
                params![
                    b.id,
                    b.template,
                    json(&b.tags),
                    json(&b.size),
                    b.status.name(),
                    to_sql(b.created_ms),
                    to_sql(b.changed_ms),
                    b.caller
                ],
            )
            .map(drop)
        })
    }

    /// Returns the build with this id.
    pub fn build(&self, id: &str) -> Result<Option<BuildRecord>, RecordError> {
        let query = format!("SELECT {BUILD_COLUMNS} FROM builds WHERE id = ?1");
        let found =
            self.with_connection(|c| c.prepare_cached(&query)?.query_row([id], build).optional())?;
        // The result of a finished build may not be in the database yet.
        Ok(found.map(|build| self.pending_ends.apply(build)))
    }

    /// Returns the builds of a template, newest first, at most 1000.
    pub fn builds(&self, template: &str) -> Result<Vec<BuildRecord>, RecordError> {
        let query = format!(
            "SELECT {BUILD_COLUMNS} FROM builds WHERE template = ?1 ORDER BY created_ms DESC, rowid DESC LIMIT 1000"
        );
        let found: Vec<BuildRecord> = self.with_connection(|c| {
            c.prepare_cached(&query)?
                .query_map([template], build)?
                .collect()
        })?;
        let applied = |build| self.pending_ends.apply(build);
        Ok(found.into_iter().map(applied).collect())
    }

    /// Changes the status of a build from `from` to `to`. Returns false if the status was not
    /// `from`.
    pub fn transition(
        &self,
        id: &str,
        from: BuildStatus,
        to: BuildStatus,
    ) -> Result<bool, RecordError> {
        self.with_connection(|c| {
            let change =
                "UPDATE builds SET status = ?3, changed_ms = ?4 WHERE id = ?1 AND status = ?2";
            let now = to_sql(now_ms());
            Ok(c.execute(change, params![id, from.name(), to.name(), now])? == 1)
        })
    }

    /// Marks a build as ready.
    pub fn set_ready(&self, id: &str, steps: &[String], version: &str) -> Result<(), RecordError> {
        self.with_connection(|c| {
            let change = "UPDATE builds SET status = 'ready', steps = ?2, version = ?3, changed_ms = ?4 WHERE id = ?1";
            c.execute(change, params![id, json(&steps), version, to_sql(now_ms())])
                .map(drop)
        })
    }

    /// Marks a build as failed, unless it has finished.
    pub fn set_failed(&self, id: &str, reason: &FailureReason) -> Result<(), RecordError> {
        self.with_connection(|c| {
            let change = "UPDATE builds SET status = 'error', reason = ?2, changed_ms = ?3
                WHERE id = ?1 AND status NOT IN ('ready', 'error')";
            c.execute(change, params![id, json(reason), to_sql(now_ms())])
                .map(drop)
        })
    }

    /// Moves tags from other builds of a template to `build`. If `build` is `None`, removes the
    /// tags. Unfinished builds retain the tags that they requested.
    pub fn retag(
        &self,
        template: &str,
        build: Option<&str>,
        tags: &[String],
    ) -> Result<(), RecordError> {
        for mut other in self.builds(template)? {
            let before = other.tags.clone();
            let is_target = build == Some(other.id.as_str());
            if is_target || other.status.is_final() {
                other.tags.retain(|t| !tags.contains(t));
            }
            if is_target {
                other.tags.extend(tags.iter().cloned());
            }
            if other.tags != before {
                self.set_tags(&other.id, &other.tags)?;
            }
        }
        Ok(())
    }

    /// Replaces the tags of a build.
    pub fn set_tags(&self, build: &str, tags: &[String]) -> Result<(), RecordError> {
        self.with_connection(|c| {
            let change = "UPDATE builds SET tags = ?2 WHERE id = ?1";
            c.execute(change, params![build, json(&tags)]).map(drop)
        })
    }

    /// Marks every unfinished build as failed, after a restart of the daemon. Returns their number.
    pub fn fail_unfinished(&self, reason: &FailureReason) -> Result<usize, RecordError> {
        self.with_connection(|c| {
            let change = "UPDATE builds SET status = 'error', reason = ?1, changed_ms = ?2
                WHERE status NOT IN ('ready', 'error')";
            c.execute(change, params![json(reason), to_sql(now_ms())])
        })
    }

    /// Returns the number of waiting and running builds of `caller`.
    pub(in crate::builder) fn unfinished_builds(&self, caller: &str) -> Result<u64, RecordError> {
        self.with_connection(|c| {
            let query = "SELECT count(*) FROM builds
                WHERE caller = ?1 AND status NOT IN ('ready', 'error')";
            let count: i64 = c
                .prepare_cached(query)?
                .query_row([caller], |row| row.get(0))?;
            Ok(u64::try_from(count).unwrap_or(0))
        })
    }

    /// Returns the ids of waiting builds that `caller` requested. `None` stands for the host's
    /// owner.
    pub(in crate::builder) fn waiting_of(
        &self,
        caller: Option<&str>,
    ) -> Result<Vec<String>, RecordError> {
        let query = "SELECT id FROM builds WHERE status = 'waiting' AND caller IS ?1";
        self.with_connection(|c| {
            let mut query = c.prepare_cached(query)?;
            query.query_map([caller], |row| row.get(0))?.collect()
        })
    }

    /// Returns the ids of waiting builds that were created before `before_ms`.
    pub(in crate::builder) fn waiting_before(
        &self,
        before_ms: u64,
    ) -> Result<Vec<String>, RecordError> {
        let query = "SELECT id FROM builds WHERE status = 'waiting' AND created_ms < ?1";
        self.with_connection(|c| {
            let mut query = c.prepare_cached(query)?;
            let ids = query.query_map([to_sql(before_ms)], |row| row.get(0));
            ids?.collect()
        })
    }

    /// Deletes the failed builds of `caller` except for the newest `keep`, and templates without
    /// builds. The caller must hold `names_lock`: [`Builder::request`](crate::Builder::request)
    /// inserts a new template before its build.
    pub(in crate::builder) fn gc_failed(
        &self,
        caller: Option<&str>,
        keep: usize,
    ) -> Result<(), RecordError> {
        // SQLite requires a LIMIT before an OFFSET: -1 means no limit. `IS` compares like `=`, but
        // NULL equals NULL.
        let builds = "DELETE FROM builds WHERE id IN (
            SELECT id FROM builds WHERE status = 'error' AND caller IS ?1
            ORDER BY changed_ms DESC, rowid DESC LIMIT -1 OFFSET ?2)";
        let templates = "DELETE FROM templates WHERE id NOT IN (SELECT template FROM builds)";
        self.with_connection(|c| {
            let keep = i64::try_from(keep).unwrap_or(i64::MAX);
            if c.execute(builds, params![caller, keep])? > 0 {
                c.execute(templates, [])?;
            }
            Ok(())
        })
    }

    /// Returns the start of the earliest running build, in milliseconds since 1970.
    pub(in crate::builder) fn building_since(&self) -> Result<Option<u64>, RecordError> {
        self.with_connection(|c| {
            let query = "SELECT min(changed_ms) FROM builds WHERE status = 'building'";
            let first: Option<i64> = c.query_row(query, [], |row| row.get(0))?;
            Ok(first.map(from_sql))
        })
    }
}

/// Decodes a row with [`BUILD_COLUMNS`]. Damaged JSON is replaced by the default.
fn build(row: &Row<'_>) -> rusqlite::Result<BuildRecord> {
    // The indices are positions in `BUILD_COLUMNS`.
    let text = |column| row.get::<_, String>(column);
    let reason: Option<String> = row.get(5)?;
    Ok(BuildRecord {
        id: row.get(0)?,
        template: row.get(1)?,
        tags: serde_json::from_str(&text(2)?).unwrap_or_default(),
        size: serde_json::from_str(&text(3)?).unwrap_or_default(),
        status: BuildStatus::from_name(&text(4)?),
        reason: reason.and_then(|r| serde_json::from_str(&r).ok()),
        steps: serde_json::from_str(&text(6)?).unwrap_or_default(),
        version: row.get(7)?,
        created_ms: from_sql(row.get(8)?),
        changed_ms: from_sql(row.get(9)?),
        caller: row.get(10)?,
    })
}
