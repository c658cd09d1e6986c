//! The store over directories and over stores that fail, as one program: each program of tests has
//! the generic code of the object store compiled anew.
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
mod push_pull;
mod random_lives;
mod repack;
mod stragglers;
mod tenants;
mod verify;
