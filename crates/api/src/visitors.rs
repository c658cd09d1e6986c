//! Those who reach a sandbox's ports, and wake it by that.

use crate::app::App;
use jiffy_engine::Engine;
use jiffy_host::{OperationError, State};
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
        let turn = self.turn(id);
        let woken = {
            let _turn = turn.lock().await;
            self.wake_held(id).await
        };
        self.leave(id, turn);
        woken
    }

    async fn wake_held(&self, id: &str) -> Result<(), WakeError> {
        let app = &self.app;
        let record = app.sandboxes.get(id)?;
        if record.state == State::Running {
            return Ok(());
        }
        let keys = app.keys.list();
        let keys = keys.map_err(|e| WakeError::Limit(e.to_string()))?;
        let owner = record.terms.owner.as_deref();
        let key = keys
            .iter()
            .find(|k| Some(k.id.as_str()) == owner && k.revoked_ms.is_none());
        let _room = match key {
            Some(key) => {
                let room = app.quota.room(&app.sandboxes, key, record.size, 1, false);
                Some(room.await.map_err(|e| WakeError::Limit(e.message))?)
            }
            None => None,
        };
        app.sandboxes.wake(id).await?;
        Ok(())
    }

    fn turn(&self, id: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.entry(id.to_owned()).or_default().clone()
    }

    /// The last to leave takes the turn's entry along.
    fn leave(&self, id: &str, turn: Arc<tokio::sync::Mutex<()>>) {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        drop(turn);
        if turns.get(id).is_some_and(|t| Arc::strong_count(t) == 1) {
            turns.remove(id);
        }
    }
}
