//! How many connections clients may have open.

use crate::config::Limits;
use crate::counters::{Counters, add, remove};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use thiserror::Error;

/// Counts connections, altogether and per client.
#[derive(Debug)]
pub struct Admission {
    most: usize,
    most_per_client: usize,
    state: Mutex<State>,
    counters: Arc<Counters>,
}

#[derive(Debug, Default)]
struct State {
    open: usize,
    clients: HashMap<IpAddr, usize>,
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
}

impl Admission {
    pub(crate) fn new(limits: &Limits, counters: Arc<Counters>) -> Self {
        Self {
            most: limits.connections,
            most_per_client: limits.connections_per_client,
            state: Mutex::default(),
            counters,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one more connection.
    ///
    /// # Errors
    /// [`Full`] if there are too many.
    pub fn enter(self: &Arc<Self>, ip: IpAddr) -> Result<Permit, Full> {
        let client = client(ip);
        let mut state = self.state();
        if state.open >= self.most {
            return Err(Full::Altogether);
        }
        if let Some(client) = client {
            let count = state.clients.entry(client).or_default();
            if *count >= self.most_per_client {
                return Err(Full::Client);
            }
            *count += 1;
        }
        state.open += 1;
        add(&self.counters.connections_open, 1);
        add(&self.counters.connections, 1);
        Ok(Permit {
            admission: Arc::clone(self),
            client,
        })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.admission.state();
        state.open -= 1;
        if let Some(client) = self.client
            && let Some(count) = state.clients.get_mut(&client)
        {
            *count -= 1;
            if *count == 0 {
                state.clients.remove(&client);
            }
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
        assert!(admission.state().clients.is_empty());
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
