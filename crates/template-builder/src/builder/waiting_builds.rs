//! Limits for builds that were requested but not started: their number per key, and the time until
//! they expire.
//!
//! A *permit* counts towards a limit until it is dropped.

use super::records::{FailureReason, RecordError};
use super::{Builder, BuilderError, BuilderInner};
use jiffy_engine_api::now_ms;
use std::time::Duration;

/// Maximum number of builds of one key that wait for their start.
pub const MAX_WAITING_BUILDS: usize = 20;
/// Time after which a build that was not started fails.
pub const WAITING_BUILD_TIMEOUT: Duration = Duration::from_secs(3600);
/// Maximum number of failed builds that are retained per key.
const MAX_FAILED_BUILDS: usize = 200;
/// Interval between checks for expired builds.
const WAITING_GC_INTERVAL: Duration = Duration::from_secs(600);

impl BuilderInner {
    /// Fails if too many builds of `caller` wait for their start. First expires waiting builds of
    /// all callers, and deletes old failed builds of `caller`. The caller must hold `names_lock`.
    pub(super) fn check_waiting(&self, caller: Option<&str>) -> Result<(), BuilderError> {
        // Expired builds must not count.
        self.fail_waiting(WAITING_BUILD_TIMEOUT)?;
        self.records.gc_failed(caller, MAX_FAILED_BUILDS)?;
        // The host's owner is not limited.
        if caller.is_none() {
            return Ok(());
        }
        let mut waiting = self.records.waiting_of(caller)?;
        // A started build keeps the status `waiting` until it has a permit.
        let running = self.running.lock();
        waiting.retain(|id| !running.contains_key(id));
        if waiting.len() < MAX_WAITING_BUILDS {
            Ok(())
        } else {
            Err(BuilderError::Waiting)
        }
    }

    /// Marks builds as failed that were not started within `life` after their creation.
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
