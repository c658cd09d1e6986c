//! Limits of direct connections to functions, per owner and in total. A direct connection is a
//! client connection that the process of a function serves itself, without the daemon
//! (`direct_listener.rs`).
//!
//! A *permit* counts towards a limit until it is dropped.
//!
//! A direct connection counts as an in-flight request of the key that owns the function only while
//! a request is in flight. If idle connections counted, clients without a key could exhaust the
//! limit of that key with them.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// Maximum number of direct connections to the functions of an owner. A function process accepts
/// the same number (`TenantLimits::connections`).
pub const MAX_PER_OWNER: usize = 4096;

/// Open direct connections.
#[derive(Debug)]
pub struct DirectConnections {
    /// Maximum number of connections of all owners.
    max: usize,
    open: Mutex<OpenConnections>,
}

/// Numbers of open connections: in total, and by owner (`None` is the host's owner).
#[derive(Debug, Default)]
struct OpenConnections {
    total: usize,
    of_owners: HashMap<Option<String>, usize>,
}

/// Permit of a connection, which is released on drop.
#[derive(Debug)]
pub struct DirectConnectionPermit {
    owner: Option<String>,
    connections: Arc<DirectConnections>,
}

impl DirectConnections {
    /// Limits the connections of all owners to `max`.
    pub fn new(max: usize) -> Arc<Self> {
        Arc::new(Self {
            max,
            open: Mutex::default(),
        })
    }

    /// Acquires a permit for a connection to a function of `owner`, or of the owner of the host if
    /// `owner` is `None`. Returns `None` if a limit is reached.
    pub fn acquire(self: &Arc<Self>, owner: Option<&str>) -> Option<DirectConnectionPermit> {
        let owner = owner.map(str::to_owned);
        let mut open = self.open.lock();
        let of_owner = open.of_owners.get(&owner).copied().unwrap_or(0);
        if open.total >= self.max || of_owner >= MAX_PER_OWNER {
            return None;
        }
        open.total += 1;
        open.of_owners.insert(owner.clone(), of_owner + 1);
        Some(DirectConnectionPermit {
            owner,
            connections: self.clone(),
        })
    }
}

impl Drop for DirectConnectionPermit {
    // Cannot underflow: each permit has incremented both counters.
    fn drop(&mut self) {
        let mut open = self.connections.open.lock();
        open.total -= 1;
        if let Some(count) = open.of_owners.get_mut(&self.owner) {
            *count -= 1;
            // Owners without connections are removed, so the map is bounded by the open
            // connections.
            if *count == 0 {
                open.of_owners.remove(&self.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_limited_per_owner_and_in_total() {
        let connections = DirectConnections::new(MAX_PER_OWNER + 2);
        let acquire = |owner| connections.acquire(owner);
        let mut permits: Vec<_> = (0..MAX_PER_OWNER)
            .map_while(|_| acquire(Some("a")))
            .collect();
        assert_eq!(permits.len(), MAX_PER_OWNER);
        assert!(acquire(Some("a")).is_none());
        let others = [acquire(Some("b")).unwrap(), acquire(None).unwrap()];
        assert!(acquire(Some("b")).is_none(), "total limit");
        permits.pop();
        assert!(acquire(Some("b")).is_some());
        drop((permits, others));
        let open = connections.open.lock();
        assert!(open.total == 0 && open.of_owners.is_empty());
    }
}
