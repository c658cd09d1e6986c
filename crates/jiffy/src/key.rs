//! `jiffy key`: manages the API keys of this host.
//!
//! The *budget* of a key consists of its limits and their present usage.

mod budget;
mod in_fleet;

use crate::cli::{KeyCommand, KeyCreateArgs, KeyLimitArgs, KeyLimitName};
use crate::runtime;
use crate::sandbox::table::age as ago;
use anyhow::bail;
use budget::{Budgets, budgets, limits_text};
use hyper::Method;
use jiff::Timestamp;
use jiffy_api::{Key, Keys, LimitChanges, Limits, NewKey, Validity};
use jiffy_daemon::local_daemon;
use jiffy_image::Home;
use serde_json::Value;
use std::process::ExitCode;

/// Runs a subcommand. The key database of a single host is changed directly: a running daemon
/// applies the change within half a second. The keys of a fleet are changed through the daemon.
pub fn run(command: &KeyCommand) -> anyhow::Result<ExitCode> {
    let home = Home::locate()?;
    if home.path().join("fleet.toml").exists() {
        return in_fleet::run(&home, command);
    }
    let keys = Keys::open(home.path())?;
    match command {
        KeyCommand::Create(args) => create(&keys, args)?,
        KeyCommand::Ls { all, json } => {
            runtime()?.block_on(list(&home, keys.list()?, *all, *json))?;
        }
        KeyCommand::Limits {
            key,
            limits,
            remove,
            json,
        } => {
            let changes = limit_changes(limits, remove)?;
            show_limits(&keys.change_limits(key, &changes)?, *json)?;
        }
        KeyCommand::Revoke { key, end, json } => {
            let revocation = if *end {
                keys.revoke_and_end(key)?
            } else {
                keys.revoke(key)?
            };
            let revoked = revocation.key;
            if *json {
                outln!("{}", jiffy_client::terminal::json(&revoked)?);
            } else {
                outln!("{}", revoked.id);
            }
            if *end {
                kill_sandboxes(&home, &revoked)?;
            }
        }
        KeyCommand::Rotate {
            key,
            overlap,
            expires,
            json,
        } => {
            let overlap = overlap.unwrap_or_default();
            show(&keys.rotate(key, overlap, *expires)?, *json)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints keys, with their budgets if a daemon runs. Revoked keys are omitted unless `all` is true.
async fn list(home: &Home, mut keys: Vec<Key>, all: bool, json: bool) -> anyhow::Result<()> {
    keys.retain(|key| all || key.revoked_ms.is_none());
    let budgets = budgets(home, &keys).await;
    if json {
        let keys = with_budgets(&keys, &budgets)?;
        outln!("{}", jiffy_client::terminal::json(&keys)?);
    } else {
        out!("{}", table(&keys, &budgets));
    }
    Ok(())
}

/// Creates a key and prints it.
fn create(keys: &Keys, args: &KeyCreateArgs) -> anyhow::Result<()> {
    let limits = limits(&args.limits);
    let validity = Validity {
        expires_ms: args.expires,
        addresses: args.allow_from.clone(),
    };
    let key = keys.create_within(&args.name, args.scope.into(), limits, &validity)?;
    show(&key, args.json)
}

/// Returns the limits that were given as options.
fn limits(args: &KeyLimitArgs) -> Limits {
    Limits {
        max_sandboxes: args.max_sandboxes,
        max_vcpus: args.max_cpus,
        max_memory_mib: args.max_memory,
        creates_per_minute: args.creates_per_minute,
        max_paused: args.max_paused,
        max_snapshots: args.max_snapshots,
        max_templates: args.max_templates,
        max_builds: args.max_builds,
        max_disk_mib: args.max_disk,
        max_exchanges: args.max_exchanges,
        idle_timeout_s: args.idle_timeout,
        snapshot_ack: args.snapshot_ack.map(Into::into),
    }
}

/// Returns a change of limits.
fn limit_changes(args: &KeyLimitArgs, removed: &[KeyLimitName]) -> anyhow::Result<LimitChanges> {
    let changes = LimitChanges {
        set: limits(args),
        removed: removed.iter().map(|name| (*name).into()).collect(),
    };
    if changes == LimitChanges::default() {
        bail!("no limit is given: use an option such as --max-sandboxes 20");
    }
    Ok(changes)
}

/// Prints the limits of a key after a change.
fn show_limits(key: &Key, json: bool) -> anyhow::Result<()> {
    if json {
        outln!("{}", jiffy_client::terminal::json(key)?);
    } else {
        outln!("{}", limits_text(&key.limits, None));
    }
    Ok(())
}

/// Requests a running daemon to kill the sandboxes of a revoked key and to cancel its builds.
/// Without a daemon, the next daemon does so, because [`Keys::revoke_and_end`] has marked the key.
fn kill_sandboxes(home: &Home, key: &Key) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let Some(stream) = local_daemon::connect(home).await else {
            errln!("jiffy: no daemon runs: the next daemon will kill the sandboxes of this key");
            return Ok(());
        };
        let client = jiffy_daemon::local_daemon::client_over(home, stream).await?;
        // The key is already revoked in the database. This call makes the daemon remove the
        // resources of the key at once, and returns when they are removed.
        let path = format!("/keys/{}/revoke", key.id);
        let body = serde_json::json!({ "end": true });
        let _: serde_json::Value = client.call(Method::POST, &path, &body).await?;
        errln!("jiffy: killed the sandboxes and cancelled the builds of the key");
        Ok(())
    })
}

/// Prints a new key with its secret, which is not stored.
fn show(key: &NewKey, json: bool) -> anyhow::Result<()> {
    if json {
        outln!("{}", jiffy_client::terminal::json(key)?);
    } else {
        outln!("{}", key.secret);
        errln!(
            "jiffy: the key is not shown again; revoke it with `jiffy key revoke {}`",
            key.key.id
        );
    }
    Ok(())
}

/// Returns the keys with their budgets, if the daemon reports them.
fn with_budgets(keys: &[Key], budgets: &Budgets) -> anyhow::Result<Vec<Value>> {
    let with_budget = |key: &Key| {
        let mut value = serde_json::to_value(key)?;
        if let (Some(map), Some(budget)) = (value.as_object_mut(), budgets.get(&key.id)) {
            map.insert("budget".to_owned(), budget.clone());
        }
        Ok(value)
    };
    keys.iter().map(with_budget).collect()
}

/// Returns the table of `jiffy key ls`.
fn table(keys: &[Key], budgets: &Budgets) -> String {
    if keys.is_empty() {
        return "no keys; create one with `jiffy key create`\n".to_owned();
    }
    let mut text = format!(
        "{:<20} {:<16} {:<7} {:<10} {:<10} LIMITS\n",
        "ID", "NAME", "SCOPE", "CREATED", "LAST USED"
    );
    for key in keys {
        let mut limits = limits_text(&key.limits, budgets.get(&key.id));
        if let Some(validity) = validity(key) {
            limits = format!("{limits}; {validity}");
        }
        if let Some(at) = key.revoked_ms {
            // The limits of a revoked key have no effect.
            limits = format!("revoked {} ago", ago(at));
        }
        let used = key.used_ms.map_or("never".to_owned(), ago);
        text += &format!(
            "{:<20} {:<16} {:<7} {:<10} {:<10} {limits}\n",
            key.id,
            key.name,
            key.scope.name(),
            ago(key.created_ms),
            used,
        );
    }
    text
}

/// Returns the expiry and the permitted addresses of a key. `None` if the key is valid without
/// restrictions.
fn validity(key: &Key) -> Option<String> {
    let expires = key.expires_ms.map(|at| {
        let text = i64::try_from(at).ok().map(Timestamp::from_millisecond);
        let text = text
            .and_then(Result::ok)
            .map(|at| at.strftime("%Y-%m-%d %H:%M UTC"));
        let verb = if key.is_expired() { "expired" } else { "until" };
        format!(
            "{verb} {}",
            text.map_or_else(|| at.to_string(), |t| t.to_string())
        )
    });
    let from = (!key.addresses.is_empty()).then(|| format!("from {}", key.addresses.join(" ")));
    let all: Vec<String> = expires.into_iter().chain(from).collect();
    (!all.is_empty()).then(|| all.join(", "))
}
