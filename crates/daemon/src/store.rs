//! Opens the snapshot store that hosts share, and starts its garbage collection.

use crate::{DiskShare, StoreOptions};
use anyhow::Context;
use jiffy_engines::LazyStore;
use jiffy_fleet::Heads;
use jiffy_fleet_core::{Epoch, MemberId, Owner};
use jiffy_image::Home;
use jiffy_store::host::{FetcherProcess, LastStore, RemoteSettings, RemoteStore};
use jiffy_store::{GcOptions, StoreError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// File of the data directory with the number of a host that shares its sandboxes.
const HOST_NUMBER: &str = "store/host-number";
/// Minimum and maximum interval between checks whether a garbage collection is due.
const MIN_GC_CHECK_INTERVAL: Duration = Duration::from_secs(1);
const MAX_GC_CHECK_INTERVAL: Duration = Duration::from_secs(3600);

/// Returns the source of memory for guests that are restored before all their memory is on this
/// host. A separate process fetches the memory and outlives the daemon.
pub fn lazy(
    options: &StoreOptions,
    remote: &Arc<RemoteStore>,
    home: &Home,
) -> anyhow::Result<LazyStore> {
    // The running program, even if its file was replaced.
    let program = PathBuf::from("/proc/self/exe");
    let fetcher = FetcherProcess::new(program, &settings(options, home), &home.run())
        .context("cannot prepare the memory fetcher")?;
    Ok(LazyStore {
        remote: remote.clone(),
        fetcher: Arc::new(fetcher),
        timeout: options.timeout,
    })
}

/// Converts options to the settings of the store client.
fn settings(options: &StoreOptions, home: &Home) -> RemoteSettings {
    let quarter = || DiskShare::Quarter.mebibytes(home);
    // If the size of the file system is unknown, the cache is not limited.
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

/// Opens the store. The start does not fail if the store is not reachable.
pub fn open(options: &StoreOptions, home: &Home) -> anyhow::Result<Arc<RemoteStore>> {
    let settings = settings(options, home);
    let remote = RemoteStore::open(&settings)
        .with_context(|| format!("cannot open the store {}", options.url))?;
    // Commands such as `jiffy store verify` use the store of the last daemon.
    LastStore::write(&settings)?;
    tracing::info!(url = %options.url, "opened the store");
    if let Some(keys) = remote.made_keys() {
        tracing::warn!(
            file = %keys.display(),
            "created the master keys of the store: back up the file, and use it on all hosts with \
             --store-keys; without it the store cannot be decrypted"
        );
    }
    // Check the store in the background: an unreachable store must not delay the start.
    let probe = remote.clone();
    tokio::spawn(async move {
        match probe.check().await {
            Ok(()) => probe.prepare().await,
            Err(e) if e.retry_after().is_some() => {
                tracing::warn!(error = %e, "cannot reach the store");
            }
            Err(e) => tracing::error!(error = %e, "cannot use the store"),
        }
    });
    if let Some(interval) = options.gc_interval {
        tokio::spawn(collect_periodically(remote.clone(), interval));
    }
    Ok(remote)
}

/// Returns the records that decide which host runs a stored sandbox. `None` if this host does not
/// share its sandboxes.
pub fn heads(
    options: &StoreOptions,
    remote: &Arc<RemoteStore>,
    home: &Home,
) -> anyhow::Result<Option<Heads>> {
    if !options.share_sandboxes {
        return Ok(None);
    }
    let member = host_number(&home.path().join(HOST_NUMBER))?;
    tracing::info!(host = %member, "sharing stored sandboxes with the other hosts of the store");
    let owner = Owner {
        member,
        // Epochs count registrations in a fleet. Outside a fleet, a host has only one.
        epoch: Epoch(1),
    };
    Ok(Some(Heads::new(remote.clone(), owner)))
}

/// Returns whether a daemon of this data directory has shared its sandboxes.
pub fn has_shared(home: &Home) -> bool {
    home.path().join(HOST_NUMBER).exists()
}

/// Returns the number of this host, which is random and permanent.
fn host_number(path: &Path) -> anyhow::Result<MemberId> {
    let read = || std::fs::read_to_string(path);
    let text = match read() {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let number = u32::from_le_bytes(random()?).max(1);
            // Write the number completely or not at all: with another number, this host would not
            // recognise the sandboxes that it runs as its own.
            let temporary = path.with_extension("new");
            std::fs::write(&temporary, format!("{number}\n"))
                .and_then(|()| std::fs::File::open(&temporary)?.sync_all())
                .and_then(|()| std::fs::rename(&temporary, path))
                .with_context(|| format!("cannot write {}", path.display()))?;
            format!("{number}")
        }
        read => read.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let number = text.trim().parse().ok().filter(|number| *number > 0);
    let number = number.with_context(|| {
        format!(
            "{} does not contain the number of this host",
            path.display()
        )
    })?;
    Ok(MemberId(number))
}

fn random() -> anyhow::Result<[u8; 4]> {
    let mut bytes = [0; 4];
    getrandom::fill(&mut bytes).context("no random bytes")?;
    Ok(bytes)
}

/// Collects garbage in the store whenever no host has done so for `interval`.
async fn collect_periodically(remote: Arc<RemoteStore>, interval: Duration) {
    let check_interval = (interval / 8).clamp(MIN_GC_CHECK_INTERVAL, MAX_GC_CHECK_INTERVAL);
    loop {
        // The delay varies by process, so that hosts that start together do not collect at the same
        // time.
        let variation = f64::from(std::process::id() % 1000) / 1000.0;
        tokio::time::sleep(check_interval.mul_f64(0.5 + variation / 2.0)).await;
        if let Err(e) = collect(&remote, interval).await {
            tracing::warn!(error = %e, "cannot collect garbage in the store");
        }
    }
}

/// Collects the garbage of all tenants for which a collection is due. A *tenant* is an owner of
/// snapshots in the store, usually an API key.
async fn collect(remote: &RemoteStore, interval: Duration) -> Result<(), StoreError> {
    let shared = &remote.shared;
    let tenants = shared.tenants().await?;
    for name in &tenants.damaged {
        tracing::error!(
            object = name.object,
            reason = name.reason,
            "skipped garbage collection of a store tenant with a damaged name"
        );
    }
    for name in tenants.names {
        let tenant = shared.tenant(&name).await?;
        let options = GcOptions::default();
        match shared.collect_if_due(&tenant, options, interval).await {
            Ok(Some(report)) => tracing::info!(
                tenant = name,
                removed = report.removed,
                bytes = report.removed_bytes,
                rewritten = report.repacked,
                "collected garbage of a store tenant"
            ),
            Ok(None) => {}
            // Damage of one tenant does not prevent the collection of others.
            Err(e @ StoreError::Damaged { .. }) => {
                tracing::warn!(
                    tenant = name, error = %e,
                    "skipped garbage collection of a damaged store tenant; run `jiffy store verify`"
                );
            }
            // Other errors concern the whole store.
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
