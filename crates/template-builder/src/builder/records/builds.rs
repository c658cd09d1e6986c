//! Records of builds.

use super::{BuildRecords, RecordError, json, loaded, now_ms, stored};
use rusqlite::{OptionalExtension, Row, params};
use serde::{Deserialize, Serialize};

const BUILD_COLUMNS: &str =
    "id, template, tags, size, status, reason, steps, version, created_ms, changed_ms, caller";

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
pub enum BuildStatus {
    /// Not begun: its files are still to come, or others build.
    Waiting,
    /// Under way.
    Building,
    /// There is a template.
    Ready,
    /// There is none.
    Error,
}

impl BuildStatus {
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
pub struct FailureReason {
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
    pub status: BuildStatus,
    /// Why it failed, if it did.
    pub reason: Option<FailureReason>,
    /// Keys of the steps it is made of.
    pub steps: Vec<String>,
    /// What it became.
    pub version: Option<String>,
    /// Milliseconds since 1970.
    pub created_ms: u64,
    /// When its status changed last, in milliseconds since 1970.
    pub changed_ms: u64,
}

impl BuildRecords {
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
        let query = format!("SELECT {BUILD_COLUMNS} FROM builds WHERE id = ?1");
        let found = self.with(|c| c.prepare_cached(&query)?.query_row([id], build).optional())?;
        Ok(found.map(|build| self.unwritten.applied(build)))
    }

    /// The builds of a template, the newest first.
    pub fn builds(&self, template: &str) -> Result<Vec<BuildRecord>, RecordError> {
        let query = format!(
            "SELECT {BUILD_COLUMNS} FROM builds WHERE template = ?1 ORDER BY created_ms DESC, rowid DESC LIMIT 1000"
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
    pub fn move_on(
        &self,
        id: &str,
        from: BuildStatus,
        to: BuildStatus,
    ) -> Result<bool, RecordError> {
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
    pub fn fail(&self, id: &str, reason: &FailureReason) -> Result<(), RecordError> {
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
    pub fn abandon(&self, reason: &FailureReason) -> Result<usize, RecordError> {
        self.with(|c| {
            let change = "UPDATE builds SET status = 'error', reason = ?1, changed_ms = ?2
                WHERE status NOT IN ('ready', 'error')";
            c.execute(change, params![json(reason), stored(now_ms())])
        })
    }
}

fn build(row: &Row<'_>) -> rusqlite::Result<BuildRecord> {
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
        created_ms: loaded(row.get(8)?),
        changed_ms: loaded(row.get(9)?),
        caller: row.get(10)?,
    })
}
