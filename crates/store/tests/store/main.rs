//! Tests of the store over directories, over faulty stores and with S3 servers. They are a single
//! program, because each test program compiles the generic code of the object store again.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../support/hostile_s3.rs"]
mod hostile_s3;
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
mod s3;
mod stragglers;
mod tenants;
mod verify;
