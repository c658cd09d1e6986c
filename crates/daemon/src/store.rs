//! The store that this host shares snapshots in.

use crate::{DiskShare, StoreOptions};
use anyhow::Context;
use jiffy_engines::LazyStore;
use jiffy_image::Home;
use jiffy_store::host::{FetcherProcess, LastStore, RemoteSettings, RemoteStore};
use jiffy_store::{GcOptions, StoreError};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Shortest and longest time between two looks at the last collection of a store.
const MIN_GC_PAUSE: Duration = Duration::from_secs(1);
const MAX_GC_PAUSE: Duration = Duration::from_secs(3600);

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
        timeout: options.timeout,
    }
}

/// Opens the store. One that does not answer is no failure of the start.
pub fn open(options: &StoreOptions, home: &Home) -> anyhow::Result<Arc<RemoteStore>> {
    let settings = settings(options, home);
    let remote = RemoteStore::open(&settings);
    let remote = remote.with_context(|| format!("cannot use the store {}", options.url))?;
    LastStore::write(&settings)?;
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
    if let Some(interval) = options.gc_interval {
        tokio::spawn(collect_at(remote.clone(), interval));
    }
    Ok(remote)
}

/// Collects what nothing in the store needs, whenever no host has for `interval`.
async fn collect_at(remote: Arc<RemoteStore>, interval: Duration) {
    let pause = (interval / 8).clamp(MIN_GC_PAUSE, MAX_GC_PAUSE);
    loop {
        // Hosts that start together do not ask together.
        let part = f64::from(std::process::id() % 1000) / 1000.0;
        tokio::time::sleep(pause.mul_f64(0.5 + part / 2.0)).await;
        if let Err(e) = collect(&remote, interval).await {
            tracing::warn!("the store is not collected for now: {e}");
        }
    }
}

async fn collect(remote: &RemoteStore, interval: Duration) -> Result<(), StoreError> {
    let shared = &remote.shared;
    let tenants = shared.tenants().await?;
    for name in &tenants.damaged {
        tracing::error!(
            object = name.object,
            reason = name.reason,
            "the name of a tenant of the store is damaged: the tenant is not collected"
        );
    }
    for name in tenants.names {
        let tenant = shared.tenant(&name).await?;
        let options = GcOptions::default();
        match shared.collect_if_due(&tenant, options, interval).await {
            Ok(Some(report)) => tracing::info!(
                removed = report.removed,
                bytes = report.removed_bytes,
                rewritten = report.repacked,
                "collected the store's tenant {name}"
            ),
            Ok(None) => {}
            // One tenant's damage is nothing to the others.
            Err(e @ StoreError::Damaged { .. }) => {
                tracing::warn!("tenant {name} is not collected; see `jiffy store verify`: {e}");
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
