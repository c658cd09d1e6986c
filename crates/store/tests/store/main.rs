//! Tests of the store over directories and over faulty stores. They are a single program, because
//! each test program compiles the generic code of the object store again.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../support/mod.rs"]
mod support;

mod collection;
mod faults;
mod format;
mod kills;
mod local_disk;
mod modules;
mod outages;
mod push_cost;
mod push_pull;
mod random_lives;
mod repack;
mod resume;
mod stragglers;
mod tenants;
mod verify;
