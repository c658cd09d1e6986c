//! Faults in a fleet of three real hosts with microVMs: `jiffy fleet try` in namespaces, with an S3
//! server and optionally etcd.
//!
//! Each test drives one fleet through all of its faults, because the start of a fleet and the
//! detection of a loss take most of the time. The steps print their times.

mod client;
mod etcd_faults;
mod laboratory;
mod operations;
mod sandbox;
mod secrets;
mod sink;
mod store_faults;
mod volumes;
mod webhooks;
