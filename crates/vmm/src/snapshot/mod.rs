//! Snapshots: a machine's state as a value ([`state`]), memory as layers ([`layers`], [`linear`], [`place`]), what was written
//! since ([`scan`]), and writing that down ([`writer`], [`output`]) while the guest runs on ([`child`]).

pub mod child;
pub mod hashes;
pub mod layers;
pub mod linear;
pub mod output;
pub mod place;
pub mod scan;
pub mod state;
pub mod writer;

use crate::error::VmmError;
use nix::errno::Errno;

/// A failed step of a snapshot.
pub(crate) fn failed(what: &'static str) -> impl Fn(Errno) -> VmmError {
    move |e| VmmError::host(what, e)
}
