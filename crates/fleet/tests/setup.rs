//! Start of a fleet, tokens, and hosts that join.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod bad_joins;
mod fronts;
mod init;
mod join;
mod lab;
mod tokens;
