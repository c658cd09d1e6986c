//! [`Rejections`]: combines rejected calls in the audit log. A client that sends many invalid
//! requests must not displace other entries.

use crate::audit::AuditedCall;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

/// Period in which the rejected calls of a client are counted.
const PERIOD: Duration = Duration::from_secs(60);
/// Number of rejected calls of a client in a period that are recorded individually.
const MAX_INDIVIDUAL: u64 = 5;

/// Client and reason of rejected calls. All members are `None` for further clients.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Client {
    network: Option<String>,
    key: Option<String>,
    status: Option<u16>,
}

/// Rejected calls of one client in the current period.
#[derive(Debug)]
struct Counter {
    since: Instant,
    /// Number of rejections that were recorded individually.
    individual: u64,
    /// The last call that was not recorded, with the number of such calls.
    counted: Option<AuditedCall>,
}

/// Rejected calls by client.
#[derive(Debug)]
pub(crate) struct Rejections {
    counters: HashMap<Client, Counter>,
    max_clients: usize,
}

impl Rejections {
    /// Creates counters for at most `max_clients` clients. The calls of further clients are counted
    /// together.
    pub fn new(max_clients: usize) -> Self {
        Self {
            counters: HashMap::new(),
            max_clients,
        }
    }

    /// Adds a rejected call. Returns the entries to record.
    pub fn add(&mut self, call: AuditedCall, now: Instant) -> Vec<AuditedCall> {
        let mut client = Client {
            network: call.address.as_deref().map(network),
            key: call.key.clone(),
            status: Some(call.status),
        };
        let mut entries = Vec::new();
        if !self.counters.contains_key(&client) && self.counters.len() >= self.max_clients {
            let all = false;
            entries = self.take_counted(now, all);
            if self.counters.len() >= self.max_clients {
                client = Client::default();
            }
        }
        let counter = self.counters.entry(client).or_insert(Counter {
            since: now,
            individual: 0,
            counted: None,
        });
        if now.duration_since(counter.since) >= PERIOD {
            entries.extend(counter.counted.take());
            counter.since = now;
            counter.individual = 0;
        }
        if counter.individual < MAX_INDIVIDUAL {
            counter.individual += 1;
            entries.push(call);
        } else {
            let count = counter.counted.as_ref().map_or(0, |counted| counted.count);
            counter.counted = Some(AuditedCall {
                count: count + 1,
                ..call
            });
        }
        entries
    }

    /// Removes the clients whose period is over. With `all`, removes all clients. Returns the
    /// entries to record.
    pub fn take_counted(&mut self, now: Instant, all: bool) -> Vec<AuditedCall> {
        let mut entries = Vec::new();
        self.counters.retain(|_, counter| {
            let is_over = all || now.duration_since(counter.since) >= PERIOD;
            if is_over {
                entries.extend(counter.counted.take());
            }
            !is_over
        });
        entries
    }
}

/// Returns the network of a client: for IPv6 its /64 network, because a client may have 2^64
/// addresses.
fn network(address: &str) -> String {
    match address.parse().map(|ip: IpAddr| ip.to_canonical()) {
        Ok(IpAddr::V6(ip)) => Ipv6Addr::from(u128::from(ip) & !u128::from(u64::MAX)).to_string(),
        Ok(ip) => ip.to_string(),
        Err(_) => address.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_CLIENTS: usize = 100;

    fn call(address: impl ToString) -> AuditedCall {
        AuditedCall {
            address: Some(address.to_string()),
            ..AuditedCall::new("GET /sandboxes".to_owned(), 401)
        }
    }

    #[test]
    fn memory_is_bounded_and_no_call_is_lost() {
        let mut rejections = Rejections::new(MAX_CLIENTS);
        let now = Instant::now();
        let mut recorded = 0;
        for n in 0..50_000 {
            let entries = rejections.add(call(n), now);
            recorded += entries.iter().map(|call| call.count).sum::<u64>();
        }
        assert!(rejections.counters.len() <= MAX_CLIENTS + 1);
        let rest = rejections.take_counted(now, true);
        recorded += rest.iter().map(|call| call.count).sum::<u64>();
        assert_eq!(recorded, 50_000);
    }

    #[test]
    fn a_period_ends_with_an_entry_for_its_counted_calls() {
        let mut rejections = Rejections::new(MAX_CLIENTS);
        let now = Instant::now();
        let individual = (0..25).flat_map(|_| rejections.add(call(1), now)).count();
        // The first calls of a client in a period are entries of their own.
        assert_eq!(individual, 5);
        let counted = rejections.add(call(1), now + PERIOD);
        let counts: Vec<_> = counted.iter().map(|call| call.count).collect();
        assert_eq!(counts, [20, 1]);
    }

    #[test]
    fn addresses_of_one_network_are_one_client() {
        let mut rejections = Rejections::new(MAX_CLIENTS);
        let now = Instant::now();
        for n in 0..1000 {
            rejections.add(call(format!("2001:db8::{n:x}")), now);
        }
        assert_eq!(rejections.counters.len(), 1);
        rejections.add(call("2001:db8:0:1::1"), now);
        rejections.add(call("192.0.2.1"), now);
        rejections.add(call("::ffff:192.0.2.1"), now);
        assert_eq!(rejections.counters.len(), 3);
    }
}
