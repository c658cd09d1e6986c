//! Ends of builds that are not written down yet, because the disk is full: whoever asks hears of them all the same.

use super::records::{BuildRecord, Reason, RecordError, Records, Status};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long is waited before it is tried again, at first and at most.
const SOON: Duration = Duration::from_millis(100);
const LATER: Duration = Duration::from_secs(10);

/// How a build ended.
#[derive(Debug, Clone)]
pub(super) enum End {
    /// With these keys of steps and this version.
    Ready(Vec<String>, String),
    Failed(Reason),
}

/// By the builds' ids.
#[derive(Default)]
pub(super) struct Unwritten(Mutex<HashMap<String, End>>);

impl Unwritten {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, End>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The record as it would be if everything was written down.
    pub fn applied(&self, mut build: BuildRecord) -> BuildRecord {
        if let Some(end) = self.lock().get(&build.id).cloned() {
            match end {
                End::Ready(steps, version) => {
                    build.status = Status::Ready;
                    (build.steps, build.version) = (steps, Some(version));
                }
                End::Failed(reason) => {
                    build.status = Status::Error;
                    build.reason = Some(reason);
                }
            }
        }
        build
    }
}

impl Records {
    /// Ends a build: at once for whoever asks, and in the file as soon as there is room for it.
    pub(super) async fn end(&self, template: &str, id: &str, end: End) {
        self.unwritten.lock().insert(id.to_owned(), end.clone());
        let mut pause = SOON;
        while let Err(e) = self.write_end(template, id, &end) {
            if pause == SOON {
                tracing::error!(build = id, "how it ended is written down later: {e}");
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LATER);
        }
        self.unwritten.lock().remove(id);
    }

    fn write_end(&self, template: &str, id: &str, end: &End) -> Result<(), RecordError> {
        match end {
            End::Ready(steps, version) => {
                let tags = self.build(id)?.map(|b| b.tags).unwrap_or_default();
                self.retag(template, Some(id), &tags)?;
                self.succeed(id, steps, version)
            }
            End::Failed(reason) => self.fail(id, reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::records::{TemplateRecord, WantedSize};
    use super::*;

    #[tokio::test]
    async fn an_end_that_cannot_be_written_yet_is_told_and_written_later() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(dir.path()).unwrap();
        let template = TemplateRecord {
            id: "t1".to_owned(),
            name: "mine".to_owned(),
            owner: None,
            public: false,
            created_ms: 1,
        };
        records.enter_template(&template).unwrap();
        let build = BuildRecord {
            id: "b1".to_owned(),
            template: "t1".to_owned(),
            caller: None,
            tags: vec!["default".to_owned()],
            size: WantedSize::default(),
            status: Status::Building,
            reason: None,
            steps: Vec::new(),
            version: None,
            created_ms: 1,
            changed_ms: 1,
        };
        records.enter_build(&build).unwrap();
        let read_only = |on: bool| {
            let set = |c: &rusqlite::Connection| c.pragma_update(None, "query_only", on);
            records.with(set).unwrap();
        };
        read_only(true);
        let reason = Reason {
            message: "the disk is full".to_owned(),
            step: None,
        };
        let told = async {
            loop {
                let now = records.build("b1").unwrap().unwrap();
                if now.status == Status::Error {
                    break now;
                }
                tokio::task::yield_now().await;
            }
        };
        let ending = records.end("t1", "b1", End::Failed(reason.clone()));
        tokio::pin!(ending);
        let now = tokio::select! {
            () = &mut ending => panic!("there was nowhere to write"),
            now = told => now,
        };
        assert_eq!(now.reason, Some(reason.clone()));
        read_only(false);
        ending.await;
        let others = Records::open(dir.path()).unwrap();
        assert_eq!(others.builds("t1").unwrap()[0].reason, Some(reason));
    }
}
