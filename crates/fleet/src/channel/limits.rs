//! Limits of the connections that the listener of a member accepts. The listener's port is open to
//! all hosts of the network, so peers without a certificate must not use up its resources.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// Limits of a [`Server`](super::Server).
#[derive(Debug, Clone)]
pub struct Limits {
    /// Maximum number of connections of one address.
    pub connections_per_address: usize,
    /// Maximum number of connections whose peer has not presented a certificate.
    pub unauthenticated_connections: usize,
    /// Maximum number of connections of members.
    pub member_connections: usize,
    /// Maximum duration of a TLS handshake.
    pub handshake: Duration,
    /// Maximum duration in which the body of a message arrives.
    pub message: Duration,
    /// Maximum duration of a connection without certificate.
    pub join: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_per_address: 64,
            unauthenticated_connections: 256,
            member_connections: 4096,
            handshake: Duration::from_secs(5),
            message: Duration::from_secs(10),
            join: Duration::from_secs(60),
        }
    }
}

/// Counters of open connections.
#[derive(Debug, Default)]
pub(super) struct Connections(Mutex<Counters>);

/// Numbers of open connections.
#[derive(Debug, Default)]
struct Counters {
    /// Open connections by address, including the connections of members.
    by_address: HashMap<IpAddr, usize>,
    /// Connections whose peer has not presented a certificate of the fleet yet.
    unauthenticated: usize,
    /// Connections of members.
    members: usize,
}

/// Open connection. Dropping it decrements the counters.
#[derive(Debug)]
pub(super) struct Admitted {
    connections: Arc<Connections>,
    address: IpAddr,
    /// True after the peer has presented the certificate of a member.
    is_member: bool,
}

impl Connections {
    /// Counts a new connection. `None` if a limit is reached.
    pub(super) fn admit(self: &Arc<Self>, address: IpAddr, limits: &Limits) -> Option<Admitted> {
        // A host can use all addresses of its IPv6 network (usually 64 bits), so the network is
        // counted.
        let address = network(address);
        let mut counters = self.0.lock();
        if counters.unauthenticated >= limits.unauthenticated_connections {
            return None;
        }
        let count = counters.by_address.entry(address).or_default();
        if *count >= limits.connections_per_address {
            return None;
        }
        *count += 1;
        counters.unauthenticated += 1;
        Some(Admitted {
            connections: self.clone(),
            address,
            is_member: false,
        })
    }
}

impl Admitted {
    /// Counts the connection as one of a member. Returns false if the limit is reached.
    pub(super) fn authenticated(&mut self, limits: &Limits) -> bool {
        let mut counters = self.connections.0.lock();
        if counters.members >= limits.member_connections {
            return false;
        }
        counters.members += 1;
        counters.unauthenticated -= 1;
        self.is_member = true;
        true
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut counters = self.connections.0.lock();
        if self.is_member {
            counters.members -= 1;
        } else {
            counters.unauthenticated -= 1;
        }
        if let Some(count) = counters.by_address.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counters.by_address.remove(&self.address);
            }
        }
    }
}

/// Returns an IPv4 address unchanged, and the /64 network of an IPv6 address.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() & !u128::from(u64::MAX)).into()),
        v4 => v4,
    }
}
