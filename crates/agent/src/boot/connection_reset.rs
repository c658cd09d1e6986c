//! Resets the TCP connections of the parent in a clone. A clone is a guest that was restored from a
//! snapshot of another sandbox, its parent, which may still run.
//!
//! Without the reset, the parent and the clone would both send on one connection. The parent
//! continues to use the connection, so the peer must not receive the reset: while connections are
//! reset, no packet leaves the guest. Programs in the clone receive `ECONNABORTED` and can
//! reconnect. Connections over loopback addresses have both ends in the clone and are not reset.

mod egress_block;
mod namespaces;
mod sock_diag;

use egress_block::EgressBlock;
use sock_diag::{SockDiag, TcpConnection};
use std::io;

/// Files of this thread's network namespace that contain the number of TCP sockets, for IPv4 and
/// IPv6, and the text before the number. Listening sockets are included.
const COUNTS: [(&str, &str); 2] = [
    ("/proc/thread-self/net/sockstat", "TCP: inuse "),
    ("/proc/thread-self/net/sockstat6", "TCP6: inuse "),
];
/// Number of passes over all connections. A connection that is being established during one pass is
/// found by the next pass.
const RESET_PASSES: usize = 3;

/// Resets every TCP connection of the guest, in all its network namespaces. Connections over
/// loopback addresses are not reset.
pub fn reset() -> io::Result<()> {
    // In most clones there are no connections, and the egress block is not required.
    let has_any = || Ok(has_sockets() && !non_loopback(&SockDiag::open()?)?.is_empty());
    if !namespaces::for_each_namespace(has_any)? {
        return Ok(());
    }
    let _egress_block = EgressBlock::new()?;
    namespaces::for_each_namespace(|| {
        reset_here()?;
        // Continue with the next namespace.
        Ok(false)
    })
    .map(drop)
}

/// Returns false if the counters of this namespace show no TCP sockets. Reading the counters is
/// cheaper than reading the tables of sockets.
fn has_sockets() -> bool {
    let is_zero = |(file, key): (&str, &str)| {
        let text = std::fs::read_to_string(file);
        text.is_ok_and(|text| count(&text, key) == Some(0))
    };
    !COUNTS.into_iter().all(is_zero)
}

/// Returns the number after `key` in the line that starts with `key`.
fn count(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
    rest.split(' ').next()?.parse().ok()
}

/// Returns the connections of this namespace that must be reset.
fn non_loopback(diag: &SockDiag) -> io::Result<Vec<TcpConnection>> {
    let mut all = diag.connections(libc::AF_INET as u8)?;
    all.extend(diag.connections(libc::AF_INET6 as u8)?);
    all.retain(|connection| !connection.is_loopback());
    Ok(all)
}

/// Closes all connections of this network namespace, except connections over the loopback device.
/// Repeats the pass, because a connection may appear while the list is read. Fails if a connection
/// of the first pass remains.
fn reset_here() -> io::Result<()> {
    let diag = SockDiag::open()?;
    let first = non_loopback(&diag)?;
    let mut now = first.clone();
    for _ in 0..RESET_PASSES {
        for connection in &now {
            diag.destroy(connection)?;
        }
        now = non_loopback(&diag)?;
        if now.is_empty() {
            return Ok(());
        }
    }
    // Programs of the clone may open connections meanwhile. Only the connections of the first pass
    // must be closed.
    match now.iter().find(|connection| first.contains(connection)) {
        Some(connection) => Err(io::Error::other(format!(
            "the connection to {} was not closed",
            connection.remote()
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_is_the_number_behind_its_key() {
        let text =
            "sockets: used 12\nTCP: inuse 3 orphan 0 tw 1 alloc 4 mem 0\nUDP: inuse 0 mem 0\n";
        assert_eq!(count(text, COUNTS[0].1), Some(3));
        assert_eq!(
            count("TCP6: inuse 0\nUDP6: inuse 1\n", COUNTS[1].1),
            Some(0)
        );
        assert_eq!(count(text, COUNTS[1].1), None);
        assert_eq!(count("TCP: inuse many\n", COUNTS[0].1), None);
    }

    #[test]
    fn a_listening_socket_counts() {
        let _listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(has_sockets());
    }
}
