//! Builds that were requested but not started: limited in number per key and in time.

use super::records::{BuildRecords, FailureReason, RecordError, to_sql};
use super::{Builder, BuilderError, BuilderInner};
use jiffy_engine_api::now_ms;
use rusqlite::params;
use std::time::Duration;

/// Maximum number of builds of one key that wait for their start.
pub const MAX_WAITING_BUILDS: usize = 20;
/// Time after which a build that was not started fails.
pub const WAITING_BUILD_TIMEOUT: Duration = Duration::from_secs(3600);
/// Maximum number of failed builds that are retained per key.
const MAX_FAILED_BUILDS: usize = 200;
/// Interval between checks for expired builds.
const WAITING_GC_INTERVAL: Duration = Duration::from_secs(600);

impl BuildRecords {
    /// Returns the ids of waiting builds that `caller` requested. `None` stands for the host's
    /// owner.
    fn waiting_of(&self, caller: Option<&str>) -> Result<Vec<String>, RecordError> {
        let query = "SELECT id FROM builds WHERE status = 'waiting' AND caller IS ?1";
        self.with_connection(|c| {
            let mut query = c.prepare_cached(query)?;
            query.query_map([caller], |row| row.get(0))?.collect()
        })
    }

    /// Returns the ids of waiting builds that were created before `before_ms`.
    fn waiting_before(&self, before_ms: u64) -> Result<Vec<String>, RecordError> {
        let query = "SELECT id FROM builds WHERE status = 'waiting' AND created_ms < ?1";
        self.with_connection(|c| {
            let mut query = c.prepare_cached(query)?;
            let ids = query.query_map([to_sql(before_ms)], |row| row.get(0));
            ids?.collect()
        })
    }

    /// Deletes all but the newest failed builds of `caller`, and templates without builds.
    fn gc_failed(&self, caller: Option<&str>, keep: usize) -> Result<(), RecordError> {
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
}

impl BuilderInner {
    /// Fails if too many builds of `caller` wait for their start. The caller must hold
    /// `names_lock`.
    pub(super) fn check_waiting(&self, caller: Option<&str>) -> Result<(), BuilderError> {
        self.fail_waiting(WAITING_BUILD_TIMEOUT)?;
        self.records.gc_failed(caller, MAX_FAILED_BUILDS)?;
        // The host's owner is not limited.
        if caller.is_none() {
            return Ok(());
        }
        let mut waiting = self.records.waiting_of(caller)?;
        let running = self.running.lock();
        waiting.retain(|id| !running.contains_key(id));
        if waiting.len() < MAX_WAITING_BUILDS {
            Ok(())
        } else {
            Err(BuilderError::Waiting)
        }
    }

    /// Fails builds that were not started for `life`.
    fn fail_waiting(&self, life: Duration) -> Result<(), RecordError> {
        let life = u64::try_from(life.as_millis()).unwrap_or(u64::MAX);
        let reason = FailureReason {
            message: "the build was not started in time: request a new build".to_owned(),
            step: None,
        };
        for id in self.records.waiting_before(now_ms().saturating_sub(life))? {
            // No build can start while this lock is held.
            let running = self.running.lock();
            if !running.contains_key(&id) {
                self.records.set_failed(&id, &reason)?;
            }
        }
        Ok(())
    }
}

impl Builder {
    /// Fails expired builds periodically, while the builder exists.
    pub(super) fn spawn_waiting_gc(&self) {
        let builder = std::sync::Arc::downgrade(&self.0);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(WAITING_GC_INTERVAL).await;
                let Some(inner) = builder.upgrade() else {
                    return;
                };
                if let Err(e) = inner.fail_waiting(WAITING_BUILD_TIMEOUT) {
                    tracing::warn!(error = %e, "cannot expire builds that were not started");
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::records::{BuildRecord, BuildStatus, TemplateRecord, WantedSize};
    use super::*;

    #[test]
    fn failed_builds_and_templates_without_builds_are_removed_per_caller() {
        let dir = tempfile::tempdir().unwrap();
        let records = BuildRecords::open(dir.path()).unwrap();
        for n in 0..6_u64 {
            let owner = Some(if n < 5 { "k1" } else { "k2" }.to_owned());
            let template = TemplateRecord {
                id: format!("t{n}"),
                name: format!("name{n}"),
                owner: owner.clone(),
                public: false,
                created_ms: n,
            };
            records.insert_template(&template).unwrap();
            let build = BuildRecord {
                id: format!("b{n}"),
                template: template.id,
                caller: owner,
                tags: Vec::new(),
                size: WantedSize::default(),
                status: if n == 0 {
                    BuildStatus::Waiting
                } else {
                    BuildStatus::Error
                },
                reason: None,
                steps: Vec::new(),
                version: None,
                created_ms: n,
                changed_ms: n,
            };
            records.insert_build(&build).unwrap();
        }
        records.gc_failed(Some("k1"), 2).unwrap();
        let left = records.templates().unwrap().into_iter().map(|t| t.id);
        assert_eq!(left.collect::<Vec<_>>(), ["t0", "t3", "t4", "t5"]);
        assert_eq!(records.waiting_of(Some("k1")).unwrap(), ["b0"]);
        assert_eq!(records.waiting_of(Some("k2")).unwrap(), [""; 0]);
        assert_eq!(records.waiting_before(1).unwrap(), ["b0"]);
        assert_eq!(records.waiting_before(0).unwrap(), [""; 0]);
    }
}
