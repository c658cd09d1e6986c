//! Keys of a fleet, through the daemon of this host.

use super::budget::budgets;
use super::{limits, show, table, with_budgets};
use crate::cli::{KeyCommand, KeyCreateArgs};
use crate::runtime;
use anyhow::{Context, bail};
use hyper::Method;
use jiff::Timestamp;
use jiffy_api::{Key, Limits, NewKey, Scope};
use jiffy_api_types::{
    ApiKey, CreateKey, KeyLimits, KeyScope, Moment, NewApiKey, RevokeKey, RevokedKey, RotateKey,
};
use jiffy_client::Client;
use jiffy_daemon::local_daemon;
use jiffy_image::Home;
use std::process::ExitCode;

/// Runs a subcommand.
pub fn run(home: &Home, command: &KeyCommand) -> anyhow::Result<ExitCode> {
    runtime()?.block_on(execute(home, command))?;
    Ok(ExitCode::SUCCESS)
}

async fn execute(home: &Home, command: &KeyCommand) -> anyhow::Result<()> {
    let Some(stream) = local_daemon::connect(home).await else {
        bail!("this host is a member of a fleet, and its daemon does not run: start `jiffy serve`");
    };
    let client = local_daemon::client_over(home, stream).await?;
    match command {
        KeyCommand::Create(args) => {
            let body = new_key(args)?;
            let created: NewApiKey = client.call(Method::POST, "/keys", &body).await?;
            show(&with_secret(created)?, args.json)
        }
        KeyCommand::Ls { all, json } => {
            let listed: Vec<ApiKey> = client.call(Method::GET, "/keys", &()).await?;
            let keys = listed.into_iter().map(key);
            let mut keys = keys.collect::<anyhow::Result<Vec<Key>>>()?;
            keys.retain(|key| *all || key.revoked_ms.is_none());
            let budgets = budgets(home, &keys).await;
            if *json {
                let keys = with_budgets(&keys, &budgets)?;
                outln!("{}", jiffy_client::terminal::json(&keys)?);
            } else {
                out!("{}", table(&keys, &budgets));
            }
            Ok(())
        }
        KeyCommand::Revoke { key, end, json } => revoke(&client, key, *end, *json).await,
        KeyCommand::Rotate {
            key,
            overlap,
            expires,
            json,
        } => {
            let overlap = overlap.unwrap_or_default();
            let body = RotateKey {
                overlap_ms: u64::try_from(overlap.as_millis()).unwrap_or(u64::MAX),
                expires_at: expires.map(moment).transpose()?,
            };
            let path = path(key, "rotate");
            let rotated: NewApiKey = client.call(Method::POST, &path, &body).await?;
            show(&with_secret(rotated)?, *json)
        }
    }
}

async fn revoke(client: &Client, which: &str, end: bool, json: bool) -> anyhow::Result<()> {
    let path = path(which, "revoke");
    let revoked: RevokedKey = client.call(Method::POST, &path, &RevokeKey { end }).await?;
    if json {
        outln!("{}", jiffy_client::terminal::json(&revoked)?);
    } else {
        outln!("{}", revoked.key_id);
    }
    if !revoked.unconfirmed_hosts.is_empty() {
        errln!(
            "jiffy: {} did not confirm the revocation: without contact to the fleet, a host \
             rejects keys after 60 s",
            revoked.unconfirmed_hosts.join(", ")
        );
    }
    Ok(())
}

/// Returns the path of a call on a key.
fn path(which: &str, call: &str) -> String {
    let which = percent_encoding::utf8_percent_encode(which, percent_encoding::NON_ALPHANUMERIC);
    format!("/keys/{which}/{call}")
}

fn new_key(args: &KeyCreateArgs) -> anyhow::Result<CreateKey> {
    let limits = limits(args);
    Ok(CreateKey {
        name: Some(args.name.clone()),
        scope: match Scope::from(args.scope) {
            Scope::Admin => KeyScope::Admin,
            Scope::Create => KeyScope::Create,
            Scope::Read => KeyScope::Read,
        },
        limits: KeyLimits {
            sandboxes: limits.max_sandboxes,
            vcpus: limits.max_vcpus,
            memory_mb: limits.max_memory_mib,
            creates_per_minute: limits.creates_per_minute,
            paused: limits.max_paused,
            snapshots: limits.max_snapshots,
            templates: limits.max_templates,
            builds: limits.max_builds,
            exchanges: limits.max_exchanges,
            disk_mb: limits.max_disk_mib,
        },
        expires_at: args.expires.map(moment).transpose()?,
        addresses: args.allow_from.clone(),
    })
}

fn with_secret(new: NewApiKey) -> anyhow::Result<NewKey> {
    Ok(NewKey {
        key: key(new.key)?,
        secret: new.secret,
    })
}

/// Returns a key as the commands print it.
fn key(shown: ApiKey) -> anyhow::Result<Key> {
    let limits = shown.limits;
    Ok(Key {
        id: shown.key_id,
        name: shown.name,
        scope: match shown.scope {
            KeyScope::Admin => Scope::Admin,
            KeyScope::Create => Scope::Create,
            KeyScope::Read => Scope::Read,
        },
        limits: Limits {
            max_sandboxes: limits.sandboxes,
            max_vcpus: limits.vcpus,
            max_memory_mib: limits.memory_mb,
            creates_per_minute: limits.creates_per_minute,
            max_paused: limits.paused,
            max_snapshots: limits.snapshots,
            max_templates: limits.templates,
            max_builds: limits.builds,
            max_disk_mib: limits.disk_mb,
            max_exchanges: limits.exchanges,
        },
        created_ms: milliseconds(&shown.created_at)?,
        used_ms: shown.used_at.as_ref().map(milliseconds).transpose()?,
        revoked_ms: shown.revoked_at.as_ref().map(milliseconds).transpose()?,
        expires_ms: shown.expires_at.as_ref().map(milliseconds).transpose()?,
        addresses: shown.addresses,
        end_ms: None,
    })
}

fn milliseconds(at: &Moment) -> anyhow::Result<u64> {
    let time: Timestamp = at.0.parse().context("the daemon sent an invalid time")?;
    Ok(u64::try_from(time.as_millisecond()).unwrap_or(0))
}

fn moment(ms: u64) -> anyhow::Result<Moment> {
    let ms = i64::try_from(ms).unwrap_or(i64::MAX);
    Ok(Moment(Timestamp::from_millisecond(ms)?.to_string()))
}
