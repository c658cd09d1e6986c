//! Sandboxes of a host, with an engine that is none: one program for all themes, which share most
//! of what they are made of.
#![allow(clippy::unwrap_used, clippy::panic)]

mod admission;
mod captures;
mod deadline;
mod fake;
mod fetches;
mod folds;
mod full_disk;
mod large_hosts;
mod lifecycle;
mod mending;
mod missing_memory;
mod model;
mod names;
mod observe;
mod operations;
mod recovery;
mod removal;
mod rollback_in_place;
mod uploads;
mod warm_pool;
