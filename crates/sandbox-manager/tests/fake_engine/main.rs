//! Tests of the sandbox manager with a fake engine. They form one program, so that the fake engine
//! is compiled once.
#![allow(clippy::unwrap_used, clippy::panic)]

mod admission;
mod captures;
mod deadline;
mod events;
mod fake;
mod fetches;
mod folds;
mod full_disk;
mod idle;
mod large_hosts;
mod lifecycle;
mod lost_hosts;
mod missing_memory;
mod model;
mod names;
mod observe;
mod operations;
mod recovery;
mod removal;
mod repair;
mod resume_hold;
mod rollback_in_place;
mod shared;
mod uploads;
mod usage;
mod warm_pool;
