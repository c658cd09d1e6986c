//! Limit of the connections of one API key, over all of its sandboxes.
//!
//! Each connection whose requests receive headers costs the daemon up to 2 MB of memory.
//!
//! A *permit* counts towards a limit until it is dropped.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// Number of open connections by owner. Owners without connections are absent.
#[derive(Clone)]
pub(crate) struct ConnectionLimit {
    /// Open connections by owner.
    open: Arc<Mutex<HashMap<String, usize>>>,
    maximum: usize,
}

/// Permit for a connection. Dropping this value releases it.
pub(crate) struct ConnectionPermit {
    limit: ConnectionLimit,
    owner: String,
}

impl ConnectionLimit {
    /// Creates a limit of `maximum` connections per owner.
    pub fn new(maximum: usize) -> Self {
        Self {
            open: Arc::default(),
            maximum,
        }
    }

    /// Returns a permit for a connection of `owner`. `None` if the limit is reached.
    pub fn acquire(&self, owner: &str) -> Option<ConnectionPermit> {
        let mut open = self.open.lock();
        let count = open.entry(owner.to_owned()).or_default();
        if *count >= self.maximum {
            return None;
        }
        *count += 1;
        Some(ConnectionPermit {
            limit: self.clone(),
            owner: owner.to_owned(),
        })
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut open = self.limit.open.lock();
        if let Some(count) = open.get_mut(&self.owner) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_connections_of_one_key_do_not_count_for_another() {
        let limit = ConnectionLimit::new(2);
        let first = limit.acquire("a").unwrap();
        let second = limit.acquire("a").unwrap();
        assert!(limit.acquire("a").is_none());
        let other = limit.acquire("b").unwrap();
        drop(first);
        let third = limit.acquire("a").unwrap();
        assert!(limit.acquire("a").is_none());
        drop((second, third, other));
        assert!(limit.open.lock().is_empty());
    }
}
