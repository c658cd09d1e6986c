//! `jiffy store`: maintains the shared snapshot store directly, without a daemon. The store
//! separates the data of *tenants*, which are the owners of snapshots.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *pack* is an object in the store with many
//! compressed and encrypted chunks. The *data keys* of a tenant encrypt its chunks. They are
//! derived from a secret in the store, which a *master key* of the host encrypts ("wraps"). Each
//! rotation of the data keys adds a *generation* with a new secret.

mod check;
mod copies;
mod show;

use crate::cli::{StoreCommand, StoreGcArgs, StoreLocationArgs, StoreRotateArgs, StoreVerifyArgs};
use anyhow::Context;
use copies::LocalCopies;
use jiffy_client::step_bar::StepBar;
use jiffy_image::Home;
use jiffy_store::host::{LastStore, RemoteSettings, RemoteStore, STORE_TIMEOUT};
use jiffy_store::{
    ChunkUsage, DamagedSnapshot, GcOptions, GcReport, Hash, StoreError, StoreStats, StoreUrl,
    Tenant, TenantKeys, TenantNames, VerifyReport,
};
use serde::Serialize;
use std::process::ExitCode;
use std::sync::Arc;

/// Result of a command for a tenant.
#[derive(Debug, Serialize)]
struct OfTenant<T> {
    tenant: String,
    #[serde(flatten)]
    result: T,
}

/// Statistics of a tenant. `deduplication` and `compression` are ratios that [`ChunkUsage`]
/// computes.
#[derive(Debug, Clone, Default, Serialize)]
struct Figures {
    #[serde(flatten)]
    stats: StoreStats,
    #[serde(flatten)]
    usage: ChunkUsage,
    deduplication: f64,
    compression: f64,
}

/// Result of `jiffy store verify` for a tenant.
#[derive(Debug, Serialize)]
struct Verified {
    #[serde(flatten)]
    report: VerifyReport,
    /// Snapshots with chunks that could not be repaired. `None` without `--repair`.
    #[serde(rename = "left", skip_serializing_if = "Option::is_none")]
    unrepaired: Option<Vec<DamagedSnapshot>>,
}

impl Verified {
    fn is_sound(&self) -> bool {
        match &self.unrepaired {
            // Only chunks can be repaired, and no other objects.
            Some(unrepaired) => unrepaired.is_empty() && self.report.objects.is_empty(),
            None => self.report.is_sound(),
        }
    }
}

/// Runs a subcommand of `jiffy store`.
pub fn run(command: &StoreCommand) -> anyhow::Result<ExitCode> {
    crate::runtime()?.block_on(async {
        match command {
            StoreCommand::Check(args) => check::run(args).await,
            StoreCommand::Gc(args) => gc(args).await,
            StoreCommand::Verify(args) => verify(args).await,
            StoreCommand::Rotate(args) => rotate(args).await,
            StoreCommand::Stats(args) => stats(&args.place).await,
        }
    })
}

/// Returns the store of the arguments, or the store that a daemon used last.
fn store_url(url: Option<&StoreUrl>, last: Option<&LastStore>) -> anyhow::Result<StoreUrl> {
    match (url, last) {
        (Some(url), _) => Ok(url.clone()),
        (None, Some(last)) => Ok(last.url.parse()?),
        (None, None) => anyhow::bail!(
            "no daemon of this data directory has used a store: specify it with --store URL"
        ),
    }
}

/// Opens the store of the arguments, or the store that a daemon used last.
fn open(place: &StoreLocationArgs) -> anyhow::Result<Arc<RemoteStore>> {
    let home = Home::locate()?;
    let last = LastStore::read(home.path())?;
    let url = store_url(place.store.as_ref(), last.as_ref())?;
    // The master keys of another store cannot decrypt this store.
    let last = last.filter(|last| last.url == url.to_string());
    let keyring = place.store_keys.clone();
    let keyring = keyring.or_else(|| last.and_then(|last| last.keyring));
    let own = home.path().join("store/keys.toml");
    // Check for the keys here, because `RemoteStore::open` would create a new file of master keys.
    anyhow::ensure!(
        keyring.is_some() || own.exists(),
        "this host has no master keys of {url}: specify the file with --store-keys"
    );
    let remote = RemoteStore::open(&RemoteSettings {
        url: url.clone(),
        keyring,
        home: home.path().to_owned(),
        // Unlimited: a command for maintenance must read any amount of data and evict no layers.
        cache_bytes: u64::MAX,
        upload_bytes_per_second: None,
        timeout: STORE_TIMEOUT,
    });
    remote.with_context(|| format!("cannot open the store {url}"))
}

/// Returns the names of the store's tenants. Prints a warning for tenants that are skipped.
async fn tenant_names(remote: &RemoteStore) -> anyhow::Result<TenantNames> {
    let tenants = remote.shared.tenants().await?;
    for name in &tenants.damaged {
        errln!(
            "jiffy: {} is damaged: {}; its tenant is skipped and not changed. To restore the name, \
             push or pull a snapshot of the tenant's key with a daemon",
            name.object,
            name.reason
        );
    }
    if tenants.foreign > 0 {
        errln!(
            "jiffy: skipped {} tenants with other master keys or without a name",
            tenants.foreign
        );
    }
    Ok(tenants)
}

/// Returns the exit code of a command on all tenants: a failure if a tenant was skipped because its
/// name is damaged.
fn code_for(tenants: &TenantNames) -> ExitCode {
    if tenants.damaged.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Returns the tenants of the store, and the exit code for skipped tenants.
async fn tenants(remote: &RemoteStore) -> anyhow::Result<(Vec<Arc<Tenant>>, ExitCode)> {
    let names = tenant_names(remote).await?;
    let mut tenants = Vec::new();
    for name in &names.names {
        tenants.push(remote.shared.tenant(name).await?);
    }
    Ok((tenants, code_for(&names)))
}

/// Prints results as JSON.
fn print<T: Serialize>(remote: &RemoteStore, tenants: &[OfTenant<T>]) -> anyhow::Result<()> {
    let value = serde_json::json!({
        "store": remote.url(),
        "tenants": tenants,
        "requests": remote.traffic(),
    });
    outln!("{}", jiffy_client::terminal::json(&value)?);
    Ok(())
}

/// Removes unreferenced data of all tenants. Continues with the next tenant after a failure.
async fn gc(args: &StoreGcArgs) -> anyhow::Result<ExitCode> {
    let remote = open(&args.place)?;
    let options = GcOptions {
        grace: args.grace,
        dry_run: args.dry_run,
        ..GcOptions::default()
    };
    let mut collected = Vec::new();
    let (tenants, mut code) = tenants(&remote).await?;
    for tenant in tenants {
        let bar = StepBar::new(tenant.name());
        let progress = |step, done, total| bar.update(step, done, total);
        let result: Result<GcReport, StoreError> = remote
            .shared
            .collect_with(&tenant, options, &progress)
            .await;
        drop(bar);
        match result {
            Ok(result) => collected.push(OfTenant {
                tenant: tenant.name().to_owned(),
                result,
            }),
            Err(e) => {
                errln!("jiffy: tenant {}: {e}", tenant.name());
                if matches!(e, StoreError::Damaged { .. }) {
                    errln!("jiffy: run `jiffy store verify` to list all damaged data");
                }
                code = ExitCode::FAILURE;
            }
        }
    }
    if args.place.json {
        print(&remote, &collected)?;
    } else {
        show::gc(&collected, args.dry_run, &remote.traffic());
    }
    Ok(code)
}

/// Verifies all data, or the data of the snapshots in the arguments, which may belong to several
/// tenants.
async fn verify(args: &StoreVerifyArgs) -> anyhow::Result<ExitCode> {
    let remote = open(&args.place)?;
    let (mut verified, mut missing) = (Vec::new(), args.ids.clone());
    let (tenants, code) = tenants(&remote).await?;
    for tenant in tenants {
        let mut roots: Vec<Hash> = Vec::new();
        for id in &args.ids {
            if let Some(root) = remote.shared.named(&tenant, id).await? {
                roots.push(root);
                missing.retain(|missing| missing != id);
            }
        }
        // The tenant has none of the requested snapshots.
        if roots.is_empty() && !args.ids.is_empty() {
            continue;
        }
        let only = (!args.ids.is_empty()).then_some(&roots[..]);
        verified.push(OfTenant {
            tenant: tenant.name().to_owned(),
            result: verify_tenant(&remote, &tenant, only, args.repair).await?,
        });
    }
    anyhow::ensure!(
        missing.is_empty(),
        "the store has no snapshot {}",
        missing.join(", ")
    );
    if args.place.json {
        print(&remote, &verified)?;
    } else {
        show::verified(&verified, code == ExitCode::SUCCESS, &remote.traffic());
    }
    let is_sound = verified.iter().all(|verified| verified.result.is_sound());
    Ok(if is_sound { code } else { ExitCode::FAILURE })
}

/// Verifies the data of a tenant, and repairs damaged chunks if `repair` is set.
async fn verify_tenant(
    remote: &RemoteStore,
    tenant: &Arc<Tenant>,
    only: Option<&[Hash]>,
    repair: bool,
) -> anyhow::Result<Verified> {
    let bar = StepBar::new(tenant.name());
    let progress = |step, done, total| bar.update(step, done, total);
    let report = remote.shared.verify_tenant(tenant, only, &progress).await?;
    // Uploads must not reuse damaged packs for deduplication.
    if let Err(e) = remote.shared.distrust(tenant, &report).await {
        errln!("jiffy: cannot exclude damaged packs from deduplication: {e}");
    }
    let unrepaired = if repair && !report.damaged.is_empty() {
        let copies = LocalCopies::new(&remote.cache, Home::locate()?);
        let shared = &remote.shared;
        Some(
            shared
                .repair_all(tenant, &report.damaged, &copies, &progress)
                .await?,
        )
    } else {
        repair.then(Vec::new)
    };
    Ok(Verified { report, unrepaired })
}

/// Wraps the secrets of tenants with the current master key, and creates new data keys if
/// requested.
async fn rotate(args: &StoreRotateArgs) -> anyhow::Result<ExitCode> {
    let remote = open(&args.place)?;
    let tenants = tenant_names(&remote).await?;
    let mut code = code_for(&tenants);
    let mut names = tenants.names;
    // Unknown names are reported before any tenant is changed.
    for name in &args.tenants {
        anyhow::ensure!(
            names.contains(name),
            "the store has no tenant {name}; `jiffy store stats` lists the tenants"
        );
    }
    names.retain(|name| args.tenants.is_empty() || args.tenants.contains(name));
    let mut rotated = Vec::new();
    let bar = StepBar::new("rotate");
    for (done, name) in (0..).zip(&names) {
        bar.update("tenants", done, names.len() as u64);
        let keys = rotate_tenant(&remote, name, args.data_keys).await;
        match keys {
            Ok(result) => rotated.push(OfTenant {
                tenant: name.clone(),
                result,
            }),
            Err(e) => {
                bar.suspend(|| errln!("jiffy: tenant {name}: {e}"));
                code = ExitCode::FAILURE;
            }
        }
    }
    drop(bar);
    if args.place.json {
        print(&remote, &rotated)?;
    } else {
        show::rotated(&rotated, &remote.traffic());
    }
    Ok(code)
}

/// Wraps the secrets of a tenant, and creates a new data key if `data_keys` is set.
async fn rotate_tenant(
    remote: &RemoteStore,
    name: &str,
    data_keys: bool,
) -> Result<TenantKeys, StoreError> {
    // Rewraps the secrets of the existing generations of data keys. The generation that `rotate`
    // adds below needs no rewrap: its secrets are wrapped with the current master key at once.
    let keys = remote.shared.rewrap(name).await?;
    if !data_keys {
        return Ok(keys);
    }
    let tenant = remote.shared.rotate(name).await?;
    Ok(TenantKeys {
        generation: tenant.current()?.generation(),
        ..keys
    })
}

/// Shows the amount of data of all tenants.
async fn stats(place: &StoreLocationArgs) -> anyhow::Result<ExitCode> {
    let remote = open(place)?;
    let mut figures = Vec::new();
    let (tenants, code) = tenants(&remote).await?;
    for tenant in tenants {
        let bar = StepBar::new(tenant.name());
        let progress = |step, done, total| bar.update(step, done, total);
        // Reads all manifests of the tenant, but no chunks.
        let usage = remote.shared.chunk_usage(&tenant, &progress).await?;
        figures.push(OfTenant {
            tenant: tenant.name().to_owned(),
            result: Figures {
                stats: remote.shared.stats(&tenant).await?,
                deduplication: usage.deduplication(),
                compression: usage.compression(),
                usage,
            },
        });
    }
    if place.json {
        print(&remote, &figures)?;
    } else {
        show::stats(&figures, &remote.traffic());
    }
    Ok(code)
}
