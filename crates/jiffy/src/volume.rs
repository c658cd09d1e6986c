//! `jiffy volume`: creates, lists and removes volumes, and copies their files.

mod copy;

use crate::cli::{VolumeCommand, VolumeCreateArgs};
use crate::columns::{Align, Table};
use crate::runtime;
use hyper::Method;
use jiffy_api_types::{NewVolume, VolumeAndToken};
use jiffy_client::terminal;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use std::process::ExitCode;

/// Runs a subcommand.
pub fn run(command: &VolumeCommand) -> anyhow::Result<ExitCode> {
    runtime()?.block_on(async {
        match command {
            VolumeCommand::Create(args) => create(args).await,
            VolumeCommand::Ls { json, host } => {
                let client = jiffy_daemon::open_client(&host.server()).await?;
                list(&client, *json).await
            }
            VolumeCommand::Rm { volumes, host } => {
                let client = jiffy_daemon::open_client(&host.server()).await?;
                for volume in volumes {
                    let path = format!("/volumes/{}", encoded(volume));
                    let () = client.call(Method::DELETE, &path, &()).await?;
                    outln!("{}", terminal::line(volume));
                }
                Ok(())
            }
            VolumeCommand::Cp { from, to, host } => {
                let client = jiffy_daemon::open_client(&host.server()).await?;
                copy::run(&client, from, to).await
            }
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Encodes a part of a path or a value of a query.
fn encoded(text: &str) -> impl std::fmt::Display {
    utf8_percent_encode(text, NON_ALPHANUMERIC)
}

async fn create(args: &VolumeCreateArgs) -> anyhow::Result<()> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let new = NewVolume {
        name: args.name.clone(),
        driver: None,
        size_mb: args.size,
        max_files: args.files,
    };
    let created: VolumeAndToken = client.call(Method::POST, "/volumes", &new).await?;
    if args.json {
        outln!("{}", terminal::json(&created.volume)?);
    } else {
        outln!("{}", created.volume.volume_id);
    }
    Ok(())
}

async fn list(client: &jiffy_client::Client, json: bool) -> anyhow::Result<()> {
    let volumes = client.volumes().await?;
    if json {
        outln!("{}", terminal::json(&volumes)?);
        return Ok(());
    }
    let mut table = Table::new([
        ("ID", Align::Left),
        ("NAME", Align::Left),
        ("SIZE", Align::Right),
        ("FILES", Align::Right),
        ("CREATED", Align::Left),
    ]);
    for volume in &volumes {
        table.row([
            volume.volume_id.clone(),
            volume.name.clone(),
            format!("{} MiB", volume.size_mb),
            volume.max_files.to_string(),
            volume.created_at.to_string(),
        ]);
    }
    out!("{}", table.text());
    Ok(())
}
