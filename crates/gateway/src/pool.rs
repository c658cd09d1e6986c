//! Connections into guests that wait for the next request.

use crate::request_body::GuestRequestBody;
use jiffy_upstream::UpstreamConnection;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::time::{interval, timeout};

/// Longest idle time of a connection. Below the 5 s after which common servers close theirs, so
/// that a request seldom crosses a close.
const MAX_IDLE: Duration = Duration::from_secs(3);
/// Connections that wait per port of a sandbox: those of a busy client, whose answers come
/// together.
const MAX_IDLE_PER_PORT: usize = 64;
/// Connections that wait altogether.
const MAX_IDLE_TOTAL: usize = 1_024;
/// Time for a connection to become ready after an answer (a request body may still be in transit).
const READY_TIMEOUT: Duration = Duration::from_secs(1);

/// A port of a sandbox.
pub(crate) type PoolKey = (String, u16);

/// A connection into a guest with one request on it. Dropped, the connection is closed at once.
#[derive(Debug)]
pub struct GuestConnection {
    pub(crate) connection: UpstreamConnection<GuestRequestBody>,
    key: PoolKey,
    /// Number of [`GuestConnectionPool::invalidate`]s when it was opened.
    epoch: u64,
    _permit: GuestConnectionPermit,
}

/// One of the connections a sandbox may have.
#[derive(Debug)]
pub(crate) struct GuestConnectionPermit {
    id: String,
    pool: Weak<GuestConnectionPool>,
}

impl Drop for GuestConnectionPermit {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.upgrade() {
            let mut state = pool.state();
            if let Some(count) = state.open.get_mut(&self.id) {
                *count -= 1;
                if *count == 0 {
                    state.open.remove(&self.id);
                }
            }
        }
    }
}

#[derive(Debug)]
struct IdleConnection {
    guest: GuestConnection,
    since: Instant,
}

#[derive(Debug, Default)]
struct PoolState {
    idle: HashMap<PoolKey, Vec<IdleConnection>>,
    idle_count: usize,
    open: HashMap<String, usize>,
    closing_idle: bool,
}

/// Connections into guests.
#[derive(Debug, Default)]
pub struct GuestConnectionPool {
    state: Mutex<PoolState>,
    epoch: AtomicU64,
}

impl GuestConnectionPool {
    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock()
    }

    /// Closes the idle connections of a sandbox, and keeps those in use from coming back: after a
    /// pause, a rollback or a kill.
    pub fn invalidate(&self, id: &str) {
        self.epoch.fetch_add(1, Ordering::SeqCst);
        let mut gone = Vec::new();
        let mut state = self.state();
        let keys: Vec<PoolKey> = state
            .idle
            .keys()
            .filter(|(owner, _)| owner == id)
            .cloned()
            .collect();
        for key in keys {
            gone.extend(state.idle.remove(&key).unwrap_or_default());
        }
        state.idle_count -= gone.len();
        // Their drop takes the lock again.
        drop(state);
        drop(gone);
    }

    /// Connections that wait for a request.
    #[must_use]
    pub fn idle_count(&self) -> usize {
        self.state().idle_count
    }

    /// Takes one of `most` places for connections of a sandbox.
    pub(crate) fn permit(self: &Arc<Self>, id: &str, most: usize) -> Option<GuestConnectionPermit> {
        let mut state = self.state();
        let count = state.open.entry(id.to_owned()).or_default();
        if *count >= most {
            return None;
        }
        *count += 1;
        Some(GuestConnectionPermit {
            id: id.to_owned(),
            pool: Arc::downgrade(self),
        })
    }

    /// Number of calls of [`Self::invalidate`]; read before opening a connection.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// Makes a connection of a fresh connection.
    pub(crate) fn connection(
        key: PoolKey,
        epoch: u64,
        connection: UpstreamConnection<GuestRequestBody>,
        permit: GuestConnectionPermit,
    ) -> GuestConnection {
        GuestConnection {
            connection,
            key,
            epoch,
            _permit: permit,
        }
    }

    /// Takes a connection that has been idle for at most `max_idle`.
    pub(crate) fn take(&self, key: &PoolKey, max_idle: Duration) -> Option<GuestConnection> {
        let mut dead = Vec::new();
        let mut found = None;
        let mut state = self.state();
        if let Some(list) = state.idle.get_mut(key) {
            // The one that waited least is the least likely to be closed by now.
            while let Some(mut idle) = list.pop() {
                if idle.guest.connection.is_ready() && idle.since.elapsed() <= max_idle {
                    found = Some(idle.guest);
                    break;
                }
                dead.push(idle);
            }
            if list.is_empty() {
                state.idle.remove(key);
            }
        }
        state.idle_count -= dead.len() + usize::from(found.is_some());
        drop(state);
        drop(dead);
        found
    }

    /// Returns a connection whose answer is complete to the pool, once it is ready for a request.
    pub(crate) fn give_back(self: &Arc<Self>, mut guest: GuestConnection) {
        if guest.connection.is_ready() {
            return self.keep(guest);
        }
        let pool = Arc::clone(self);
        tokio::spawn(async move {
            if let Ok(true) = timeout(READY_TIMEOUT, guest.connection.ready()).await {
                pool.keep(guest);
            }
        });
    }

    fn keep(self: &Arc<Self>, guest: GuestConnection) {
        let mut state = self.state();
        if guest.epoch != self.epoch() || state.idle_count >= MAX_IDLE_TOTAL {
            drop(state);
            return;
        }
        let list = state.idle.entry(guest.key.clone()).or_default();
        if list.len() >= MAX_IDLE_PER_PORT {
            drop(state);
            return;
        }
        list.push(IdleConnection {
            guest,
            since: Instant::now(),
        });
        state.idle_count += 1;
        if !state.closing_idle {
            state.closing_idle = true;
            tokio::spawn(close_idle(Arc::downgrade(self)));
        }
    }
}

/// Closes connections that have waited long enough, until none waits.
async fn close_idle(pool: Weak<GuestConnectionPool>) {
    let mut tick = interval(Duration::from_millis(500));
    loop {
        tick.tick().await;
        let Some(pool) = pool.upgrade() else { return };
        let mut gone = Vec::new();
        let mut state = pool.state();
        for list in state.idle.values_mut() {
            gone.extend(list.extract_if(.., |idle| {
                idle.since.elapsed() >= MAX_IDLE || idle.guest.connection.has_ended()
            }));
        }
        state.idle.retain(|_, list| !list.is_empty());
        state.idle_count -= gone.len();
        let done = state.idle_count == 0;
        if done {
            state.closing_idle = false;
        }
        drop(state);
        drop(gone);
        if done {
            return;
        }
    }
}
