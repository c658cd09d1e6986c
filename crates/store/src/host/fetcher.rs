//! Fetcher: fetches the chunks that guests need into the cache of this host. The fetcher is a
//! process that, like guests, outlives the daemon.

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
