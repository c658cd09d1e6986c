//! Automatic resume: a request to a port of a paused sandbox resumes the sandbox, if its creator
//! enabled this. The gateway calls this module before it forwards a request or stream to a sandbox.
//!
//! A *permit* counts towards a limit until it is dropped.

use crate::app::App;
use crate::quota::{ExchangePermit, running};
use jiffy_sandbox_manager::{OperationError, QuotaRequest, SandboxState};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// Locks that serialise the resumes of each sandbox, by sandbox id. A request that waited for the
/// lock finds the sandbox running and reserves no quota.
type ResumeLocks = Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>;

/// Resumes sandboxes on requests to their ports. Clones share the locks.
pub struct AutoResume {
    app: App,
    resume_locks: Arc<ResumeLocks>,
}

impl Clone for AutoResume {
    fn clone(&self) -> Self {
        Self {
            app: self.app.clone(),
            resume_locks: self.resume_locks.clone(),
        }
    }
}

/// Reasons why a sandbox cannot be resumed.
#[derive(Debug, thiserror::Error)]
pub enum ResumeError {
    /// The quota of the key that owns the sandbox is exhausted. The text is a message for clients.
    #[error("{0}")]
    Limit(String),
    /// The resume failed.
    #[error(transparent)]
    Operation(#[from] OperationError),
}

impl AutoResume {
    /// Creates the automatic resume for the sandboxes of `app`, within the quotas of its keys.
    pub fn new(app: App) -> Self {
        Self {
            app,
            resume_locks: Arc::default(),
        }
    }

    /// Resumes a sandbox unless it is running. The resume counts against the quota of the key that
    /// owns the sandbox, like a resume through the API. Sandboxes of a revoked key may remain, and
    /// their resume reserves no quota.
    pub async fn ensure_running(&self, id: &str) -> Result<(), ResumeError> {
        let resume_lock = ResumeLock::take(&self.resume_locks, id);
        // `_guard` is declared last, so it is dropped before the reference to the lock.
        let _guard = resume_lock.lock.lock().await;
        self.ensure_running_locked(id).await
    }

    /// Counts a request or stream to a sandbox of `owner` until the permit is dropped. The error
    /// message is meant for clients.
    pub fn exchange(&self, owner: &str) -> Result<ExchangePermit, String> {
        self.app.exchange(owner)
    }

    /// Like [`Self::ensure_running`]. The caller must hold the sandbox's resume lock.
    async fn ensure_running_locked(&self, id: &str) -> Result<(), ResumeError> {
        let app = &self.app;
        let record = app.sandboxes.get(id)?;
        if *record.state() == SandboxState::Running {
            return Ok(());
        }
        // `None` for sandboxes of the host's owner, and for sandboxes of a revoked key.
        let owner = record.owner();
        let key = owner.map(|owner| app.keys.in_force(owner)).transpose();
        let key = key
            .map_err(|e| ResumeError::Limit(e.to_string()))?
            .flatten();
        let _permit = match key {
            Some(key) => {
                let request = QuotaRequest {
                    amount: running(record.size(), 1),
                    disk_floor: None,
                };
                let permit = app.quota.reserve(&key, request, None).await;
                Some(permit.map_err(|e| ResumeError::Limit(e.message))?)
            }
            None => None,
        };
        let time = app.resume_timeout(&record, None);
        app.sandboxes.ensure_running_for(id, time).await?;
        Ok(())
    }
}

/// Reference to the resume lock of one sandbox. Dropping the last reference removes the lock from
/// the map, also if a waiting task was cancelled.
struct ResumeLock<'a> {
    resume_locks: &'a ResumeLocks,
    id: &'a str,
    lock: Arc<tokio::sync::Mutex<()>>,
}

impl<'a> ResumeLock<'a> {
    /// Looks up the lock of one sandbox. While a caller holds it, other requests for the sandbox
    /// wait, so that only one resumes it.
    fn take(resume_locks: &'a ResumeLocks, id: &'a str) -> Self {
        let mut all = resume_locks.lock();
        let lock = all.entry(id.to_owned()).or_default().clone();
        // The map must not stay locked while waiting for the lock of the sandbox.
        drop(all);
        Self {
            resume_locks,
            id,
            lock,
        }
    }
}

impl Drop for ResumeLock<'_> {
    fn drop(&mut self) {
        let mut all = self.resume_locks.lock();
        // One reference is in the map and one in `self`. Others are only cloned while the map is
        // locked.
        if all.get(self.id).is_some_and(|t| Arc::strong_count(t) <= 2) {
            all.remove(self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_last_waiter_removes_the_lock_even_if_cancelled() {
        let resume_locks = ResumeLocks::default();
        let count = || resume_locks.lock().len();
        let first = ResumeLock::take(&resume_locks, "a");
        let held = first.lock.lock().await;
        let waiting = async {
            let second = ResumeLock::take(&resume_locks, "a");
            let _guard = second.lock.lock().await;
        };
        // This task is cancelled while it waits.
        let limit = std::time::Duration::from_millis(1);
        assert!(tokio::time::timeout(limit, waiting).await.is_err());
        assert_eq!(count(), 1);
        drop(held);
        drop(first);
        assert_eq!(count(), 0);
    }
}
