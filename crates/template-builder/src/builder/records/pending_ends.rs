//! Results of builds that are not in the database yet, for example because the disk is full. Reads
//! of the database take these results into account.

use super::{BuildRecord, BuildRecords, BuildStatus, FailureReason, RecordError};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::time::Duration;

/// Delay before the first retry of a failed write. The delay doubles with each retry.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Maximum delay between retries.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(10);

/// Result of a build.
#[derive(Debug, Clone)]
pub(in crate::builder) enum BuildEnd {
    /// Step keys and version of the template.
    Ready(Vec<String>, String),
    Failed(FailureReason),
}

/// Pending results by build id.
#[derive(Default)]
pub(super) struct PendingEnds(Mutex<HashMap<String, BuildEnd>>);

impl PendingEnds {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, BuildEnd>> {
        self.0.lock()
    }

    /// Applies the pending result of a build to its record.
    pub fn apply(&self, mut build: BuildRecord) -> BuildRecord {
        if let Some(end) = self.lock().get(&build.id).cloned() {
            match end {
                BuildEnd::Ready(steps, version) => {
                    build.status = BuildStatus::Ready;
                    (build.steps, build.version) = (steps, Some(version));
                }
                BuildEnd::Failed(reason) => {
                    build.status = BuildStatus::Error;
                    build.reason = Some(reason);
                }
            }
        }
        build
    }
}

impl BuildRecords {
    /// Records the result of a build. Readers see it immediately; the database is updated as soon
    /// as it can be written.
    pub(in crate::builder) async fn end_build(&self, template: &str, id: &str, end: BuildEnd) {
        // Visible before the write, because the build's client waits for the result.
        self.pending_ends.lock().insert(id.to_owned(), end.clone());
        let mut pause = FIRST_RETRY_DELAY;
        while let Err(e) = self.write_end(template, id, &end) {
            // The failure is logged once per build.
            if pause == FIRST_RETRY_DELAY {
                tracing::error!(build = id, error = %e, "cannot record the result of a build, retrying");
            }
            tokio::time::sleep(pause).await;
            // Retries without limit: the result must not be lost while the daemon runs.
            pause = (pause * 2).min(MAX_RETRY_DELAY);
        }
        // Remove the entry after the write: at every moment, the map or the database contains the
        // result.
        self.pending_ends.lock().remove(id);
    }

    fn write_end(&self, template: &str, id: &str, end: &BuildEnd) -> Result<(), RecordError> {
        match end {
            BuildEnd::Ready(steps, version) => {
                // The tags move first: a ready build always has its tags.
                let tags = self.build(id)?.map(|b| b.tags).unwrap_or_default();
                self.retag(template, Some(id), &tags)?;
                self.set_ready(id, steps, version)
            }
            BuildEnd::Failed(reason) => self.set_failed(id, reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{TemplateRecord, WantedSize};
    use super::*;

    #[tokio::test]
    async fn a_result_is_visible_while_the_disk_is_full_and_written_later() {
        let dir = tempfile::tempdir().unwrap();
        let records = BuildRecords::open(dir.path()).unwrap();
        let template = TemplateRecord {
            id: "t1".to_owned(),
            name: "mine".to_owned(),
            owner: None,
            public: false,
            created_ms: 1,
        };
        records.insert_template(&template).unwrap();
        let build = BuildRecord {
            id: "b1".to_owned(),
            template: "t1".to_owned(),
            caller: None,
            tags: vec!["default".to_owned()],
            size: WantedSize::default(),
            status: BuildStatus::Building,
            reason: None,
            steps: Vec::new(),
            version: None,
            created_ms: 1,
            changed_ms: 1,
        };
        records.insert_build(&build).unwrap();
        let read_only = |on: bool| {
            let set = |c: &rusqlite::Connection| c.pragma_update(None, "query_only", on);
            records.with_connection(set).unwrap();
        };
        read_only(true);
        let reason = FailureReason {
            message: "the disk is full".to_owned(),
            step: None,
        };
        let visible = async {
            loop {
                let now = records.build("b1").unwrap().unwrap();
                if now.status == BuildStatus::Error {
                    break now;
                }
                tokio::task::yield_now().await;
            }
        };
        let ending = records.end_build("t1", "b1", BuildEnd::Failed(reason.clone()));
        tokio::pin!(ending);
        let now = tokio::select! {
            () = &mut ending => panic!("the database is read-only"),
            now = visible => now,
        };
        assert_eq!(now.reason, Some(reason.clone()));
        read_only(false);
        ending.await;
        let others = BuildRecords::open(dir.path()).unwrap();
        assert_eq!(others.builds("t1").unwrap()[0].reason, Some(reason));
    }
}
