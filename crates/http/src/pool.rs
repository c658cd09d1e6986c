//! Pool of idle connections to several servers, each identified by a key.
//!
//! The gateway uses a pool for servers in guests, and the function manager for the processes of
//! functions.
//!
//! The *epoch* of a pool counts the calls of `invalidate`. A connection that was opened in an
//! earlier epoch is closed after use.

use crate::UpstreamConnection;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout};

/// Timeout for a connection to become ready after its response was received. It may not be ready
/// yet, because the body of the request is still being sent.
const READY_TIMEOUT: Duration = Duration::from_secs(1);

/// Limits of a pool.
#[derive(Debug, Clone, Copy)]
pub struct PoolLimits {
    /// Maximum idle time of a connection.
    pub idle_time: Duration,
    /// Interval between checks for connections to close, while connections are idle.
    pub check_interval: Duration,
    /// Maximum number of idle connections per key.
    pub idle_per_key: usize,
    /// Maximum number of idle connections.
    pub idle: usize,
}

/// Connection for one request at a time. Dropping this value closes the connection immediately.
#[derive(Debug)]
pub struct PooledConnection<K, B, T> {
    /// The connection.
    pub connection: UpstreamConnection<B>,
    key: K,
    /// Value of [`ConnectionPool::epoch`] before the connection was opened.
    epoch: u64,
    _held: T,
}

impl<K, B, T> PooledConnection<K, B, T> {
    /// Creates a connection to `key`. `held` is a guard that is dropped when the connection is
    /// closed. `epoch` is the value of [`ConnectionPool::epoch`] before the connection was opened.
    pub const fn new(connection: UpstreamConnection<B>, key: K, epoch: u64, held: T) -> Self {
        Self {
            connection,
            key,
            epoch,
            _held: held,
        }
    }
}

/// Connection and the time since which it is idle.
type Idle<K, B, T> = (PooledConnection<K, B, T>, Instant);

/// Idle connections by destination.
#[derive(Debug)]
struct PoolState<K, B, T> {
    /// Lists of idle connections, in the order in which they became idle.
    idle: HashMap<K, Vec<Idle<K, B, T>>>,
    idle_count: usize,
    /// True if a task that closes expired idle connections is running.
    is_watched: bool,
}

/// Pool of connections to servers, identified by keys.
#[derive(Debug)]
pub struct ConnectionPool<K, B, T> {
    limits: PoolLimits,
    state: Mutex<PoolState<K, B, T>>,
    epoch: AtomicU64,
}

impl<K, B, T> ConnectionPool<K, B, T>
where
    K: Clone + Eq + Hash + Send + 'static,
    B: Send + 'static,
    T: Send + 'static,
{
    /// Creates an empty pool.
    pub fn new(limits: PoolLimits) -> Arc<Self> {
        let state = PoolState {
            idle: HashMap::new(),
            idle_count: 0,
            is_watched: false,
        };
        Arc::new(Self {
            limits,
            state: Mutex::new(state),
            epoch: AtomicU64::new(0),
        })
    }

    /// Closes the idle connections of the keys that `is_stale` selects. Connections of any key that
    /// are in use now are closed after use instead of becoming idle.
    pub fn invalidate(&self, is_stale: impl Fn(&K) -> bool) {
        // Increment first: a connection that is returned from now on is closed, regardless of its
        // key.
        self.epoch.fetch_add(1, Ordering::SeqCst);
        let mut state = self.state.lock();
        let stale: HashMap<_, _> = state.idle.extract_if(|key, _| is_stale(key)).collect();
        state.idle_count -= stale.values().map(Vec::len).sum::<usize>();
        // Drop the connections after releasing the lock: their guards may run other code.
        drop(state);
        drop(stale);
    }

    /// Returns the number of idle connections.
    #[must_use]
    pub fn idle_count(&self) -> usize {
        self.state.lock().idle_count
    }

    /// Returns the number of calls of [`Self::invalidate`]. The caller must read the value before
    /// opening a connection.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// Takes a connection that has been idle for at most `max_idle`.
    pub fn take(&self, key: &K, max_idle: Duration) -> Option<PooledConnection<K, B, T>> {
        // Dead connections are dropped after the lock is released, because their guards may run
        // other code.
        let mut dead = Vec::new();
        let mut taken = None;
        let mut state = self.state.lock();
        if let Some(list) = state.idle.get_mut(key) {
            // The most recently used connection is the least likely to be closed by now.
            while let Some((mut pooled, since)) = list.pop() {
                if pooled.connection.is_ready() && since.elapsed() <= max_idle {
                    taken = Some(pooled);
                    break;
                }
                dead.push(pooled);
            }
            if list.is_empty() {
                state.idle.remove(key);
            }
        }
        // The dead connections and the taken one were removed from the list.
        state.idle_count -= dead.len() + usize::from(taken.is_some());
        drop(state);
        drop(dead);
        taken
    }

    /// Returns a connection to the pool after its response, as soon as it is ready for a request.
    pub fn give_back(self: &Arc<Self>, mut pooled: PooledConnection<K, B, T>) {
        if pooled.connection.is_ready() {
            return self.insert_idle(pooled);
        }
        // Wait in the background, so that the caller can finish its response.
        let pool = Arc::clone(self);
        // If the connection does not become ready in time, dropping it closes it.
        tokio::spawn(async move {
            if let Ok(true) = timeout(READY_TIMEOUT, pooled.connection.ready()).await {
                pool.insert_idle(pooled);
            }
        });
    }

    /// Returns a connection to the pool, unless the pool is full or was invalidated.
    fn insert_idle(self: &Arc<Self>, pooled: PooledConnection<K, B, T>) {
        let mut state = self.state.lock();
        let key = &pooled.key;
        let of_key = state.idle.get(key).map_or(0, Vec::len);
        // The connection was opened before an invalidation, or the pool is full: close it.
        if pooled.epoch != self.epoch()
            || state.idle_count >= self.limits.idle
            || of_key >= self.limits.idle_per_key
        {
            drop(state);
            return;
        }
        let list = state.idle.entry(key.clone()).or_default();
        list.push((pooled, Instant::now()));
        state.idle_count += 1;
        if !state.is_watched {
            state.is_watched = true;
            tokio::spawn(close_idle(Arc::downgrade(self)));
        }
    }

    /// Closes connections that were idle for too long or that the peer has closed. Returns whether
    /// idle connections remain.
    fn close_expired(&self) -> bool {
        // `closed` is declared before the lock, so that the connections are dropped after the lock
        // is released.
        let mut closed = Vec::new();
        let mut state = self.state.lock();
        for list in state.idle.values_mut() {
            closed.extend(list.extract_if(.., |(pooled, since)| {
                since.elapsed() >= self.limits.idle_time || pooled.connection.has_ended()
            }));
        }
        state.idle.retain(|_, list| !list.is_empty());
        state.idle_count -= closed.len();
        // Decided under the lock: a connection that becomes idle later starts a new task.
        state.is_watched = state.idle_count > 0;
        state.is_watched
    }
}

/// Periodically closes expired idle connections, until no idle connections remain or the pool is
/// dropped.
async fn close_idle<K, B, T>(pool: Weak<ConnectionPool<K, B, T>>)
where
    K: Clone + Eq + Hash + Send + 'static,
    B: Send + 'static,
    T: Send + 'static,
{
    loop {
        let Some(interval) = pool.upgrade().map(|pool| pool.limits.check_interval) else {
            return;
        };
        sleep(interval).await;
        match pool.upgrade() {
            Some(pool) if pool.close_expired() => {}
            _ => return,
        }
    }
}
