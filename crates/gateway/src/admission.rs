//! How many connections clients may have open.

use crate::config::Limits;
use crate::counters::{Counters, add, remove};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use thiserror::Error;

/// Counts connections, altogether and per client.
#[derive(Debug)]
pub struct Admission {
    most: Most,
    most_unknown: Most,
    state: Mutex<State>,
    counters: Arc<Counters>,
}

/// Bounds on one kind of connections.
#[derive(Debug, Clone, Copy)]
struct Most {
    altogether: usize,
    per_client: usize,
}

#[derive(Debug, Default)]
struct State {
    /// All that are open.
    open: Count,
    /// Those whose client is not known.
    unknown: Count,
}

/// Connections of one kind.
#[derive(Debug, Default)]
struct Count {
    altogether: usize,
    clients: HashMap<IpAddr, usize>,
}

impl Count {
    fn check(&self, client: Option<IpAddr>, most: Most) -> Result<(), Full> {
        if self.altogether >= most.altogether {
            return Err(Full::Altogether);
        }
        let of_client = client.and_then(|client| self.clients.get(&client));
        if of_client.is_some_and(|count| *count >= most.per_client) {
            return Err(Full::Client);
        }
        Ok(())
    }

    fn add(&mut self, client: Option<IpAddr>) {
        self.altogether += 1;
        if let Some(client) = client {
            *self.clients.entry(client).or_default() += 1;
        }
    }

    fn remove(&mut self, client: Option<IpAddr>) {
        self.altogether -= 1;
        if let Some(client) = client
            && let Some(count) = self.clients.get_mut(&client)
        {
            *count -= 1;
            if *count == 0 {
                self.clients.remove(&client);
            }
        }
    }
}

/// Why a connection is turned away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Full {
    /// All together have too many.
    #[error("Too many connections are open: try again later")]
    Altogether,
    /// This client has too many.
    #[error("Too many connections from this address are open: close some, or use them again")]
    Client,
}

/// A connection that counts as open until this is dropped.
#[derive(Debug)]
pub struct Permit {
    admission: Arc<Admission>,
    /// None: this client is not counted.
    client: Option<IpAddr>,
    /// Whether its client is known.
    known: AtomicBool,
}

impl Permit {
    /// Counts the connection among those whose clients are known from now on.
    pub(crate) fn is_known(&self) {
        if !self.known.swap(true, Ordering::AcqRel) {
            self.admission.state().unknown.remove(self.client);
        }
    }

    /// Whether its client is known.
    pub(crate) fn known(&self) -> bool {
        self.known.load(Ordering::Acquire)
    }
}

impl Admission {
    pub(crate) fn new(limits: &Limits, counters: Arc<Counters>) -> Self {
        Self {
            most: Most {
                altogether: limits.connections,
                per_client: limits.connections_per_client,
            },
            most_unknown: Most {
                altogether: limits.unknown_connections,
                per_client: limits.unknown_connections_per_client,
            },
            state: Mutex::default(),
            counters,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one more connection, of a client that is not known yet.
    ///
    /// # Errors
    /// [`Full`] if there are too many.
    pub fn enter(self: &Arc<Self>, ip: IpAddr) -> Result<Permit, Full> {
        let client = client(ip);
        let mut state = self.state();
        state.open.check(client, self.most)?;
        state.unknown.check(client, self.most_unknown)?;
        state.open.add(client);
        state.unknown.add(client);
        add(&self.counters.connections_open, 1);
        add(&self.counters.connections, 1);
        Ok(Permit {
            admission: Arc::clone(self),
            client,
            known: AtomicBool::new(false),
        })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.admission.state();
        state.open.remove(self.client);
        if !self.known() {
            state.unknown.remove(self.client);
        }
        remove(&self.admission.counters.connections_open);
    }
}

/// Whom an address stands for; none for loopback, which all local programs share. A network of IPv6 is one client: each has 2^64 addresses.
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

    fn admission() -> Arc<Admission> {
        let limits = Limits {
            connections: 5,
            connections_per_client: 2,
            ..Limits::default()
        };
        Arc::new(Admission::new(&limits, Arc::default()))
    }

    #[test]
    fn a_client_has_its_share_and_all_together_theirs() {
        let admission = admission();
        let enter = |ip: &str| admission.enter(ip.parse().unwrap());
        let first = enter("192.0.2.1").unwrap();
        let second = enter("::ffff:192.0.2.1").unwrap();
        assert_eq!(enter("192.0.2.1").unwrap_err(), Full::Client);
        let other = enter("2001:db8::1").unwrap();
        let same_network = enter("2001:db8::2").unwrap();
        assert_eq!(enter("2001:db8::3").unwrap_err(), Full::Client);
        let local = enter("127.0.0.1").unwrap();
        assert_eq!(enter("127.0.0.1").unwrap_err(), Full::Altogether);
        drop(first);
        let third = enter("192.0.2.1").unwrap();
        assert_eq!(admission.counters.totals().connections_open, 5);
        drop((second, other, same_network, local, third));
        assert_eq!(admission.counters.totals().connections_open, 0);
        assert!(admission.state().open.clients.is_empty());
        assert!(admission.state().unknown.clients.is_empty());
    }

    #[test]
    fn a_client_that_is_known_makes_room_for_those_that_are_not() {
        let limits = Limits {
            unknown_connections: 3,
            unknown_connections_per_client: 2,
            ..Limits::default()
        };
        let admission = Arc::new(Admission::new(&limits, Arc::default()));
        let enter = |ip: &str| admission.enter(ip.parse().unwrap());
        let (first, second) = (enter("192.0.2.1").unwrap(), enter("192.0.2.1").unwrap());
        assert_eq!(enter("192.0.2.1").unwrap_err(), Full::Client);
        let other = enter("192.0.2.2").unwrap();
        assert_eq!(enter("127.0.0.1").unwrap_err(), Full::Altogether);
        first.is_known();
        first.is_known();
        let third = enter("192.0.2.1").unwrap();
        assert_eq!(enter("192.0.2.3").unwrap_err(), Full::Altogether);
        drop(first);
        assert_eq!(enter("192.0.2.3").unwrap_err(), Full::Altogether);
        drop((second, third, other));
        let state = admission.state();
        assert_eq!((state.open.altogether, state.unknown.altogether), (0, 0));
        assert!(state.unknown.clients.is_empty());
    }

    #[test]
    fn local_programs_are_bounded_only_altogether() {
        let admission = admission();
        let permits: Vec<_> = (0..5)
            .map(|_| admission.enter("::1".parse().unwrap()).unwrap())
            .collect();
        assert!(admission.enter("::1".parse().unwrap()).is_err());
        drop(permits);
    }
}
