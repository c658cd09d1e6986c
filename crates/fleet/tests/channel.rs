//! Channel between members: trust, limits, and lost or frozen peers.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod limits;
mod lost_peers;
mod members;
mod streams;
mod trust;
