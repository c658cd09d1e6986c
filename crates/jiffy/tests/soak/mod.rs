//! Random operations on real guests whose memory and disks are compared with a model, while
//! daemons, VMMs and sentries are killed. A *sentry* is the process that runs a sandbox on gVisor.
//!
//! `JIFFY_SOAK_SECONDS` sets the duration per engine. `JIFFY_SOAK_SEED` repeats the random choices
//! of an earlier run, as far as the timing permits.

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

use jiffy_test_attributes::jiffy_test;
#[jiffy_test(engine = "each")]
fn random_operations_lose_no_byte_of_memory_or_disk_and_leave_nothing() {
    kills::soak();
}
