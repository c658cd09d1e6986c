//! The parent's TCP connections, reset in a clone.
//!
//! Both copies would speak on one connection. The parent keeps it, so the other end must hear nothing of this: while connections are
//! reset, nothing leaves the guest. Programs in the clone see theirs as aborted (`ECONNABORTED`) and connect anew. Connections
//! over the loopback addresses have both ends in the clone and stay.

mod diag;
mod hush;
mod namespaces;

use diag::{Connection, Diag};
use hush::Hush;
use std::io;

/// Times that all connections are looked through. One that was being made at the first look is found by the next.
const PASSES: usize = 3;

/// Resets every TCP connection of the guest, in all its network namespaces, except those over loopback addresses.
pub fn reset() -> io::Result<()> {
    // Most clones have none, and need no silence.
    if !namespaces::everywhere(|| Ok(!outside(&Diag::open()?)?.is_empty()))? {
        return Ok(());
    }
    let _hush = Hush::new()?;
    namespaces::everywhere(|| {
        reset_here()?;
        Ok(false)
    })
    .map(drop)
}

/// The connections of this namespace that are to be reset.
fn outside(diag: &Diag) -> io::Result<Vec<Connection>> {
    let mut all = diag.connections(libc::AF_INET as u8)?;
    all.extend(diag.connections(libc::AF_INET6 as u8)?);
    all.retain(|connection| !connection.is_loopback());
    Ok(all)
}

fn reset_here() -> io::Result<()> {
    let diag = Diag::open()?;
    let first = outside(&diag)?;
    let mut now = first.clone();
    for _ in 0..PASSES {
        for connection in &now {
            diag.destroy(connection)?;
        }
        now = outside(&diag)?;
        if now.is_empty() {
            return Ok(());
        }
    }
    // Programs of the clone may connect meanwhile; what was there before must be gone.
    match now.iter().find(|connection| first.contains(connection)) {
        Some(connection) => Err(io::Error::other(format!(
            "the connection to {} does not go away",
            connection.remote()
        ))),
        None => Ok(()),
    }
}
