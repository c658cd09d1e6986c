//! Fetcher: gets the chunks that guests wait for into the cache of this host. It runs in a process
//! that outlives the daemon, as guests do.

mod confine;
mod connection;
mod key_broker;
mod link;
mod parts;
mod process;
mod seccomp;
mod service;

pub use key_broker::{KEY_BROKER_ARGUMENT, main as key_broker_main};
pub(crate) use process::FetcherLock;
pub use process::{FETCHER_ARGUMENT, FetcherSettings, main as fetcher_main};
pub use service::FetchService;
