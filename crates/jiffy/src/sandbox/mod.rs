//! The commands on sandboxes that stay: each is a call or two to the control plane.

mod copy;
mod engines;
pub mod exec;
pub mod forward;
mod logs;
pub mod table;
pub mod tree;

use crate::cli::{Command, CreateArgs, ForkArgs, HostArgs, ManyArgs, SnapshotsArgs};
use crate::client::{Client, NewSandbox, is, is_elsewhere};
use crate::run::{check_size, environment, prepare, size};
use crate::serve::engine::EngineArgs;
use jiffy_host::{Host, SandboxRecord};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::process::ExitCode;

/// Runs one command.
pub fn run(command: &Command) -> anyhow::Result<ExitCode> {
    crate::runtime()?.block_on(dispatch(command))
}

async fn dispatch(command: &Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Create(args) => return create(args).await,
        Command::Fork(args) => return fork(args).await,
        Command::Kill(args) => return many(args, false).await,
        Command::Rm(args) => return many(args, true).await,
        Command::Cp(args) => return copy::run(args).await,
        Command::PortForward(args) => return forward::run(args).await,
        Command::Snapshots(SnapshotsArgs {
            verify: Some(id),
            json,
            host,
            ..
        }) => return verify(host, id, *json).await,
        Command::Logs(args) => logs::run(args).await?,
        Command::Ls(args) => {
            let all = Client::open(&args.host).await?.sandboxes(args.all).await?;
            let all = all.into_iter().map(table::without_tokens).collect();
            table::show(args.json, &all, table::sandboxes)?;
        }
        Command::Engines(args) => {
            let all = Client::open(&args.host).await?.engines().await?;
            table::show(args.json, &all, engines::table)?;
        }
        Command::Snapshot(args) => {
            let client = Client::open(&args.host).await?;
            let taken = client.take(&args.id, args.name.as_deref()).await?;
            table::show(args.json, &taken, |s| format!("{}\n", s.id))?;
        }
        Command::Snapshots(args) => {
            let client = Client::open(&args.host).await?;
            let all = client.snapshots(args.id.as_deref()).await?;
            table::show(args.json, &all, table::snapshots)?;
        }
        Command::Rollback(args) => {
            let client = Client::open(&args.host).await?;
            show(args.json, &client.rollback(&args.id, &args.snapshot).await?)?;
        }
        Command::Pause(args) => {
            let client = Client::open(&args.host).await?;
            client.pause(&args.id).await?;
            show(args.json, &client.sandbox(&args.id).await?.record)?;
        }
        Command::Resume(args) => {
            let client = Client::open(&args.host).await?;
            show(args.json, &client.resume(&args.id).await?)?;
        }
        Command::Promote(args) => {
            let client = Client::open(&args.host).await?;
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
fn show(json: bool, sandbox: &SandboxRecord) -> anyhow::Result<()> {
    let sandbox = table::without_tokens(sandbox.clone());
    table::show(json, &sandbox, |s| format!("{}\n", s.id))
}

async fn create(args: &CreateArgs) -> anyhow::Result<ExitCode> {
    let env = environment(&args.env)?;
    let (client, wanted) = match &args.from {
        Some(snapshot) => {
            let client = Client::open(&args.host).await?;
            let snapshot = client.snapshot(snapshot).await?;
            (client, NewSandbox::of(snapshot.id, env))
        }
        None => {
            let wanted = of_template(args, env)?;
            (Client::open(&args.host).await?, wanted)
        }
    };
    show(args.json, &client.create(&wanted).await?.record)?;
    Ok(ExitCode::SUCCESS)
}

/// What is asked for, of a template that is ready if it is this host's.
fn of_template(args: &CreateArgs, env: BTreeMap<String, String>) -> anyhow::Result<NewSandbox> {
    let wanted = NewSandbox::of(&args.template, env);
    if is_elsewhere(&args.host)? {
        check_size(&args.size)?;
        return Ok(wanted.sized(args.size.cpus, args.size.memory, args.size.disk));
    }
    let size = size(&args.size, &args.template)?;
    // Here, where progress can be shown, rather than in the daemon.
    prepare(&Host::open()?, EngineArgs::default(), &args.template)?;
    Ok(wanted.of_size(size))
}

/// What a fork made.
#[derive(Serialize)]
struct Family {
    /// What all children start from.
    snapshot: Value,
    /// Those that answered.
    children: Vec<SandboxRecord>,
    /// Why the others did not.
    failed: Vec<String>,
}

async fn fork(args: &ForkArgs) -> anyhow::Result<ExitCode> {
    let client = Client::open(&args.host).await?;
    let forked = client.fork(&args.id, args.count).await?;
    let mut family = Family {
        snapshot: json!({ "id": forked.first().map(|child| &child.snapshot) }),
        children: Vec::new(),
        failed: Vec::new(),
    };
    for child in forked {
        match (child.sandbox, child.error) {
            (Some(sandbox), _) => family.children.push(table::without_tokens(sandbox.record)),
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
    eprintln!("jiffy: {} of {of} children failed:", family.failed.len());
    for why in &family.failed {
        eprintln!("jiffy:   {why}");
    }
    Ok(ExitCode::FAILURE)
}

/// Compares a snapshot with its seal. Neither damage nor the want of a seal is success.
async fn verify(host: &HostArgs, id: &str, json: bool) -> anyhow::Result<ExitCode> {
    let verified = Client::open(host).await?.verify(id).await?;
    table::show(json, &verified, table::verified)?;
    let sound = verified.iter().all(|s| s.sealed && s.damaged.is_empty());
    Ok(if sound {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Kills or removes each of several; one that fails does not spare the others.
async fn many(args: &ManyArgs, remove: bool) -> anyhow::Result<ExitCode> {
    let client = Client::open(&args.host).await?;
    let mut done: Vec<Value> = Vec::new();
    let mut code = ExitCode::SUCCESS;
    for id in &args.ids {
        match end(&client, id, remove).await {
            Ok(record) => done.push(record),
            Err(e) => {
                eprintln!("jiffy: {e:#}");
                code = ExitCode::FAILURE;
            }
        }
    }
    table::show(args.json, &done, |done| {
        let id = |v: &Value| v["id"].as_str().map(|id| format!("{id}\n"));
        done.iter().filter_map(id).collect()
    })?;
    Ok(code)
}

async fn end(client: &Client, id: &str, remove: bool) -> anyhow::Result<Value> {
    match client.end(id, remove).await {
        Ok(record) => Ok(serde_json::to_value(table::without_tokens(record))?),
        // No sandbox: then it is a snapshot, or nothing.
        Err(e) if remove && is(&e, "sandbox_not_found") => {
            Ok(serde_json::to_value(client.remove_snapshot(id).await?)?)
        }
        Err(e) => Err(e),
    }
}
