//! `jiffy secret`: stores, lists and removes secrets.

use crate::cli::{SecretCommand, SecretCreateArgs};
use crate::columns::{Align, Table};
use crate::{runtime, secret_input};
use hyper::Method;
use jiffy_api_types::{MAX_SECRET_VALUE, NewSecret, Secret, SecretUpdate};
use jiffy_client::{has_error_code, terminal};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use std::process::ExitCode;

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

/// Creates a secret, or with `--replace` changes its value if it exists.
async fn create(args: &SecretCreateArgs) -> anyhow::Result<()> {
    let file = args.file.as_deref();
    let what = "value of the secret";
    let value = secret_input::read(file, what, "--file", MAX_SECRET_VALUE)?;
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

/// Prints all secrets, without their values.
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
