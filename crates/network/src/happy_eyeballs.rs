//! Connections to servers with several addresses, tried in parallel (RFC 8305).

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

/// Timeout of all attempts together.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay after which the next address is tried in parallel (RFC 8305 5).
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);
/// Maximum number of addresses of one name: the number tried within [`CONNECT_TIMEOUT`] if no
/// server responds.
const MAX_ADDRESSES: usize = 40;

/// Returns `addresses` with `port`, alternating between IP versions and starting with IPv4. Returns
/// at most [`MAX_ADDRESSES`].
pub(crate) fn alternate_versions(addresses: &[IpAddr], port: u16) -> Vec<SocketAddr> {
    let of = |v4: bool| addresses.iter().filter(move |ip| ip.is_ipv4() == v4);
    let (mut v4, mut v6) = (of(true), of(false));
    let mut all = Vec::with_capacity(addresses.len());
    while all.len() < addresses.len() {
        let next = [v4.next(), v6.next()].into_iter().flatten();
        all.extend(next.map(|ip| SocketAddr::new(*ip, port)));
    }
    all.truncate(MAX_ADDRESSES);
    all
}

/// Connects to the first of `addresses` that responds. Tries the next address when an attempt fails
/// or takes longer than [`ATTEMPT_DELAY`]. Returns `None` if all attempts fail, or after
/// [`CONNECT_TIMEOUT`].
pub(crate) async fn connect_first<T, F>(
    addresses: Vec<SocketAddr>,
    connect: impl Fn(SocketAddr) -> F,
) -> Option<T>
where
    T: Send + 'static,
    F: Future<Output = Option<T>> + Send + 'static,
{
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    let mut addresses = addresses.into_iter();
    let mut attempts = JoinSet::new();
    loop {
        match addresses.next() {
            // Dropping the handle does not abort the attempt. The set aborts all attempts when this
            // function returns.
            Some(address) => drop(attempts.spawn(connect(address))),
            None if attempts.is_empty() => return None,
            None => {}
        }
        // Without further addresses, wait for the running attempts until the deadline.
        let due = match addresses.len() {
            0 => deadline,
            _ => deadline.min(Instant::now() + ATTEMPT_DELAY),
        };
        match timeout_at(due, attempts.join_next()).await {
            Ok(Some(Ok(Some(connected)))) => return Some(connected),
            // The attempt failed.
            Ok(_) => {}
            Err(_) if Instant::now() >= deadline => return None,
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Returns an address in 192.0.2.0/24 with port 80 for each host number in `hosts`.
    fn addresses(hosts: std::ops::RangeInclusive<u8>) -> Vec<SocketAddr> {
        let address = |n| SocketAddr::from(([192, 0, 2, n], 80));
        hosts.map(address).collect()
    }

    #[test]
    fn versions_alternate_and_the_number_of_addresses_is_bounded() {
        let of = |text: &str| text.parse::<IpAddr>().unwrap();
        let mixed = ["192.0.2.1", "192.0.2.2", "192.0.2.3", "2600::1"].map(of);
        let turns: Vec<IpAddr> = alternate_versions(&mixed, 443)
            .iter()
            .map(SocketAddr::ip)
            .collect();
        let wanted = ["192.0.2.1", "2600::1", "192.0.2.2", "192.0.2.3"].map(of);
        assert_eq!(turns, wanted);
        assert_eq!(
            alternate_versions(&vec![of("2600::1"); 100], 80).len(),
            MAX_ADDRESSES
        );
        assert_eq!(alternate_versions(&[], 80), []);
    }

    #[tokio::test(start_paused = true)]
    async fn an_unresponsive_address_delays_the_next_one_briefly() {
        let began = Instant::now();
        let connect = |address: SocketAddr| async move {
            if address == addresses(7..=7)[0] {
                return Some(address);
            }
            std::future::pending().await
        };
        let found = connect_first(addresses(1..=20), connect).await;
        assert_eq!(found, Some(addresses(7..=7)[0]));
        assert_eq!(began.elapsed(), 6 * ATTEMPT_DELAY);
    }

    #[tokio::test(start_paused = true)]
    async fn failed_attempts_do_not_delay_and_all_attempts_time_out() {
        let began = Instant::now();
        let failing = |_| std::future::ready(None::<()>);
        assert_eq!(connect_first(addresses(1..=20), failing).await, None);
        assert_eq!(connect_first(Vec::new(), failing).await, None);
        assert_eq!(began.elapsed(), Duration::ZERO);
        let silent = |_| std::future::pending::<Option<()>>();
        assert_eq!(connect_first(addresses(1..=2), silent).await, None);
        assert_eq!(began.elapsed(), CONNECT_TIMEOUT);
    }
}
