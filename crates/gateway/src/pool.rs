//! Connections into guests that wait for the next request.

use crate::body::ToGuest;
use hyper::client::conn::http1::SendRequest;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::task::AbortHandle;
use tokio::time::{interval, timeout};

/// How long a connection waits. Below the 5 s after which common servers close theirs, so that a request seldom crosses a close.
const IDLE: Duration = Duration::from_secs(3);
/// Connections that wait per port of a sandbox.
const MOST_PER_PORT: usize = 8;
/// Connections that wait altogether.
const MOST: usize = 1_024;
/// How long a connection may take to become ready after an answer (a request body may still be on its way).
const SETTLE: Duration = Duration::from_secs(1);

/// A port of a sandbox.
pub(crate) type Key = (String, u16);

/// A connection into a guest with one request on it. Dropped, the connection is closed at once.
#[derive(Debug)]
pub struct Lease {
    pub(crate) sender: SendRequest<ToGuest>,
    key: Key,
    /// Number of [`Pool::forget`]s when it was opened.
    epoch: u64,
    driver: Driver,
    _slot: Slot,
}

/// The task that moves a connection's bytes.
#[derive(Debug)]
struct Driver(AbortHandle);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// One of the connections a sandbox may have.
#[derive(Debug)]
pub(crate) struct Slot {
    id: String,
    pool: Weak<Pool>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.upgrade() {
            let mut state = pool.state();
            if let Some(count) = state.slots.get_mut(&self.id) {
                *count -= 1;
                if *count == 0 {
                    state.slots.remove(&self.id);
                }
            }
        }
    }
}

#[derive(Debug)]
struct Idle {
    lease: Lease,
    since: Instant,
}

#[derive(Debug, Default)]
struct State {
    idle: HashMap<Key, Vec<Idle>>,
    waiting: usize,
    slots: HashMap<String, usize>,
    sweeping: bool,
}

/// Connections into guests.
#[derive(Debug, Default)]
pub struct Pool {
    state: Mutex<State>,
    epoch: AtomicU64,
}

impl Pool {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the waiting connections of a sandbox, and lets none that is in use come back: after a pause, a rollback or a kill.
    pub fn forget(&self, id: &str) {
        self.epoch.fetch_add(1, Ordering::SeqCst);
        let mut gone = Vec::new();
        let mut state = self.state();
        let keys: Vec<Key> = state
            .idle
            .keys()
            .filter(|(owner, _)| owner == id)
            .cloned()
            .collect();
        for key in keys {
            gone.extend(state.idle.remove(&key).unwrap_or_default());
        }
        state.waiting -= gone.len();
        // Their drop takes the lock again.
        drop(state);
        drop(gone);
    }

    /// Connections that wait for a request.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.state().waiting
    }

    /// Takes one of `most` places for connections of a sandbox.
    pub(crate) fn slot(self: &Arc<Self>, id: &str, most: usize) -> Option<Slot> {
        let mut state = self.state();
        let count = state.slots.entry(id.to_owned()).or_default();
        if *count >= most {
            return None;
        }
        *count += 1;
        Some(Slot {
            id: id.to_owned(),
            pool: Arc::downgrade(self),
        })
    }

    /// How many times something was forgotten; read before opening a connection.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// Makes a lease of a fresh connection.
    pub(crate) fn lease(
        key: Key,
        epoch: u64,
        sender: SendRequest<ToGuest>,
        driver: AbortHandle,
        slot: Slot,
    ) -> Lease {
        Lease {
            sender,
            key,
            epoch,
            driver: Driver(driver),
            _slot: slot,
        }
    }

    /// A waiting connection that has not waited longer than `longest`.
    pub(crate) fn take(&self, key: &Key, longest: Duration) -> Option<Lease> {
        let mut dead = Vec::new();
        let mut found = None;
        let mut state = self.state();
        if let Some(list) = state.idle.get_mut(key) {
            // The one that waited least is the least likely to be closed by now.
            while let Some(idle) = list.pop() {
                if idle.lease.sender.is_ready()
                    && !idle.lease.driver.0.is_finished()
                    && idle.since.elapsed() <= longest
                {
                    found = Some(idle.lease);
                    break;
                }
                dead.push(idle);
            }
            if list.is_empty() {
                state.idle.remove(key);
            }
        }
        state.waiting -= dead.len() + usize::from(found.is_some());
        drop(state);
        drop(dead);
        found
    }

    /// Lets a connection whose answer is complete wait for the next request, if it can.
    pub(crate) fn give_back(self: &Arc<Self>, mut lease: Lease) {
        let pool = Arc::clone(self);
        tokio::spawn(async move {
            if let Ok(Ok(())) = timeout(SETTLE, lease.sender.ready()).await {
                pool.keep(lease);
            }
        });
    }

    fn keep(self: &Arc<Self>, lease: Lease) {
        let mut state = self.state();
        if lease.epoch != self.epoch() || state.waiting >= MOST {
            drop(state);
            return;
        }
        let list = state.idle.entry(lease.key.clone()).or_default();
        if list.len() >= MOST_PER_PORT {
            drop(state);
            return;
        }
        list.push(Idle {
            lease,
            since: Instant::now(),
        });
        state.waiting += 1;
        if !state.sweeping {
            state.sweeping = true;
            tokio::spawn(sweep(Arc::downgrade(self)));
        }
    }
}

/// Closes connections that have waited long enough, until none waits.
async fn sweep(pool: Weak<Pool>) {
    let mut tick = interval(Duration::from_millis(500));
    loop {
        tick.tick().await;
        let Some(pool) = pool.upgrade() else { return };
        let mut gone = Vec::new();
        let mut state = pool.state();
        for list in state.idle.values_mut() {
            gone.extend(list.extract_if(.., |idle| {
                idle.since.elapsed() >= IDLE || idle.lease.sender.is_closed()
            }));
        }
        state.idle.retain(|_, list| !list.is_empty());
        state.waiting -= gone.len();
        let done = state.waiting == 0;
        if done {
            state.sweeping = false;
        }
        drop(state);
        drop(gone);
        if done {
            return;
        }
    }
}
