//! Options of the store that hosts share snapshots in.

use crate::units;
use clap::Args;
use jiffy_daemon::StoreOptions;
use jiffy_store::StoreUrl;
use std::path::PathBuf;
use std::time::Duration;

/// The store that hosts share snapshots in.
#[derive(Debug, Args)]
pub struct StoreArgs {
    /// Upload snapshots, and what paused sandboxes sleep in, to this store: s3://BUCKET/PREFIX,
    /// whose server and credentials the usual AWS variables name, or file:///PATH
    #[arg(long, env = "JIFFY_STORE", value_name = "URL")]
    pub store: Option<StoreUrl>,
    /// Master keys of the store, in a file that may name a command that wraps and unwraps; the same
    /// on all hosts (default: store/keys.toml in the data directory, made at the first start)
    #[arg(
        long,
        env = "JIFFY_STORE_KEYS",
        value_name = "FILE",
        requires = "store"
    )]
    pub store_keys: Option<PathBuf>,
    /// Disk space for what is fetched from the store (default: a quarter of the data directory's
    /// file system)
    #[arg(long, value_name = "SIZE", value_parser = units::mebibytes, requires = "store")]
    pub cache_size: Option<u64>,
    /// Most that is sent to the store per second (default: no limit)
    #[arg(long, value_name = "SIZE", value_parser = units::mebibytes, requires = "store")]
    pub store_upload_limit: Option<u64>,
    /// Seconds for which a guest waits for memory that has not arrived, before it is broken, and
    /// for which a request to the store may bring nothing
    #[arg(long, value_name = "SECONDS", default_value_t = 60, requires = "store")]
    pub store_timeout: u64,
    /// Time between two collections of what no snapshot in the store needs, whichever host does
    /// them; 0: this one does none
    #[arg(long, value_name = "TIME", default_value = "1d", value_parser = units::duration_or_zero)]
    pub store_gc_interval: Duration,
}

impl StoreArgs {
    /// The same for a daemon.
    pub fn options(&self) -> Option<StoreOptions> {
        Some(StoreOptions {
            url: self.store.clone()?,
            keys: self.store_keys.clone(),
            cache_mib: self.cache_size,
            upload_mib_per_second: self.store_upload_limit,
            timeout: Duration::from_secs(self.store_timeout.max(1)),
            gc_interval: Some(self.store_gc_interval).filter(|time| !time.is_zero()),
        })
    }
}

/// A store that a command uses by itself.
#[derive(Debug, Args)]
pub struct StoreTargetArgs {
    /// Store: s3://BUCKET/PREFIX or file:///PATH
    #[arg(long, env = "JIFFY_STORE", value_name = "URL")]
    pub store: StoreUrl,
    /// Master keys of the store (default: store/keys.toml in the data directory)
    #[arg(long, env = "JIFFY_STORE_KEYS", value_name = "FILE")]
    pub store_keys: Option<PathBuf>,
}
