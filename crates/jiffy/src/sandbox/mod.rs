//! The commands on sandboxes that stay: each is one call to the daemon.

mod copy;
pub mod exec;
pub mod table;

use crate::cli::{Command, CreateArgs, ForkArgs, ManyArgs, SnapshotsArgs};
use crate::daemon::Daemon;
use crate::run::{environment, prepare, size};
use crate::serve::routes::{ForkAnswer, ForkBody, RollbackBody, SnapshotBody};
use hyper::Method;
use jiffy_engine::VerifiedSnapshot;
use jiffy_host::{CreateSpec, SandboxRecord, SnapshotRecord, Source, State, Terms};
use serde::Serialize;
use std::process::ExitCode;

/// Runs one command.
pub fn run(command: &Command) -> anyhow::Result<ExitCode> {
    crate::runtime()?.block_on(dispatch(command))
}

async fn dispatch(command: &Command) -> anyhow::Result<ExitCode> {
    let post = Method::POST;
    match command {
        Command::Create(args) => return create(args).await,
        Command::Fork(args) => return fork(args).await,
        Command::Kill(args) => return many(args, false).await,
        Command::Rm(args) => return many(args, true).await,
        Command::Cp(args) => return copy::run(args).await,
        Command::Snapshots(SnapshotsArgs {
            verify: Some(id),
            json,
            ..
        }) => return verify(id, *json).await,
        Command::Ls(args) => {
            let daemon = Daemon::find_or_start().await?;
            let mut all: Vec<SandboxRecord> = daemon.call(Method::GET, "/sandboxes", &()).await?;
            all.retain(|s| args.all || s.state != State::Killed);
            table::show(args.json, &all, table::sandboxes)?;
        }
        Command::Snapshot(args) => {
            let daemon = Daemon::find_or_start().await?;
            let path = format!("/sandboxes/{}/snapshot", word(&args.id)?);
            let name = args.name.clone();
            let taken: SnapshotRecord = daemon.call(post, &path, &SnapshotBody { name }).await?;
            table::show(args.json, &taken, |s| format!("{}\n", s.id))?;
        }
        Command::Snapshots(args) => {
            let daemon = Daemon::find_or_start().await?;
            let path = match &args.id {
                Some(id) => format!("/snapshots/{}", word(id)?),
                None => "/snapshots".to_owned(),
            };
            let all: Vec<SnapshotRecord> = daemon.call(Method::GET, &path, &()).await?;
            table::show(args.json, &all, table::snapshots)?;
        }
        Command::Rollback(args) => {
            let snapshot = args.snapshot.clone();
            let body = RollbackBody { snapshot };
            let now: SandboxRecord = one(&args.id, "rollback", &body).await?;
            table::show(args.json, &now, |s| format!("{}\n", s.id))?;
        }
        Command::Pause(args) => {
            let now: SandboxRecord = one(&args.id, "pause", &()).await?;
            table::show(args.json, &now, |s| format!("{}\n", s.id))?;
        }
        Command::Resume(args) => {
            let now: SandboxRecord = one(&args.id, "resume", &()).await?;
            table::show(args.json, &now, |s| format!("{}\n", s.id))?;
        }
        Command::Promote(args) => {
            let gone: Vec<SandboxRecord> = one(&args.id, "promote", &()).await?;
            table::show(args.json, &gone, |gone| {
                gone.iter().map(|s| format!("removed {}\n", s.id)).collect()
            })?;
        }
        // The others have modules of their own.
        _ => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// An id or name as it can stand in a path.
pub(crate) fn word(id: &str) -> anyhow::Result<&str> {
    let good = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    anyhow::ensure!(
        !id.is_empty() && id.chars().all(good),
        "`{id}` is not an id: `jiffy ls` and `jiffy snapshots` show those there are"
    );
    Ok(id)
}

async fn one<T: serde::de::DeserializeOwned>(
    id: &str,
    operation: &str,
    body: &impl Serialize,
) -> anyhow::Result<T> {
    let path = format!("/sandboxes/{}/{operation}", word(id)?);
    let daemon = Daemon::find_or_start().await?;
    daemon.call(Method::POST, &path, body).await
}

async fn create(args: &CreateArgs) -> anyhow::Result<ExitCode> {
    let env = environment(&args.env)?;
    let spec = match &args.from {
        Some(snapshot) => CreateSpec {
            source: Source::Snapshot(snapshot.clone()),
            size: None,
            env,
            terms: Terms::default(),
        },
        None => {
            let size = size(&args.size, &args.template)?;
            // Here, where progress can be shown, rather than in the daemon.
            prepare(&args.template)?;
            CreateSpec {
                source: Source::Template(args.template.clone()),
                size: Some(size),
                env,
                terms: Terms::default(),
            }
        }
    };
    let daemon = Daemon::find_or_start().await?;
    let made: SandboxRecord = daemon.call(Method::POST, "/sandboxes", &spec).await?;
    table::show(args.json, &made, |s| format!("{}\n", s.id))?;
    Ok(ExitCode::SUCCESS)
}

async fn fork(args: &ForkArgs) -> anyhow::Result<ExitCode> {
    let body = ForkBody { count: args.count };
    let answer: ForkAnswer = one(&args.id, "fork", &body).await?;
    table::show(args.json, &answer, |answer| {
        answer
            .children
            .iter()
            .map(|s| format!("{}\n", s.id))
            .collect()
    })?;
    if answer.failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let of = args.count;
    eprintln!("jiffy: {} of {of} children failed:", answer.failed.len());
    for why in &answer.failed {
        eprintln!("jiffy:   {why}");
    }
    Ok(ExitCode::FAILURE)
}

/// Compares a snapshot with its seal. Neither damage nor the want of a seal is success.
async fn verify(id: &str, json: bool) -> anyhow::Result<ExitCode> {
    let daemon = Daemon::find_or_start().await?;
    let path = format!("/snapshots/{}/verify", word(id)?);
    let verified: Vec<VerifiedSnapshot> = daemon.call(Method::POST, &path, &()).await?;
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
    let daemon = Daemon::find_or_start().await?;
    let mut done: Vec<serde_json::Value> = Vec::new();
    let mut code = ExitCode::SUCCESS;
    for id in &args.ids {
        match end(&daemon, id, remove).await {
            Ok(record) => done.push(record),
            Err(e) => {
                eprintln!("jiffy: {e:#}");
                code = ExitCode::FAILURE;
            }
        }
    }
    table::show(args.json, &done, |done| {
        let id = |v: &serde_json::Value| v["id"].as_str().map(|id| format!("{id}\n"));
        done.iter().filter_map(id).collect()
    })?;
    Ok(code)
}

async fn end(daemon: &Daemon, id: &str, remove: bool) -> anyhow::Result<serde_json::Value> {
    let path = format!("/sandboxes/{}", word(id)?);
    if !remove {
        return daemon
            .call(Method::POST, &format!("{path}/kill"), &())
            .await;
    }
    let known: Result<SandboxRecord, _> = daemon.call(Method::GET, &path, &()).await;
    match known {
        Ok(_) => daemon.call(Method::DELETE, &path, &()).await,
        // No sandbox: then it is a snapshot, or nothing.
        Err(e) if e.to_string().contains("there is no sandbox") => {
            daemon
                .call(Method::DELETE, &format!("/snapshots/{id}"), &())
                .await
        }
        Err(e) => Err(e),
    }
}
