//! Several nodes in one process: membership, verdicts, directory and reservations.
#![allow(clippy::unwrap_used, clippy::panic)]

mod directory;
mod membership;
mod placement;
mod support;
mod transport;
