//! The store that this host shares snapshots in.

use crate::{DiskShare, StoreOptions};
use anyhow::Context;
use jiffy_engines::LazyStore;
use jiffy_image::Home;
use jiffy_remote::{FetcherProcess, RemoteSettings, RemoteStore};
use std::path::PathBuf;
use std::sync::Arc;

/// Memory of `remote` for guests that are restored before all of it has arrived, got by a process
/// that outlives this one.
pub fn lazy(
    options: &StoreOptions,
    remote: &Arc<RemoteStore>,
    home: &Home,
) -> anyhow::Result<LazyStore> {
    // This very program, also when its file has been replaced.
    let program = PathBuf::from("/proc/self/exe");
    let fetcher = FetcherProcess::new(program, &settings(options, home), &home.run());
    let fetcher = fetcher.context("cannot prepare the fetcher of missing memory")?;
    Ok(LazyStore {
        remote: remote.clone(),
        fetcher: Arc::new(fetcher),
        timeout: options.timeout,
    })
}

fn settings(options: &StoreOptions, home: &Home) -> RemoteSettings {
    let quarter = || DiskShare::Quarter.mebibytes(home);
    let cache_mib = options.cache_mib.or_else(quarter).unwrap_or(u64::MAX);
    RemoteSettings {
        url: options.url.clone(),
        keyring: options.keys.clone(),
        home: home.path().to_owned(),
        cache_bytes: cache_mib.saturating_mul(1 << 20),
        upload_bytes_per_second: options
            .upload_mib_per_second
            .map(|mib| mib.saturating_mul(1 << 20)),
    }
}

/// Opens the store. One that does not answer is no failure of the start.
pub fn open(options: &StoreOptions, home: &Home) -> anyhow::Result<Arc<RemoteStore>> {
    let remote = RemoteStore::open(&settings(options, home));
    let remote = remote.with_context(|| format!("cannot use the store {}", options.url))?;
    tracing::info!("opened the store {}", options.url);
    if let Some(keys) = remote.made_keys() {
        tracing::warn!(
            "made {}: nothing in the store can be read without it; keep a copy, and start the other \
             hosts with it (--store-keys)",
            keys.display()
        );
    }
    let probed = remote.clone();
    tokio::spawn(async move {
        if let Err(e) = probed.probe().await {
            tracing::warn!("the store cannot be used for now: {e}");
        }
    });
    Ok(remote)
}
