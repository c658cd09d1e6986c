//! Random lives of real guests whose memory and disks are compared with a model, while daemons,
//! VMMs and sentries are killed.
//!
//! `JIFFY_SOAK_SECONDS` says how long each engine's part takes, `JIFFY_SOAK_SEED` repeats the
//! throws of an earlier run as far as timing lets it.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../support/mod.rs"]
mod support;

mod api;
mod client;
mod dice;
mod end;
mod guest;
mod lives;
mod model;
mod overlap;
mod spawn;
mod storm;

use std::sync::{Mutex, PoisonError};

/// Guests of both engines at once would only share the processors of a small host.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

#[test]
fn random_lives_lose_no_byte_of_memory_or_disk_and_leave_nothing() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    storm::soak("random_lives_lose_no_byte_of_memory_or_disk_and_leave_nothing");
}

on_gvisor!(random_lives_lose_no_byte_of_memory_or_disk_and_leave_nothing,);
