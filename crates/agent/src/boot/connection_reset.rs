//! Reset of the parent's TCP connections in a clone.
//!
//! Both copies would speak on one connection. The parent keeps it, so the peer must not see the
//! reset: while connections are reset, no packet leaves the guest. Programs in the clone see theirs
//! as aborted (`ECONNABORTED`) and reconnect. Connections over the loopback addresses have both
//! ends in the clone and stay.

mod egress_block;
mod namespaces;
mod sock_diag;

use egress_block::EgressBlock;
use sock_diag::{SockDiag, TcpConnection};
use std::io;

/// Passes over all connections. One that was being made at the first pass is found by the next.
const RESET_PASSES: usize = 3;

/// Resets every TCP connection of the guest, in all its network namespaces, except those over
/// loopback addresses.
pub fn reset() -> io::Result<()> {
    // Most clones have none, and need no silence.
    if !namespaces::for_each_namespace(|| Ok(!non_loopback(&SockDiag::open()?)?.is_empty()))? {
        return Ok(());
    }
    let _hush = EgressBlock::new()?;
    namespaces::for_each_namespace(|| {
        reset_here()?;
        Ok(false)
    })
    .map(drop)
}

/// The connections of this namespace that are to be reset.
fn non_loopback(diag: &SockDiag) -> io::Result<Vec<TcpConnection>> {
    let mut all = diag.connections(libc::AF_INET as u8)?;
    all.extend(diag.connections(libc::AF_INET6 as u8)?);
    all.retain(|connection| !connection.is_loopback());
    Ok(all)
}

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
    // Programs of the clone may connect meanwhile; only the connections of the first pass must be
    // gone.
    match now.iter().find(|connection| first.contains(connection)) {
        Some(connection) => Err(io::Error::other(format!(
            "the connection to {} does not go away",
            connection.remote()
        ))),
        None => Ok(()),
    }
}
