//! Fetcher: gets the chunks that guests wait for into the cache of this host. It runs in a process
//! that outlives the daemon, as guests do.

mod connection;
mod link;
mod parts;
mod process;
mod service;

pub(crate) use process::FetcherLock;
pub use process::{FETCHER_ARGUMENT, FetcherSettings, main as fetcher_main};
pub use service::FetchService;
