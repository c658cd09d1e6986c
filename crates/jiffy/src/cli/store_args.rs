//! Options of the shared snapshot store.

use crate::units;
use clap::Args;
use jiffy_daemon::StoreOptions;
use jiffy_store::StoreUrl;
use std::path::PathBuf;
use std::time::Duration;

/// Options of `jiffy serve` for the shared snapshot store.
#[derive(Debug, Args)]
pub struct StoreArgs {
    /// Shared store for snapshots and paused sandboxes: s3://BUCKET/PREFIX (server and credentials
    /// from the AWS environment variables) or file:///PATH
    #[arg(long, env = "JIFFY_STORE", value_name = "URL")]
    pub store: Option<StoreUrl>,
    /// File with the master keys of the store, equal on all hosts. The file may name a command that
    /// wraps and unwraps keys [default: store/keys.toml in the data directory, created at the first
    /// start]
    #[arg(
        long,
        env = "JIFFY_STORE_KEYS",
        value_name = "FILE",
        requires = "store"
    )]
    pub store_keys: Option<PathBuf>,
    /// Maximum disk space of the store cache [default: a quarter of the file system of the data
    /// directory]
    #[arg(long, value_name = "SIZE", value_parser = units::mebibytes, requires = "store")]
    pub cache_size: Option<u64>,
    /// Maximum upload rate to the store per second [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = units::mebibytes, requires = "store")]
    pub store_upload_limit: Option<u64>,
    /// Timeout in seconds for fetching missing memory of a running guest, and for a request to the
    /// store without progress. A sandbox whose memory does not arrive in time becomes broken
    #[arg(long, value_name = "SECONDS", default_value_t = 60, requires = "store")]
    pub store_timeout: u64,
    /// Interval between garbage collections of the store across all hosts. 0: never on this host
    #[arg(long, value_name = "TIME", default_value = "1d", value_parser = units::duration_or_zero)]
    pub store_gc_interval: Duration,
    /// Let other hosts of the store resume paused sandboxes of this host, and resume theirs here.
    /// A resume of a stored sandbox then requires the store
    #[arg(long, env = "JIFFY_SHARE_SANDBOXES", requires = "store")]
    pub share_sandboxes: bool,
}

impl StoreArgs {
    /// Returns the options of the daemon. `None` without a store. `fleet` is the store of the fleet
    /// of this host.
    ///
    /// # Errors
    /// If the options name another store than the fleet's.
    pub fn options(&self, fleet: Option<&StoreUrl>) -> anyhow::Result<Option<StoreOptions>> {
        let url = match (&self.store, fleet) {
            (Some(url), Some(of_fleet)) if url != of_fleet => anyhow::bail!(
                "the fleet of this host has the store {of_fleet}, but --store or JIFFY_STORE is \
                 {url}: remove the option"
            ),
            (Some(url), _) | (None, Some(url)) => url.clone(),
            (None, None) => return Ok(None),
        };
        Ok(Some(StoreOptions {
            url,
            keys: self.store_keys.clone(),
            cache_mib: self.cache_size,
            upload_mib_per_second: self.store_upload_limit,
            // A timeout of 0 would fail each request.
            timeout: Duration::from_secs(self.store_timeout.max(1)),
            share_sandboxes: self.share_sandboxes,
            gc_interval: Some(self.store_gc_interval).filter(|time| !time.is_zero()),
        }))
    }
}

/// Store of a command that runs without a daemon.
#[derive(Debug, Clone, Args)]
pub struct StoreTargetArgs {
    /// Store: s3://BUCKET/PREFIX or file:///PATH
    #[arg(long, env = "JIFFY_STORE", value_name = "URL")]
    pub store: StoreUrl,
    /// File with the master keys of the store [default: store/keys.toml in the data directory]
    #[arg(long, env = "JIFFY_STORE_KEYS", value_name = "FILE")]
    pub store_keys: Option<PathBuf>,
}
