//! Pool of connections into guests: idle connections, and the number of all connections.

use crate::request_body::GuestRequestBody;
use jiffy_http::{ConnectionPool, PoolLimits, PooledBody, PooledConnection};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

const LIMITS: PoolLimits = PoolLimits {
    // Below the 5 s after which common servers close theirs, so that a request seldom crosses a
    // close.
    idle_time: Duration::from_secs(3),
    check_interval: Duration::from_millis(500),
    // Connections of a port of a sandbox: those of a busy client, whose answers come together.
    idle_per_key: 64,
    idle: 1_024,
};

/// A port of a sandbox.
pub(crate) type PoolKey = (String, u16);
/// A connection into a guest.
pub(crate) type GuestConnection =
    PooledConnection<PoolKey, GuestRequestBody, GuestConnectionPermit>;
/// Body of a guest's answer.
pub(crate) type GuestResponseBody = PooledBody<PoolKey, GuestRequestBody, GuestConnectionPermit>;
type IdlePool = ConnectionPool<PoolKey, GuestRequestBody, GuestConnectionPermit>;

/// Number of open connections of each sandbox.
type OpenConnections = Arc<Mutex<HashMap<String, usize>>>;

/// One of the connections a sandbox may have.
#[derive(Debug)]
pub(crate) struct GuestConnectionPermit {
    id: String,
    open: OpenConnections,
}

impl Drop for GuestConnectionPermit {
    fn drop(&mut self) {
        let mut open = self.open.lock();
        if let Some(count) = open.get_mut(&self.id) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.id);
            }
        }
    }
}

/// Connections into guests.
#[derive(Debug)]
pub struct GuestConnectionPool {
    pub(crate) idle: Arc<IdlePool>,
    open: OpenConnections,
}

impl Default for GuestConnectionPool {
    fn default() -> Self {
        Self {
            idle: ConnectionPool::new(LIMITS),
            open: Arc::default(),
        }
    }
}

impl GuestConnectionPool {
    /// Closes the idle connections of a sandbox, and keeps those in use from coming back: after a
    /// pause, a rollback or a kill.
    pub fn invalidate(&self, id: &str) {
        self.idle.invalidate(|(owner, _)| owner == id);
    }

    /// Connections that wait for a request.
    #[must_use]
    pub fn idle_count(&self) -> usize {
        self.idle.idle_count()
    }

    /// Takes one of `most` places for connections of a sandbox.
    pub(crate) fn permit(&self, id: &str, most: usize) -> Option<GuestConnectionPermit> {
        let mut open = self.open.lock();
        let count = open.entry(id.to_owned()).or_default();
        if *count >= most {
            return None;
        }
        *count += 1;
        Some(GuestConnectionPermit {
            id: id.to_owned(),
            open: self.open.clone(),
        })
    }
}
