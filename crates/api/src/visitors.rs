//! Those who reach a sandbox's ports, and wake it by that.

use crate::app::App;
use crate::quota::{ExchangePermit, running};
use jiffy_engine::Engine;
use jiffy_host::{OperationError, QuotaRequest, State};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Turns at waking, by sandbox. Whoever waits for one finds the sandbox awake, and asks for no room of its own.
type Turns = Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>;

/// Wakes sandboxes for those who reach their ports. Clones are the same.
pub struct Visitors<E: Engine> {
    app: App<E>,
    turns: Arc<Turns>,
}

impl<E: Engine> Clone for Visitors<E> {
    fn clone(&self) -> Self {
        Self {
            app: self.app.clone(),
            turns: self.turns.clone(),
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

impl<E: Engine> Visitors<E> {
    /// Those of the sandboxes of `app`, within the limits of its keys.
    pub fn new(app: App<E>) -> Self {
        Self {
            app,
            turns: Arc::default(),
        }
    }

    /// Makes sure that a sandbox runs. It counts for the key it was made with like one that is woken by a call; a key that was
    /// revoked has no limits, because its sandboxes stay.
    pub async fn wake(&self, id: &str) -> Result<(), WakeError> {
        let place = Place::take(&self.turns, id);
        let _turn = place.turn.lock().await;
        self.wake_held(id).await
    }

    /// Counts one more request or stream to a sandbox of `owner`; the refusal is for clients.
    pub fn exchange(&self, owner: &str) -> Result<ExchangePermit, String> {
        self.app.exchange(owner)
    }

    async fn wake_held(&self, id: &str) -> Result<(), WakeError> {
        let app = &self.app;
        let record = app.sandboxes.get(id)?;
        if record.state == State::Running {
            return Ok(());
        }
        let owner = record.terms.owner.as_deref();
        let key = owner.map(|owner| app.keys.in_force(owner)).transpose();
        let key = key.map_err(|e| WakeError::Limit(e.to_string()))?.flatten();
        let _room = match key {
            Some(key) => {
                let request = QuotaRequest {
                    amount: running(record.size, 1),
                    disk_floor: None,
                };
                let room = app.quota.reserve(&key, request, None).await;
                Some(room.map_err(|e| WakeError::Limit(e.message))?)
            }
            None => None,
        };
        let time = app.awake_time(&record, None);
        app.sandboxes.wake_for(id, time).await?;
        Ok(())
    }
}

/// A place in the queue of those who wake a sandbox. The last to leave takes the entry along, also one who no longer waits.
struct Place<'a> {
    turns: &'a Turns,
    id: &'a str,
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl<'a> Place<'a> {
    fn take(turns: &'a Turns, id: &'a str) -> Self {
        let mut all = turns.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = all.entry(id.to_owned()).or_default().clone();
        drop(all);
        Self { turns, id, turn }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut all = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
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
        let turns = Turns::default();
        let count = || turns.lock().unwrap().len();
        let first = Place::take(&turns, "a");
        let held = first.turn.lock().await;
        let waiting = async {
            let second = Place::take(&turns, "a");
            let _turn = second.turn.lock().await;
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
