//! Snapshots of a real guest that checks itself: see `tests/guest/snapshot_init.c`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod continues;
mod failing;
mod guest;
mod keeping;
mod live;
mod stuck;
mod vm;
