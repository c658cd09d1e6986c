//! The store that this host shares snapshots in.

use crate::{DiskShare, StoreOptions};
use anyhow::Context;
use jiffy_image::Home;
use jiffy_remote::{RemoteSettings, RemoteStore};
use std::sync::Arc;

/// Opens the store. One that does not answer is no failure of the start.
pub fn open(options: &StoreOptions, home: &Home) -> anyhow::Result<Arc<RemoteStore>> {
    let quarter = || DiskShare::Quarter.mebibytes(home);
    let cache_mib = options.cache_mib.or_else(quarter).unwrap_or(u64::MAX);
    let remote = RemoteStore::open(&RemoteSettings {
        url: options.url.clone(),
        keyring: options.keys.clone(),
        home: home.path().to_owned(),
        cache_bytes: cache_mib.saturating_mul(1 << 20),
        upload_bytes_per_second: options
            .upload_mib_per_second
            .map(|mib| mib.saturating_mul(1 << 20)),
    });
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
