//! Keys of a fleet, through the daemon of this host.

use super::{limit_changes, limits, list, show, show_limits};
use crate::cli::{KeyCommand, KeyCreateArgs};
use crate::runtime;
use anyhow::{Context, bail};
use hyper::Method;
use jiffy_api::{Key, Scope, moment};
use jiffy_api_types::{ApiKey, ChangeKey, CreateKey, NewApiKey, RevokeKey, RevokedKey, RotateKey};
use jiffy_client::Client;
use jiffy_daemon::local_daemon;
use jiffy_image::Home;
use std::process::ExitCode;

/// Error of an answer of the daemon.
const INVALID_TIME: &str = "the daemon sent an invalid time";

/// Runs a subcommand.
pub fn run(home: &Home, command: &KeyCommand) -> anyhow::Result<ExitCode> {
    runtime()?.block_on(execute(home, command))?;
    Ok(ExitCode::SUCCESS)
}

/// Executes a command on keys through the daemon, because the keys of a fleet are in the memory of
/// its hosts.
async fn execute(home: &Home, command: &KeyCommand) -> anyhow::Result<()> {
    let Some(stream) = local_daemon::connect(home).await else {
        bail!("this host is a member of a fleet, and its daemon does not run: start `jiffy serve`");
    };
    let client = local_daemon::client_over(home, stream).await?;
    match command {
        KeyCommand::Create(args) => {
            let body = new_key(args);
            let created: NewApiKey = client.call(Method::POST, "/keys", &body).await?;
            show(&created.try_into().context(INVALID_TIME)?, args.json)
        }
        KeyCommand::Ls { all, json } => {
            let listed: Vec<ApiKey> = client.call(Method::GET, "/keys", &()).await?;
            let keys: Result<_, _> = listed.into_iter().map(Key::try_from).collect();
            list(home, keys.context(INVALID_TIME)?, *all, *json).await
        }
        KeyCommand::Limits {
            key,
            limits,
            remove,
            json,
        } => {
            let changes = limit_changes(limits, remove)?;
            let body = ChangeKey {
                limits: changes.set.into(),
                remove_limits: changes.removed,
            };
            let changed: ApiKey = client.call(Method::PATCH, &path(key, ""), &body).await?;
            show_limits(&changed.try_into().context(INVALID_TIME)?, *json)
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
                expires_at: expires.map(moment),
            };
            let path = path(key, "/rotate");
            let rotated: NewApiKey = client.call(Method::POST, &path, &body).await?;
            show(&rotated.try_into().context(INVALID_TIME)?, *json)
        }
    }
}

/// Revokes a key, and warns about hosts that have not confirmed this.
async fn revoke(client: &Client, which: &str, end: bool, json: bool) -> anyhow::Result<()> {
    let path = path(which, "/revoke");
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
    format!("/keys/{which}{call}")
}

fn new_key(args: &KeyCreateArgs) -> CreateKey {
    CreateKey {
        name: Some(args.name.clone()),
        scope: Scope::from(args.scope).into(),
        limits: limits(&args.limits).into(),
        expires_at: args.expires.map(moment),
        addresses: args.allow_from.clone(),
    }
}
