//! `jiffy fleet init`: creates a fleet whose first member (host) is this one.
//!
//! *Records* are small objects by which the members agree. The *head* of a sandbox is the record
//! that decides which host may run a stored sandbox.

use super::local::{OwnContent, member_address};
use super::token::join_command;
use crate::cli::FleetInitArgs;
use crate::template::shared;
use jiffy_client::terminal::line;
use jiffy_fleet::EtcdSettings;
use jiffy_fleet::check::CheckReport;
use jiffy_fleet::init::{InitOptions, check_host, check_storage, create_fleet};
use jiffy_fleet::tokens::DEFAULT_VALIDITY;
use jiffy_image::Home;
use jiffy_proto::cpu_level::CpuLevel;
use jiffy_store::host::LastStore;
use serde_json::json;

/// Creates a fleet.
pub fn run(args: &FleetInitArgs) -> anyhow::Result<()> {
    let home = Home::locate()?;
    let target = &args.store;
    check_host(home.path(), &target.store)?;
    let facts = jiffy_daemon::host_facts(&home);
    let content = OwnContent::read(&home)?;
    let address = member_address(&args.member, None)?;
    let options = InitOptions {
        store: target.store.clone(),
        etcd: args.records.clone().map(|url| EtcdSettings {
            ca: args.records_ca.clone(),
            identity: args.records_cert.clone().zip(args.records_key.clone()),
            user: (args.records_user.clone()).zip(args.records_password_file.clone()),
            ..EtcdSettings::new(url)
        }),
        name: address.name,
        domains: args.domain.clone(),
        listen: address.listen,
        address: address.address,
        cpu_level: args.cpu_level.map_or(facts.cpu_level, level_number),
        // Limited only on request: hosts without hardware virtualization cannot limit the features
        // of guests.
        guest_level: args.cpu_level.map(|level| level.to_string()),
        import: content.is_importable(),
    };
    anyhow::ensure!(
        options.cpu_level <= facts.cpu_level,
        "this host does not have the processor level {}: choose a lower --cpu-level",
        args.cpu_level.unwrap_or_default()
    );
    let json = args.output.json;
    let runtime = crate::runtime()?;
    let (settings, token, checks) = runtime.block_on(async {
        let remote = shared::open(target, &home)?;
        let checks = check_storage(&options, &remote).await?;
        if !json {
            show_check(&options.store.to_string(), &checks.store);
            if let (Some((report, warnings)), Some(etcd)) = (&checks.etcd, &options.etcd) {
                show_check(&etcd.url.to_string(), report);
                for warning in warnings {
                    outln!("warning: {}", line(warning));
                }
            }
        }
        let (mut settings, access) = create_fleet(home.path(), &options, &facts, &remote).await?;
        if !address.labels.is_empty() {
            settings.set_labels(home.path(), address.labels)?;
        }
        LastStore::write(&shared::settings(target, &home))?;
        let token = access.create_token(args.uses, DEFAULT_VALIDITY).await?;
        anyhow::Ok((settings, token, checks))
    })?;
    let mut stored = Vec::new();
    for name in &content.stock {
        let pushed = shared::store(&home, name, target);
        match pushed {
            Ok(_) => stored.push(name.clone()),
            // The fleet exists: the template can be pushed later.
            Err(error) => errln!("jiffy: cannot store template {name}: {error:#}"),
        }
    }
    let keys = target
        .store_keys
        .clone()
        .unwrap_or_else(|| home.path().join("store/keys.toml"));
    let url = format!("https://{}", settings.address);
    if json {
        let value = json!({
            "fleet": settings.fleet, "member": settings.member.to_string(),
            "name": settings.name, "store": settings.store,
            "records": settings.records.as_ref().map_or(&settings.store, |etcd| &etcd.url),
            "replaceP50Ms": checks.store.replace_p50_ms,
            "replaceP99Ms": checks.store.replace_p99_ms,
            "storeKeys": keys, "templates": stored, "joinUrl": url, "token": token.to_string(),
        });
        outln!("{}", jiffy_client::terminal::json(&value)?);
        return Ok(());
    }
    match &settings.records {
        Some(etcd) => outln!("records: {}; heads: s3", etcd.url),
        None => outln!("records: s3 (same store); heads: s3"),
    }
    outln!(
        "fleet {} created; this host is {} ({})",
        settings.fleet,
        settings.member,
        settings.name
    );
    outln!(
        "Back up {}: the data in the store cannot be read without it",
        keys.display()
    );
    if !stored.is_empty() {
        outln!("templates in the store: {}", stored.join(", "));
    }
    outln!("Restart the daemon: `systemctl restart jiffy` or `jiffy daemon restart`");
    let command = join_command(&url, &token, DEFAULT_VALIDITY, args.uses);
    outln!("To add a host, run:  {command}");
    Ok(())
}

fn show_check(name: &str, report: &CheckReport) {
    outln!(
        "{}: conditional writes hold ({} rounds x {} writers), replace {:.0} ms p50, {:.0} ms p99",
        line(name),
        report.rounds,
        report.writers,
        report.replace_p50_ms,
        report.replace_p99_ms
    );
}

/// Returns the number of a level. The level `host` has no common features: 0.
fn level_number(level: CpuLevel) -> u8 {
    match level {
        CpuLevel::Host => 0,
        CpuLevel::X86_64V2 => 2,
        CpuLevel::X86_64V3 => 3,
        CpuLevel::X86_64V4 => 4,
    }
}
