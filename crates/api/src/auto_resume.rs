//! Those who reach a sandbox's ports, and wake it by that.

use crate::app::App;
use crate::quota::{ExchangePermit, running};
use jiffy_sandbox_manager::{OperationError, QuotaRequest, SandboxState};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// Turns at waking, by sandbox. Whoever waits for one finds the sandbox awake, and asks for no room
/// of its own.
type WakeLocks = Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>;

/// Wakes sandboxes for those who reach their ports. Clones are the same.
pub struct AutoResume {
    app: App,
    wake_locks: Arc<WakeLocks>,
}

impl Clone for AutoResume {
    fn clone(&self) -> Self {
        Self {
            app: self.app.clone(),
            wake_locks: self.wake_locks.clone(),
        }
    }
}

/// Why a sandbox sleeps on.
#[derive(Debug, thiserror::Error)]
pub enum WakeError {
    /// The key it was made with has no room for it; why, in a sentence.
    #[error("{0}")]
    Limit(String),
    /// Waking it failed.
    #[error(transparent)]
    Operation(#[from] OperationError),
}

impl AutoResume {
    /// Those of the sandboxes of `app`, within the limits of its keys.
    pub fn new(app: App) -> Self {
        Self {
            app,
            wake_locks: Arc::default(),
        }
    }

    /// Makes sure that a sandbox runs. It counts for the key it was made with like one that is
    /// woken by a call; a key that was revoked has no limits, because its sandboxes stay.
    pub async fn wake(&self, id: &str) -> Result<(), WakeError> {
        let wake_lock = WakeLock::take(&self.wake_locks, id);
        let _guard = wake_lock.lock.lock().await;
        self.wake_held(id).await
    }

    /// Counts one more request or stream to a sandbox of `owner`; the refusal is for clients.
    pub fn exchange(&self, owner: &str) -> Result<ExchangePermit, String> {
        self.app.exchange(owner)
    }

    async fn wake_held(&self, id: &str) -> Result<(), WakeError> {
        let app = &self.app;
        let record = app.sandboxes.get(id)?;
        if *record.state() == SandboxState::Running {
            return Ok(());
        }
        let owner = record.owner();
        let key = owner.map(|owner| app.keys.in_force(owner)).transpose();
        let key = key.map_err(|e| WakeError::Limit(e.to_string()))?.flatten();
        let _permit = match key {
            Some(key) => {
                let request = QuotaRequest {
                    amount: running(record.size(), 1),
                    disk_floor: None,
                };
                let permit = app.quota.reserve(&key, request, None).await;
                Some(permit.map_err(|e| WakeError::Limit(e.message))?)
            }
            None => None,
        };
        let time = app.awake_time(&record, None);
        app.sandboxes.wake_for(id, time).await?;
        Ok(())
    }
}

/// A place in the queue of those who wake a sandbox. The last to leave takes the entry along, also
/// one who no longer waits.
struct WakeLock<'a> {
    wake_locks: &'a WakeLocks,
    id: &'a str,
    lock: Arc<tokio::sync::Mutex<()>>,
}

impl<'a> WakeLock<'a> {
    fn take(wake_locks: &'a WakeLocks, id: &'a str) -> Self {
        let mut all = wake_locks.lock();
        let lock = all.entry(id.to_owned()).or_default().clone();
        drop(all);
        Self {
            wake_locks,
            id,
            lock,
        }
    }
}

impl Drop for WakeLock<'_> {
    fn drop(&mut self) {
        let mut all = self.wake_locks.lock();
        // The map's and ours.
        if all.get(self.id).is_some_and(|t| Arc::strong_count(t) <= 2) {
            all.remove(self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_queue_goes_with_the_last_in_it_however_they_leave() {
        let wake_locks = WakeLocks::default();
        let count = || wake_locks.lock().len();
        let first = WakeLock::take(&wake_locks, "a");
        let held = first.lock.lock().await;
        let waiting = async {
            let second = WakeLock::take(&wake_locks, "a");
            let _guard = second.lock.lock().await;
        };
        // Given up while it waits.
        let limit = std::time::Duration::from_millis(1);
        assert!(tokio::time::timeout(limit, waiting).await.is_err());
        assert_eq!(count(), 1);
        drop(held);
        drop(first);
        assert_eq!(count(), 0);
    }
}
