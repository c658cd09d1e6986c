//! Snapshots of a real guest that checks itself: see `tests/guest/snapshot_init.c`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod captured;
mod failures;
mod files;
mod first_use;
mod guest_image;
mod lazy;
mod live;
mod reattach;
mod restore;
mod rollback;
mod stalled_disk;
mod test_fetcher;
mod test_vm;
mod vmm_process;
