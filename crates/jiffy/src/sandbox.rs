//! The commands on sandboxes that stay: each is a call or two to the control plane.

mod copy;
mod engines;
pub mod exec;
pub mod forward;
mod inspect;
mod list;
mod logs;
mod remove;
pub mod shell;
mod stats;
pub mod table;
pub mod tree;
mod wait;

use crate::cli::{
    AtTimeout, Command, CreateArgs, ForkArgs, HostArgs, ManyArgs, NetworkSwitch, RestartArgs,
    SnapshotsArgs,
};
use crate::run::CommandTarget;
use crate::run::{check_size, environment, prepare, size};
use crate::template;
use jiffy_api_types::{SandboxInfo, SandboxState};
use jiffy_client::progress::while_waiting;
use jiffy_client::{Client, NewSandbox, SandboxSettings, is_refusal, is_remote};
use jiffy_engines::Host;
use jiffy_image::image_on_demand;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

/// Runs one command.
pub fn run(command: &Command) -> anyhow::Result<ExitCode> {
    crate::runtime()?.block_on(dispatch(command))
}

async fn dispatch(command: &Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Create(args) => return create(args).await,
        Command::Fork(args) => return fork(args).await,
        Command::Kill(args) => return run_bulk(args, BulkOperation::Kill).await,
        Command::Rm(args) => return remove::rm(args).await,
        Command::Prune(args) => return remove::prune(args).await,
        Command::Pause(args) => {
            let pause = BulkOperation::Pause(args.durable);
            return run_bulk(&args.many, pause).await;
        }
        Command::Resume(args) => return run_bulk(args, BulkOperation::Resume).await,
        Command::Inspect(args) => return inspect::run(args).await,
        Command::Wait(args) => return wait::run(args).await,
        Command::Restart(args) => return restart(args).await,
        Command::Stats(args) => stats::run(args).await?,
        Command::Diff(args) => {
            let remote = exec::RemoteSandbox::find(&args.host, &args.id).await?;
            let agent = remote.agent();
            let looking = agent.changes(args.limit);
            let found = while_waiting("looking for changes", looking).await?;
            table::show(args.json, &found, table::changes)?;
            if found.more {
                errln!("jiffy: there are more; `--limit` shows up to 100000");
            }
        }
        Command::Cp(args) => return copy::run(args).await,
        Command::PortForward(args) => return forward::run(args).await,
        Command::Snapshots(SnapshotsArgs {
            verify: Some(id),
            json,
            host,
            ..
        }) => return verify(host, id, *json).await,
        Command::Logs(args) => logs::run(args).await?,
        Command::Ls(args) => list::run(args).await?,
        Command::Engines(args) => {
            let all = jiffy_daemon::open_client(&args.host.server())
                .await?
                .engines()
                .await?;
            table::show(args.json, &all, engines::table)?;
        }
        Command::Snapshot(args) => {
            let client = jiffy_daemon::open_client(&args.host.server()).await?;
            let taken = client
                .snapshot_sandbox(&args.id, args.name.as_deref(), args.ack())
                .await?;
            table::show(args.json, &taken, |s| format!("{}\n", s.id))?;
        }
        Command::Snapshots(args) => {
            let client = jiffy_daemon::open_client(&args.host.server()).await?;
            let all = client.snapshots(args.id.as_deref()).await?;
            table::show(args.json, &all, table::snapshots)?;
        }
        Command::Rollback(args) => {
            let client = jiffy_daemon::open_client(&args.host.server()).await?;
            show(args.json, &client.rollback(&args.id, &args.snapshot).await?)?;
        }
        Command::Rename(args) => {
            let client = jiffy_daemon::open_client(&args.host.server()).await?;
            let name = Some(&args.name[..]).filter(|name| !name.is_empty());
            show(args.json, &client.rename(&args.id, name).await?)?;
        }
        Command::Promote(args) => {
            let client = jiffy_daemon::open_client(&args.host.server()).await?;
            let gone = client.promote(&args.id).await?;
            let gone: Vec<_> = gone.into_iter().map(table::without_tokens).collect();
            table::show(args.json, &gone, |gone| {
                gone.iter().map(|s| format!("removed {}\n", s.id)).collect()
            })?;
        }
        // The others have modules of their own.
        _ => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints one sandbox.
fn show(json: bool, sandbox: &SandboxInfo) -> anyhow::Result<()> {
    let sandbox = table::without_tokens(sandbox.clone());
    table::show(json, &sandbox, |s| format!("{}\n", s.id))
}

/// Settings of the creator, as typed.
fn settings(args: &CreateArgs) -> SandboxSettings {
    SandboxSettings {
        name: args.name.clone(),
        metadata: args.labels.iter().cloned().collect(),
        auto_pause: args.timeout.map(|_| args.on_timeout == AtTimeout::Pause),
        internet: (args.network == NetworkSwitch::Off).then_some(false),
        engine: args.engine.map(|engine| engine.to_string()),
        prefetch: args.prefetch.map(Into::into),
    }
}

async fn create(args: &CreateArgs) -> anyhow::Result<ExitCode> {
    let env = environment(&args.env)?;
    let (client, new_sandbox) = match (&args.from, &args.image) {
        (_, Some(image)) => {
            check_size(&args.size)?;
            let client = jiffy_daemon::open_client(&args.host.server()).await?;
            let template = template_of_image(&client, image, args.json).await?;
            let size = &args.size;
            let new_sandbox = NewSandbox::of(template, env);
            (
                client,
                new_sandbox.with_partial_size(size.cpus, size.memory, size.disk),
            )
        }
        (Some(snapshot), None) => {
            let client = jiffy_daemon::open_client(&args.host.server()).await?;
            let snapshot = client.snapshot(snapshot).await?;
            (client, NewSandbox::of(snapshot.id, env))
        }
        (None, None) => {
            let new_sandbox = of_template(args, env)?;
            (
                jiffy_daemon::open_client(&args.host.server()).await?,
                new_sandbox,
            )
        }
    };
    let new_sandbox = new_sandbox.with_settings(settings(args));
    let new_sandbox = match args.timeout {
        Some(time) => new_sandbox.with_timeout(time),
        None => new_sandbox,
    };
    let new_sandbox = new_sandbox.with_site(args.site.read()?);
    show(args.json, &client.create(&new_sandbox).await?.record)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the template of an image, which is imported first if necessary. Uses an earlier import
/// if the registry does not respond.
pub async fn template_of_image(
    client: &Client,
    image: &str,
    quiet: bool,
) -> anyhow::Result<String> {
    let name = image_on_demand(image);
    let made = template::build::build_from_image(client, &name, image, quiet).await;
    let Err(e) = made else { return Ok(name) };
    if e.is::<template::build::Interrupted>() {
        return Err(e);
    }
    match client.has_template(&name).await {
        Ok(true) => {
            errln!("jiffy: image {image} as it was imported before: {e:#}");
            Ok(name)
        }
        _ => Err(e.context(format!("cannot import image {image}"))),
    }
}

/// The create request; a template of this host is built first if it is missing.
fn of_template(args: &CreateArgs, env: BTreeMap<String, String>) -> anyhow::Result<NewSandbox> {
    let new_sandbox = NewSandbox::of(&args.template, env);
    if is_remote(&args.host.server())? {
        check_size(&args.size)?;
        return Ok(new_sandbox.with_partial_size(args.size.cpus, args.size.memory, args.size.disk));
    }
    let size = size(&args.size, &args.template)?;
    // Here, where progress can be shown, rather than in the daemon.
    prepare(&Host::open()?, args.engine.into(), &args.template)?;
    Ok(new_sandbox.with_size(size))
}

/// Result of a fork.
#[derive(Serialize)]
struct ForkResult {
    /// Snapshot that all children start from.
    snapshot: Value,
    /// Those that answered.
    children: Vec<SandboxInfo>,
    /// Why the others did not.
    failed: Vec<String>,
}

async fn fork(args: &ForkArgs) -> anyhow::Result<ExitCode> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let forked = client.fork(&args.id, args.count).await?;
    let mut family = ForkResult {
        snapshot: json!({ "id": forked.first().map(|child| &child.snapshot_id) }),
        children: Vec::new(),
        failed: Vec::new(),
    };
    for child in forked {
        match (child.sandbox, child.error) {
            (Some(sandbox), _) => family
                .children
                .push(table::without_tokens(sandbox.added.jiffy)),
            (None, why) => family.failed.extend(why.map(|why| why.message)),
        }
    }
    table::show(args.json, &family, |family| {
        let ids = family.children.iter().map(|s| format!("{}\n", s.id));
        ids.collect()
    })?;
    if family.failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let of = args.count;
    errln!("jiffy: {} of {of} children failed:", family.failed.len());
    for why in &family.failed {
        errln!("jiffy:   {why}");
    }
    Ok(ExitCode::FAILURE)
}

/// Compares a snapshot with its seal. Neither damage nor the want of a seal is success.
async fn verify(host: &HostArgs, id: &str, json: bool) -> anyhow::Result<ExitCode> {
    let verified = jiffy_daemon::open_client(&host.server())
        .await?
        .verify(id)
        .await?;
    table::show(json, &verified, table::verified)?;
    let sound = verified.iter().all(|s| s.sealed && s.damaged.is_empty());
    Ok(if sound {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Restarts each; those that sleep are woken first.
async fn restart(args: &RestartArgs) -> anyhow::Result<ExitCode> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let what = BulkOperation::Restart(args.grace);
    run_for_each(&client, &args.ids, what, args.json).await
}

/// Operation on each of several sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BulkOperation {
    Kill,
    /// Of sandboxes and snapshots.
    Remove,
    /// Of sandboxes that a list named: one that went meanwhile is as it should be.
    RemoveListed,
    /// True: until the store has what they sleep in.
    Pause(bool),
    Resume,
    /// With this time for processes to end by themselves.
    Restart(Duration),
}

async fn run_bulk(args: &ManyArgs, what: BulkOperation) -> anyhow::Result<ExitCode> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    run_for_each(&client, &args.ids, what, args.json).await
}

/// Does the same with each of several; one that fails does not spare the others. Each is told when
/// it is done, so that what was told is true also where this program is killed before the last.
async fn run_for_each(
    client: &Client,
    ids: &[String],
    what: BulkOperation,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let mut done: Vec<Value> = Vec::new();
    let mut code = ExitCode::SUCCESS;
    let mut printed = Ok(());
    for id in ids {
        match run_for_one(client, id, what).await {
            Ok(record) if json => done.push(record),
            Ok(record) => {
                let id = record["id"].as_str().unwrap_or(id);
                printed = printed.and(table::show(false, &id, |id| format!("{id}\n")));
            }
            Err(e)
                if what == BulkOperation::RemoveListed && is_refusal(&e, "sandbox_not_found") => {}
            Err(e) => {
                errln!("jiffy: {e:#}");
                code = ExitCode::FAILURE;
            }
        }
    }
    if json {
        table::show(true, &done, |_| String::new())?;
    }
    printed?;
    Ok(code)
}

async fn run_for_one(client: &Client, id: &str, what: BulkOperation) -> anyhow::Result<Value> {
    let record = match what {
        BulkOperation::Kill => client.kill(id, false).await,
        BulkOperation::Remove | BulkOperation::RemoveListed => client.kill(id, true).await,
        BulkOperation::Resume => client.resume(id).await,
        BulkOperation::Restart(grace) => {
            if client.sandbox(id).await?.record.state == SandboxState::Paused {
                client.resume(id).await?;
            }
            client.restart(id, grace).await
        }
        BulkOperation::Pause(durable) => {
            client.pause(id, durable).await?;
            Ok(client.sandbox(id).await?.record)
        }
    };
    match record {
        Ok(record) => Ok(serde_json::to_value(table::without_tokens(record))?),
        // No sandbox: then it is a snapshot, or nothing.
        Err(e) if what == BulkOperation::Remove && is_refusal(&e, "sandbox_not_found") => {
            match client.remove_snapshot(id).await {
                Ok(record) => Ok(serde_json::to_value(record)?),
                Err(other) if is_refusal(&other, "snapshot_not_found") => Err(e),
                Err(other) => Err(other),
            }
        }
        Err(e) => Err(e),
    }
}
