//! Random lives of real guests whose memory and disks are compared with a model, while daemons,
//! VMMs and sentries are killed.
//!
//! `JIFFY_SOAK_SECONDS` says how long each engine's part takes, `JIFFY_SOAK_SEED` repeats the
//! throws of an earlier run as far as timing lets it.

mod api;
mod client;
mod final_checks;
mod guest;
mod kills;
mod model;
mod operations;
mod overlap;
mod random;
mod spawn;

use std::sync::{Mutex, PoisonError};

/// Guests of both engines at once would only share the processors of a small host.
static SERIAL: Mutex<()> = Mutex::new(());

#[test]
fn random_operations_lose_no_byte_of_memory_or_disk_and_leave_nothing() {
    let _alone = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
    kills::soak("random_operations_lose_no_byte_of_memory_or_disk_and_leave_nothing");
}

on_gvisor!(random_operations_lose_no_byte_of_memory_or_disk_and_leave_nothing,);
