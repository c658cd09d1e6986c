//! Limits of the number of open client connections, in total and per client address.
//!
//! The listener calls [`ConnectionAdmission::enter`] for each new connection. A client is *unknown*
//! until it has presented a key or reached a sandbox. Unknown clients have lower limits, so that
//! they cannot occupy all connections.

use crate::config::GatewayLimits;
use crate::counters::{GatewayCounters, add, remove};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use thiserror::Error;

/// Counters and limits of connections, in total and per client.
#[derive(Debug)]
pub struct ConnectionAdmission {
    limits: ConnectionLimits,
    unknown_limits: ConnectionLimits,
    state: Mutex<AdmissionState>,
    counters: Arc<GatewayCounters>,
}

/// Limits of one kind of connections.
#[derive(Debug, Clone, Copy)]
struct ConnectionLimits {
    /// Maximum number of connections of all clients.
    total: usize,
    /// Maximum number of connections of one client.
    per_client: usize,
}

/// Open connections.
#[derive(Debug, Default)]
struct AdmissionState {
    /// All open connections.
    open: ConnectionCount,
    /// Open connections of unknown clients.
    unknown: ConnectionCount,
}

/// Connections of one kind.
#[derive(Debug, Default)]
struct ConnectionCount {
    total: usize,
    /// Connections by address of the client.
    clients: HashMap<IpAddr, usize>,
}

impl ConnectionCount {
    /// Checks whether another connection of `client` is permitted.
    fn check(
        &self,
        client: Option<IpAddr>,
        limits: ConnectionLimits,
    ) -> Result<(), ConnectionLimitError> {
        if self.total >= limits.total {
            return Err(ConnectionLimitError::Total);
        }
        let of_client = client.and_then(|client| self.clients.get(&client));
        if of_client.is_some_and(|count| *count >= limits.per_client) {
            return Err(ConnectionLimitError::PerClient);
        }
        Ok(())
    }

    /// Counts a new connection of `client`.
    fn add(&mut self, client: Option<IpAddr>) {
        self.total += 1;
        if let Some(client) = client {
            *self.clients.entry(client).or_default() += 1;
        }
    }

    /// Removes a connection that [`Self::add`] counted.
    fn remove(&mut self, client: Option<IpAddr>) {
        self.total -= 1;
        if let Some(client) = client
            && let Some(count) = self.clients.get_mut(&client)
        {
            *count -= 1;
            // Remove empty entries: otherwise the map would grow with every address ever seen.
            if *count == 0 {
                self.clients.remove(&client);
            }
        }
    }
}

/// Reason for rejecting a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ConnectionLimitError {
    /// The total number of connections has reached its limit.
    #[error("Too many connections are open: try again later")]
    Total,
    /// The client's number of connections has reached its limit.
    #[error("Too many connections from this address are open: close or reuse some")]
    PerClient,
    /// A front (a process without sandboxes that passes connections of clients to the hosts of a
    /// fleet) reaches no host.
    #[error("No host of the fleet can be reached: try again later")]
    NoHost,
}

/// Connection that counts as open until this value is dropped.
#[derive(Debug)]
pub struct ConnectionPermit {
    admission: Arc<ConnectionAdmission>,
    /// `None` if connections of this client are not counted.
    client: Option<IpAddr>,
    /// True if the client presented a key or reached a sandbox.
    known: AtomicBool,
}

impl ConnectionPermit {
    /// Marks the connection as known. Idempotent.
    pub fn mark_known(&self) {
        // Only the first call changes the counters.
        if !self.known.swap(true, Ordering::AcqRel) {
            // The connection still counts towards the limits of all connections.
            self.admission.state().unknown.remove(self.client);
        }
    }

    /// Returns true if the client presented a key or reached a sandbox.
    pub(crate) fn is_known(&self) -> bool {
        self.known.load(Ordering::Acquire)
    }
}

impl ConnectionAdmission {
    pub(crate) fn new(limits: &GatewayLimits, counters: Arc<GatewayCounters>) -> Self {
        Self {
            limits: ConnectionLimits {
                total: limits.connections,
                per_client: limits.connections_per_client,
            },
            unknown_limits: ConnectionLimits {
                total: limits.unknown_connections,
                per_client: limits.unknown_connections_per_client,
            },
            state: Mutex::default(),
            counters,
        }
    }

    fn state(&self) -> MutexGuard<'_, AdmissionState> {
        self.state.lock()
    }

    /// Counts a new connection of an unknown client.
    ///
    /// # Errors
    /// [`ConnectionLimitError`] if a limit is reached.
    pub fn enter(self: &Arc<Self>, ip: IpAddr) -> Result<ConnectionPermit, ConnectionLimitError> {
        // All addresses of one IPv6 network count as one client.
        let client = client(ip);
        let mut state = self.state();
        // Check both limits before counting, so that a rejected connection changes no counter.
        state.open.check(client, self.limits)?;
        state.unknown.check(client, self.unknown_limits)?;
        state.open.add(client);
        state.unknown.add(client);
        add(&self.counters.connections_open, 1);
        add(&self.counters.connections, 1);
        Ok(ConnectionPermit {
            admission: Arc::clone(self),
            client,
            known: AtomicBool::new(false),
        })
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        // The lock is held for both removals, so that no new connection sees the counters in
        // between.
        let mut state = self.admission.state();
        state.open.remove(self.client);
        // A known connection was removed from this count by `mark_known`.
        if !self.is_known() {
            state.unknown.remove(self.client);
        }
        remove(&self.admission.counters.connections_open);
    }
}

/// Returns the address under which a client is counted: the /64 network for IPv6, because a client
/// may have 2^64 addresses. `None` for loopback, which all local programs share.
fn client(ip: IpAddr) -> Option<IpAddr> {
    match ip.to_canonical() {
        ip if ip.is_loopback() => None,
        IpAddr::V6(ip) => Some(Ipv6Addr::from(u128::from(ip) & !u128::from(u64::MAX)).into()),
        ip => Some(ip),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission() -> Arc<ConnectionAdmission> {
        let limits = GatewayLimits {
            connections: 5,
            connections_per_client: 2,
            ..GatewayLimits::default()
        };
        Arc::new(ConnectionAdmission::new(&limits, Arc::default()))
    }

    #[test]
    fn connections_are_bounded_per_client_and_in_total() {
        let admission = admission();
        let enter = |ip: &str| admission.enter(ip.parse().unwrap());
        let first = enter("192.0.2.1").unwrap();
        let second = enter("::ffff:192.0.2.1").unwrap();
        assert_eq!(
            enter("192.0.2.1").unwrap_err(),
            ConnectionLimitError::PerClient
        );
        let other = enter("2001:db8::1").unwrap();
        let same_network = enter("2001:db8::2").unwrap();
        assert_eq!(
            enter("2001:db8::3").unwrap_err(),
            ConnectionLimitError::PerClient
        );
        let local = enter("127.0.0.1").unwrap();
        assert_eq!(enter("127.0.0.1").unwrap_err(), ConnectionLimitError::Total);
        drop(first);
        let third = enter("192.0.2.1").unwrap();
        assert_eq!(admission.counters.totals().connections_open, 5);
        drop((second, other, same_network, local, third));
        assert_eq!(admission.counters.totals().connections_open, 0);
        assert!(admission.state().open.clients.is_empty());
        assert!(admission.state().unknown.clients.is_empty());
    }

    #[test]
    fn a_known_client_frees_a_place_for_an_unknown_one() {
        let limits = GatewayLimits {
            unknown_connections: 3,
            unknown_connections_per_client: 2,
            ..GatewayLimits::default()
        };
        let admission = Arc::new(ConnectionAdmission::new(&limits, Arc::default()));
        let enter = |ip: &str| admission.enter(ip.parse().unwrap());
        let (first, second) = (enter("192.0.2.1").unwrap(), enter("192.0.2.1").unwrap());
        assert_eq!(
            enter("192.0.2.1").unwrap_err(),
            ConnectionLimitError::PerClient
        );
        let other = enter("192.0.2.2").unwrap();
        assert_eq!(enter("127.0.0.1").unwrap_err(), ConnectionLimitError::Total);
        first.mark_known();
        first.mark_known();
        let third = enter("192.0.2.1").unwrap();
        assert_eq!(enter("192.0.2.3").unwrap_err(), ConnectionLimitError::Total);
        drop(first);
        assert_eq!(enter("192.0.2.3").unwrap_err(), ConnectionLimitError::Total);
        drop((second, third, other));
        let state = admission.state();
        assert_eq!((state.open.total, state.unknown.total), (0, 0));
        assert!(state.unknown.clients.is_empty());
    }

    #[test]
    fn local_programs_are_bounded_only_in_total() {
        let admission = admission();
        let permits: Vec<_> = (0..5)
            .map(|_| admission.enter("::1".parse().unwrap()).unwrap())
            .collect();
        assert!(admission.enter("::1".parse().unwrap()).is_err());
        drop(permits);
    }
}
