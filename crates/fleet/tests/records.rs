//! Contract and faults of all kinds of records, with real servers: versitygw and etcd.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod contract;
mod etcd_cluster;
mod etcd_settings;
mod faults;
mod proxy;
mod sealed;
pub mod servers;
mod store_check;
