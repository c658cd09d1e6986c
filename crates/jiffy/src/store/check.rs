//! `jiffy store check`: checks that a store or etcd writes records conditionally, as the hosts of a
//! fleet require.
//!
//! A *record* is a small versioned object by which the hosts of a fleet coordinate. A conditional
//! write replaces a record only if its version has not changed since the writer read it.

use crate::cli::StoreCheckArgs;
use anyhow::Context;
use jiffy_client::terminal::line;
use jiffy_fleet::check::{CheckOptions, CheckReport, check};
use jiffy_fleet::{EtcdRecords, EtcdSettings, Records, StoreRecords};
use jiffy_image::Home;
use jiffy_store::host::LastStore;
use jiffy_store::{BackendSettings, StoreUrl};
use std::process::ExitCode;
use std::sync::Arc;

/// Checks the store or etcd of the arguments.
pub async fn run(args: &StoreCheckArgs) -> anyhow::Result<ExitCode> {
    let (name, records, warnings) = open(args).await?;
    let options = CheckOptions {
        rounds: args.rounds.into(),
        writers: args.writers.into(),
    };
    let report = check(&records, options)
        .await
        .with_context(|| format!("the check of {name} failed"))?;
    if args.json {
        let value = serde_json::json!({
            "checked": name,
            "rounds": report.rounds,
            "writers": report.writers,
            "replaceP50Ms": report.replace_p50_ms,
            "replaceP99Ms": report.replace_p99_ms,
            "warnings": warnings,
        });
        outln!("{}", jiffy_client::terminal::json(&value)?);
    } else {
        show(&name, &report, &warnings);
    }
    Ok(ExitCode::SUCCESS)
}

/// Opens the store or etcd of the arguments. Returns its URL, its records, and warnings for the
/// user.
async fn open(args: &StoreCheckArgs) -> anyhow::Result<(String, Arc<dyn Records>, Vec<String>)> {
    if let Some(url) = &args.records {
        let settings = EtcdSettings {
            ca: args.records_ca.clone(),
            identity: args.records_cert.clone().zip(args.records_key.clone()),
            user: (args.records_user.clone()).zip(args.records_password_file.clone()),
            ..EtcdSettings::new(url.clone())
        };
        let records = EtcdRecords::new(&settings)?;
        let warnings = records.warnings().await?;
        return Ok((url.to_string(), Arc::new(records), warnings));
    }
    let last = LastStore::read(Home::locate()?.path())?;
    let url = super::store_url(args.store.as_ref(), last.as_ref())?;
    // The check must not create the directory of a file system that is not mounted.
    let backend = url.open_existing(BackendSettings::default())?;
    let mut warnings = Vec::new();
    if matches!(url, StoreUrl::Directory(_)) {
        warnings.push(
            "a directory is suitable for hosts that share snapshots, but not for a fleet: a \
             network file system may reorder writes"
                .to_owned(),
        );
    }
    let records = StoreRecords::new(&backend);
    Ok((url.to_string(), Arc::new(records), warnings))
}

/// Prints the result of a check.
fn show(name: &str, report: &CheckReport, warnings: &[String]) {
    outln!(
        "{}: conditional writes are atomic ({} rounds, {} writers)",
        line(name),
        report.rounds,
        report.writers
    );
    outln!(
        "replace: p50 {:.1} ms, p99 {:.1} ms",
        report.replace_p50_ms,
        report.replace_p99_ms
    );
    for warning in warnings {
        outln!("warning: {}", line(warning));
    }
}
