//! `jiffy secret`: stores, lists and removes secrets.

use crate::cli::{SecretCommand, SecretCreateArgs};
use crate::columns::{Align, Table};
use crate::runtime;
use anyhow::{Context, bail};
use hyper::Method;
use jiffy_api_types::{MAX_SECRET_VALUE, NewSecret, Secret, SecretUpdate};
use jiffy_client::{has_error_code, terminal};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use std::fs::File;
use std::io::{IsTerminal, Read};
use std::process::ExitCode;
use zeroize::Zeroizing;

/// Runs a subcommand.
pub fn run(command: &SecretCommand) -> anyhow::Result<ExitCode> {
    runtime()?.block_on(async {
        match command {
            SecretCommand::Create(args) => create(args).await,
            SecretCommand::Ls { json, host } => {
                let client = jiffy_daemon::open_client(&host.server()).await?;
                list(&client, *json).await
            }
            SecretCommand::Rm { secrets, host } => {
                let client = jiffy_daemon::open_client(&host.server()).await?;
                for secret in secrets {
                    let () = client.call(Method::DELETE, &path(secret), &()).await?;
                    outln!("{}", terminal::line(secret));
                }
                Ok(())
            }
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

fn path(which: &str) -> String {
    format!("/secrets/{}", utf8_percent_encode(which, NON_ALPHANUMERIC))
}

async fn create(args: &SecretCreateArgs) -> anyhow::Result<()> {
    let value = value(args)?;
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let metadata = (!args.metadata.is_empty()).then(|| args.metadata.iter().cloned().collect());
    let update = SecretUpdate {
        value: value.to_string(),
        metadata,
    };
    if args.replace {
        let replaced = client.call(Method::POST, &path(&args.name), &update).await;
        match replaced {
            Ok(secret) => return print(&secret, args.json),
            // The secret does not exist yet.
            Err(e) if has_error_code(&e, "secret_not_found") => {}
            Err(e) => return Err(e),
        }
    }
    let new = NewSecret {
        name: args.name.clone(),
        value: update.value,
        metadata: update.metadata,
    };
    let created: Secret = client.call(Method::POST, "/secrets", &new).await?;
    print(&created, args.json)
}

fn print(secret: &Secret, json: bool) -> anyhow::Result<()> {
    if json {
        outln!("{}", terminal::json(secret)?);
    } else {
        outln!("{}", secret.secret_id);
    }
    Ok(())
}

/// Reads the value, without one line break at its end.
fn value(args: &SecretCreateArgs) -> anyhow::Result<Zeroizing<String>> {
    // One byte more than allowed, and a line break, show that the value is too long.
    let limit = u64::try_from(MAX_SECRET_VALUE + 3)?;
    let mut value = Zeroizing::new(String::new());
    match &args.file {
        Some(file) => {
            let context = || format!("cannot read the value from {}", file.display());
            let opened = File::open(file).with_context(context)?;
            opened
                .take(limit)
                .read_to_string(&mut value)
                .with_context(context)?;
        }
        None => {
            let stdin = std::io::stdin();
            if stdin.is_terminal() {
                bail!(
                    "standard input is a terminal, which would show the value: use `--file FILE`, or \
                     redirect standard input"
                );
            }
            let read = stdin.take(limit).read_to_string(&mut value);
            read.context("cannot read the value from standard input")?;
        }
    }
    if value.ends_with('\n') {
        value.pop();
        if value.ends_with('\r') {
            value.pop();
        }
    }
    if value.is_empty() || value.len() > MAX_SECRET_VALUE {
        bail!("the value of the secret must have 1 to {MAX_SECRET_VALUE} bytes");
    }
    Ok(value)
}

async fn list(client: &jiffy_client::Client, json: bool) -> anyhow::Result<()> {
    let secrets = client.secrets().await?;
    if json {
        outln!("{}", terminal::json(&secrets)?);
        return Ok(());
    }
    let mut table = Table::new([
        ("ID", Align::Left),
        ("NAME", Align::Left),
        ("VERSION", Align::Right),
        ("CHANGED", Align::Left),
    ]);
    for secret in &secrets {
        table.row([
            secret.secret_id.clone(),
            secret.name.clone(),
            secret.current_version.to_string(),
            secret.updated_at.to_string(),
        ]);
    }
    out!("{}", table.text());
    Ok(())
}
