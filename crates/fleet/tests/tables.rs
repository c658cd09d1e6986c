//! Tables of several members in one process, on records in memory, in an object store and in etcd.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod changes;
mod contact;
mod faults;
mod lab;
mod secrets;
mod volumes;
