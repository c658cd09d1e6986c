//! `jiffy volume`: creates, lists and removes volumes, and copies their files.
//!
//! A *volume* is a directory of files that sandboxes of an API key share, and that outlives them.

mod copy;

use crate::cli::{VolumeCommand, VolumeCreateArgs};
use crate::columns::{Align, Table};
use crate::runtime;
use hyper::Method;
use jiffy_api_types::{NewVolume, VolumeAndToken, VolumeSnapshot};
use jiffy_client::terminal;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use std::process::ExitCode;

/// Runs a subcommand.
pub fn run(command: &VolumeCommand) -> anyhow::Result<ExitCode> {
    runtime()?.block_on(async {
        match command {
            VolumeCommand::Create(args) => create(args, None).await,
            VolumeCommand::Restore { snapshot, volume } => create(volume, Some(snapshot)).await,
            VolumeCommand::Snapshot { volume, json, host } => {
                let client = jiffy_daemon::open_client(&host.server()).await?;
                snapshot(&client, volume, *json).await
            }
            VolumeCommand::Snapshots { json, host } => {
                let client = jiffy_daemon::open_client(&host.server()).await?;
                list_snapshots(&client, *json).await
            }
            VolumeCommand::RmSnapshot { snapshots, host } => {
                let client = jiffy_daemon::open_client(&host.server()).await?;
                for id in snapshots {
                    let path = format!("/volumesnapshots/{}", encoded(id));
                    let () = client.call(Method::DELETE, &path, &()).await?;
                    outln!("{}", terminal::line(id));
                }
                Ok(())
            }
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

/// Creates an empty volume, or one with the files of `snapshot`.
async fn create(args: &VolumeCreateArgs, snapshot: Option<&String>) -> anyhow::Result<()> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let new = NewVolume {
        name: args.name.clone(),
        driver: None,
        size_mb: args.size,
        max_files: args.files,
        volume_snapshot_id: snapshot.cloned(),
        host: args.home.map(|host| host.to_string()),
    };
    let created: VolumeAndToken = client.call(Method::POST, "/volumes", &new).await?;
    if args.json {
        outln!("{}", terminal::json(&created.volume)?);
    } else {
        outln!("{}", created.volume.volume_id);
    }
    Ok(())
}

async fn snapshot(client: &jiffy_client::Client, volume: &str, json: bool) -> anyhow::Result<()> {
    let path = format!("/volumes/{}/snapshots", encoded(volume));
    let created: VolumeSnapshot = client.call(Method::POST, &path, &()).await?;
    if json {
        outln!("{}", terminal::json(&created)?);
    } else {
        outln!("{}", created.volume_snapshot_id);
    }
    Ok(())
}

/// Prints the snapshots of volumes.
async fn list_snapshots(client: &jiffy_client::Client, json: bool) -> anyhow::Result<()> {
    let snapshots = client.volume_snapshots().await?;
    if json {
        outln!("{}", terminal::json(&snapshots)?);
        return Ok(());
    }
    let mut table = Table::new([
        ("ID", Align::Left),
        ("VOLUME", Align::Left),
        ("USED", Align::Right),
        ("SIZE", Align::Right),
        ("CREATED", Align::Left),
    ]);
    for snapshot in &snapshots {
        table.row([
            snapshot.volume_snapshot_id.clone(),
            snapshot.name.clone(),
            format!("{} MiB", snapshot.used_bytes.div_ceil(1 << 20)),
            format!("{} MiB", snapshot.size_mb),
            snapshot.created_at.to_string(),
        ]);
    }
    out!("{}", table.text());
    Ok(())
}

/// Prints all volumes.
async fn list(client: &jiffy_client::Client, json: bool) -> anyhow::Result<()> {
    let volumes = client.volumes().await?;
    if json {
        outln!("{}", terminal::json(&volumes)?);
        return Ok(());
    }
    // Volumes have a host in a fleet only.
    let has_hosts = volumes.iter().any(|volume| volume.host.is_some());
    let mut table = Table::new([
        ("ID", Align::Left),
        ("NAME", Align::Left),
        ("HOST", Align::Left),
        ("SIZE", Align::Right),
        ("FILES", Align::Right),
        ("CREATED", Align::Left),
    ]);
    for volume in &volumes {
        table.row([
            volume.volume_id.clone(),
            volume.name.clone(),
            volume.host.clone().unwrap_or_default(),
            format!("{} MiB", volume.size_mb),
            volume.max_files.to_string(),
            volume.created_at.to_string(),
        ]);
    }
    if !has_hosts {
        table.remove_column("HOST");
    }
    out!("{}", table.text());
    Ok(())
}
