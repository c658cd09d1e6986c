//! Pools of connections into guests and to gateways of other hosts. A pool keeps idle connections
//! for reuse. It limits the number of all connections per sandbox. For connections to the gateway
//! of another host, the limit applies to each pair of host and client.
//!
//! A *permit* counts towards a limit until it is dropped.

use crate::request_body::GuestRequestBody;
use jiffy_http::{ConnectionPool, PoolLimits, PooledBody, PooledConnection};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Times and numbers of the idle connections that a pool keeps.
const LIMITS: PoolLimits = PoolLimits {
    // Common servers close connections that are idle for 5 s. The pool drops them earlier, so that
    // a request is seldom sent on a connection that the guest is closing.
    idle_time: Duration::from_secs(3),
    check_interval: Duration::from_millis(500),
    // Per port of a sandbox. Responses to a busy client arrive together and then leave many idle
    // connections.
    idle_per_key: 64,
    idle: 1_024,
};

/// Sandbox id, port, and whether the connection uses TLS. For another host, `Upstream::host` forms
/// the key from host and client.
pub(crate) type PoolKey = (String, u16, bool);
/// Connection into a guest.
pub(crate) type GuestConnection =
    PooledConnection<PoolKey, GuestRequestBody, GuestConnectionPermit>;
/// Body of a guest's response.
pub(crate) type GuestResponseBody = PooledBody<PoolKey, GuestRequestBody, GuestConnectionPermit>;
type IdlePool = ConnectionPool<PoolKey, GuestRequestBody, GuestConnectionPermit>;

/// Number of open connections by the first part of their [`PoolKey`].
type OpenConnections = Arc<Mutex<HashMap<String, usize>>>;

/// Permit for a connection into a sandbox.
#[derive(Debug)]
pub(crate) struct GuestConnectionPermit {
    /// First part of the connection's [`PoolKey`].
    id: String,
    open: OpenConnections,
}

impl Drop for GuestConnectionPermit {
    fn drop(&mut self) {
        let mut open = self.open.lock();
        if let Some(count) = open.get_mut(&self.id) {
            *count -= 1;
            // Remove empty entries, so that the map does not grow with killed sandboxes.
            if *count == 0 {
                open.remove(&self.id);
            }
        }
    }
}

/// Pool of connections into guests, or to gateways of other hosts.
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
    /// Closes the idle connections of a sandbox, and prevents the reuse of its connections in use.
    /// Must be called after a pause, rollback or kill.
    pub fn invalidate(&self, id: &str) {
        self.idle.invalidate(|(owner, ..)| owner == id);
    }

    /// Returns the number of idle connections.
    #[must_use]
    pub fn idle_count(&self) -> usize {
        self.idle.idle_count()
    }

    /// Acquires a permit for a connection. `id` is the first part of its [`PoolKey`]. `None` if
    /// `id` has `limit` connections.
    pub(crate) fn permit(&self, id: &str, limit: usize) -> Option<GuestConnectionPermit> {
        let mut open = self.open.lock();
        let count = open.entry(id.to_owned()).or_default();
        if *count >= limit {
            return None;
        }
        *count += 1;
        Some(GuestConnectionPermit {
            id: id.to_owned(),
            open: self.open.clone(),
        })
    }
}
