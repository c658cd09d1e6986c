//! `jiffy key`: who may use the control plane of this host.

mod budget;

use crate::cli::{KeyCommand, KeyCreateArgs};
use crate::runtime;
use crate::sandbox::table::age as ago;
use budget::{Budgets, budgets, shown};
use hyper::Method;
use jiff::Timestamp;
use jiffy_api::{Key, Keys, Limits, NewKey, Validity};
use jiffy_daemon::local_daemon;
use jiffy_image::Home;
use serde_json::Value;
use std::process::ExitCode;

/// Runs one subcommand. It works on the file of keys, which a daemon that runs reads at every call.
pub fn run(command: &KeyCommand) -> anyhow::Result<ExitCode> {
    let home = Home::locate()?;
    let keys = Keys::open(home.path())?;
    match command {
        KeyCommand::Create(args) => create(&keys, args)?,
        KeyCommand::Ls { all, json } => {
            let mut found = keys.list()?;
            found.retain(|k| *all || k.revoked_ms.is_none());
            let budgets = runtime()?.block_on(budgets(&home, &found));
            match json {
                true => outln!(
                    "{}",
                    jiffy_client::terminal::json(&with_budgets(&found, &budgets)?)?
                ),
                false => out!("{}", table(&found, &budgets)),
            }
        }
        KeyCommand::Revoke { key, end, json } => {
            let gone = match end {
                true => keys.revoke_and_end(key)?,
                false => keys.revoke(key)?,
            };
            match json {
                true => outln!("{}", jiffy_client::terminal::json(&gone)?),
                false => outln!("{}", gone.id),
            }
            if *end {
                end_on_daemon(&home, &gone)?;
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

fn create(keys: &Keys, args: &KeyCreateArgs) -> anyhow::Result<()> {
    let limits = Limits {
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
    };
    let validity = Validity {
        expires_ms: args.expires,
        addresses: args.allow_from.clone(),
    };
    let made = keys.create_within(&args.name, args.scope.into(), limits, &validity)?;
    show(&made, args.json)
}

/// Has a daemon that runs end what a key has, which is marked for it: the next one does otherwise.
fn end_on_daemon(home: &Home, key: &Key) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let Some(stream) = local_daemon::connect(home).await else {
            errln!("jiffy: no daemon runs; the next one ends the sandboxes of this key");
            return Ok(());
        };
        let client = jiffy_daemon::local_daemon::client_over(home, stream).await?;
        let path = format!("/keys/{}/revoke", key.id);
        let body = serde_json::json!({ "end": true });
        let _: serde_json::Value = client.call(Method::POST, &path, &body).await?;
        errln!("jiffy: its sandboxes and builds have ended");
        Ok(())
    })
}

/// Prints a key whose secret is known only now.
fn show(made: &NewKey, json: bool) -> anyhow::Result<()> {
    if json {
        outln!("{}", jiffy_client::terminal::json(made)?);
    } else {
        outln!("{}", made.secret);
        errln!(
            "jiffy: this is the only time the key is shown; `jiffy key revoke {}` ends it",
            made.key.id
        );
    }
    Ok(())
}

/// The keys, each with its budget where a daemon tells it.
fn with_budgets(keys: &[Key], budgets: &Budgets) -> anyhow::Result<Vec<Value>> {
    let with_budget = |key: &Key| {
        let mut shown = serde_json::to_value(key)?;
        if let (Some(map), Some(budget)) = (shown.as_object_mut(), budgets.get(&key.id)) {
            map.insert("budget".to_owned(), budget.clone());
        }
        Ok(shown)
    };
    keys.iter().map(with_budget).collect()
}

fn table(keys: &[Key], budgets: &Budgets) -> String {
    if keys.is_empty() {
        return "no keys; `jiffy key create` makes one\n".to_owned();
    }
    let mut text = format!(
        "{:<20} {:<16} {:<7} {:<10} {:<10} LIMITS\n",
        "ID", "NAME", "SCOPE", "CREATED", "LAST USED"
    );
    for key in keys {
        let mut limits = shown(&key.limits, budgets.get(&key.id));
        if let Some(validity) = validity(key) {
            limits = format!("{limits}; {validity}");
        }
        if let Some(at) = key.revoked_ms {
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

/// When and from where a key can be used, unless it is always and from everywhere.
fn validity(key: &Key) -> Option<String> {
    let expires = key.expires_ms.map(|at| {
        let text = i64::try_from(at).ok().map(Timestamp::from_millisecond);
        let text = text
            .and_then(Result::ok)
            .map(|at| at.strftime("%Y-%m-%d %H:%M UTC"));
        let verb = match key.is_expired() {
            true => "expired",
            false => "until",
        };
        format!(
            "{verb} {}",
            text.map_or_else(|| at.to_string(), |t| t.to_string())
        )
    });
    let from = match key.addresses.is_empty() {
        true => None,
        false => Some(format!("from {}", key.addresses.join(" "))),
    };
    let all: Vec<String> = expires.into_iter().chain(from).collect();
    (!all.is_empty()).then(|| all.join(", "))
}
