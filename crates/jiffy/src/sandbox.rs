//! Commands for sandboxes of a daemon. Each command consists of a few requests to the API.

mod compare;
mod copy;
mod engines;
pub mod exec;
pub mod forward;
pub mod inspect;
mod lineage;
mod list;
pub mod logs;
mod processes;
mod remove;
pub mod shell;
mod stats;
pub mod table;
pub mod tree;
mod wait;

use crate::cli::{
    Command, CreateArgs, ForkArgs, HostArgs, NetworkSwitch, RestartArgs, ResumeState,
    SandboxIdsArgs, SnapshotsArgs, TimeoutAction,
};
use crate::console;
use crate::run::CommandTarget;
use crate::run::{check_size, environment, prepare, size};
use crate::template;
use crate::units;
use jiffy_api_types::{SandboxInfo, SandboxState, SetTimeout};
use jiffy_client::progress::while_waiting;
use jiffy_client::{Client, NewSandbox, SandboxSettings, has_error_code, is_remote};
use jiffy_engines::Host;
use jiffy_image::image_on_demand;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

/// Runs a command.
pub fn run(command: &Command) -> anyhow::Result<ExitCode> {
    crate::runtime()?.block_on(dispatch(command))
}

/// Runs a command and returns its exit code.
async fn dispatch(command: &Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Create(args) => return create(args).await,
        Command::Fork(args) => return fork(args).await,
        Command::Kill(args) => return run_bulk(args, BulkOperation::Kill).await,
        Command::Rm(args) => return remove::rm(args).await,
        Command::Prune(args) => return remove::prune(args).await,
        Command::Pause(args) => {
            let pause = BulkOperation::Pause {
                durable: args.durable,
                disk_only: args.disk_only,
            };
            return run_bulk(&args.many, pause).await;
        }
        Command::Resume(args) => {
            let resume = BulkOperation::Resume {
                from_stored: args.from == Some(ResumeState::Stored),
                reboot: args.reboot,
            };
            return run_bulk(&args.many, resume).await;
        }
        Command::Inspect(args) => return inspect::run(args).await,
        Command::Wait(args) => return wait::run(args).await,
        Command::Restart(args) => return restart(args).await,
        Command::Stats(args) => stats::run(args).await?,
        Command::Tree(args) => lineage::run(args).await?,
        Command::Diff(args) if args.other.is_some() => compare::run(args).await?,
        Command::Diff(args) => {
            let remote = exec::RemoteSandbox::find(&args.host, &args.id).await?;
            let agent = remote.agent();
            let request = agent.changes(args.limit);
            let changes = while_waiting("comparing files with the template", request).await?;
            table::show(args.json, &changes, table::changes)?;
            if changes.more {
                errln!("jiffy: the list is incomplete: increase --limit, at most 100000");
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
        Command::Processes(args) => processes::list(args).await?,
        Command::Signal(args) => processes::signal(args).await?,
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
            let name = args.name.as_deref();
            let snapshot = if args.disk_only {
                client.snapshot_disk(&args.id, name, args.ack()).await?
            } else {
                client.snapshot_sandbox(&args.id, name, args.ack()).await?
            };
            table::show(args.json, &snapshot, |s| format!("{}\n", s.id))?;
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
        Command::Timeout(args) => {
            let client = jiffy_daemon::open_client(&args.host.server()).await?;
            let timeouts = SetTimeout {
                timeout: args.time.map(units::Timeout::seconds),
                idle_timeout: args.idle,
            };
            client.set_timeout(&args.id, &timeouts).await?;
        }
        Command::Promote(args) => {
            let client = jiffy_daemon::open_client(&args.host.server()).await?;
            let removed = client.promote(&args.id).await?;
            let removed: Vec<_> = removed.into_iter().map(table::without_tokens).collect();
            table::show(args.json, &removed, |removed| {
                removed
                    .iter()
                    .map(|s| format!("removed {}\n", s.id))
                    .collect()
            })?;
        }
        // `main` dispatches all other commands.
        _ => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a sandbox: its record as JSON if `json` is true, otherwise its id.
fn show(json: bool, sandbox: &SandboxInfo) -> anyhow::Result<()> {
    let sandbox = table::without_tokens(sandbox.clone());
    table::show(json, &sandbox, |s| format!("{}\n", s.id))
}

/// Returns the settings in the arguments.
fn settings(args: &CreateArgs) -> SandboxSettings {
    SandboxSettings {
        name: args.name.clone(),
        metadata: args.labels.iter().cloned().collect(),
        // Without a timeout, the action has no meaning and is not sent.
        auto_pause: args.timeout.map(|_| args.on_timeout != TimeoutAction::Kill),
        auto_pause_memory: (args.on_timeout == TimeoutAction::PauseDiskOnly).then_some(false),
        idle_timeout_s: args.idle_timeout,
        internet: (args.network == NetworkSwitch::Off).then_some(false),
        join: args.join.clone(),
        engine: args.engine.map(|engine| engine.to_string()),
        prefetch: args.prefetch.map(Into::into),
        host_labels: args.host_labels.iter().cloned().collect(),
        volumes: args.volumes.clone(),
    }
}

/// Creates a sandbox from a template, an image or a snapshot.
async fn create(args: &CreateArgs) -> anyhow::Result<ExitCode> {
    let env = environment(&args.env)?;
    let (client, new_sandbox) = match (&args.from, &args.image) {
        (_, Some(image)) => {
            // Check the size before the import, which takes minutes.
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
            let new_sandbox = request_of_template(args, env)?;
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
    let sandbox = client.create(&new_sandbox).await?.record;
    show(args.json, &sandbox)?;
    console::print_page(&client, &sandbox.id, args.json).await;
    Ok(ExitCode::SUCCESS)
}

/// Imports an image as a template and returns the template's name. If the import fails, for example
/// because the registry is not reachable, uses the template of an earlier import.
pub async fn template_of_image(
    client: &Client,
    image: &str,
    quiet: bool,
) -> anyhow::Result<String> {
    let name = image_on_demand(image);
    let result = template::build::build_from_image(client, &name, image, quiet).await;
    let Err(e) = result else { return Ok(name) };
    // The user interrupted the import: an earlier import must not be used instead.
    if e.is::<template::build::Interrupted>() {
        return Err(e);
    }
    match client.has_template(&name).await {
        Ok(true) => {
            errln!("jiffy: using the previous import of image {image}: {e:#}");
            Ok(name)
        }
        _ => Err(e.context(format!("cannot import image {image}"))),
    }
}

/// Returns the create request. Builds the template first if it is a missing template of this host.
fn request_of_template(
    args: &CreateArgs,
    env: BTreeMap<String, String>,
) -> anyhow::Result<NewSandbox> {
    let new_sandbox = NewSandbox::of(&args.template, env);
    if is_remote(&args.host.server())? {
        check_size(&args.size)?;
        return Ok(new_sandbox.with_partial_size(args.size.cpus, args.size.memory, args.size.disk));
    }
    let size = size(&args.size, &args.template)?;
    // The template is built by this process, which can show progress, and not by the daemon.
    prepare(&Host::open()?, args.engine.into(), &args.template)?;
    Ok(new_sandbox.with_size(size))
}

/// Result of a fork.
#[derive(Serialize)]
struct ForkResult {
    /// Snapshot that all children start from.
    snapshot: Value,
    /// Children that started.
    children: Vec<SandboxInfo>,
    /// Errors of the children that failed.
    failed: Vec<String>,
}

/// Forks a sandbox. Prints the children, and fails if at least one of them failed.
async fn fork(args: &ForkArgs) -> anyhow::Result<ExitCode> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let forked = client.fork(&args.id, args.count).await?;
    let mut result = ForkResult {
        snapshot: json!({ "id": forked.first().map(|child| &child.snapshot_id) }),
        children: Vec::new(),
        failed: Vec::new(),
    };
    for child in forked {
        match (child.sandbox, child.error) {
            (Some(sandbox), _) => result
                .children
                .push(table::without_tokens(sandbox.added.jiffy)),
            (None, error) => result.failed.extend(error.map(|error| error.message)),
        }
    }
    table::show(args.json, &result, |result| {
        let ids = result.children.iter().map(|s| format!("{}\n", s.id));
        ids.collect()
    })?;
    if result.failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let count = args.count;
    errln!("jiffy: {} of {count} children failed:", result.failed.len());
    for error in &result.failed {
        errln!("jiffy:   {error}");
    }
    Ok(ExitCode::FAILURE)
}

/// Verifies the checksums of a snapshot and its ancestors. Fails if data is damaged or if checksums
/// are missing.
async fn verify(host: &HostArgs, id: &str, json: bool) -> anyhow::Result<ExitCode> {
    let verified = jiffy_daemon::open_client(&host.server())
        .await?
        .verify(id)
        .await?;
    table::show(json, &verified, table::verified)?;
    // A snapshot without checksums is not verified, and therefore not intact.
    let is_intact = verified
        .iter()
        .all(|s| s.has_checksums && s.damaged.is_empty());
    Ok(if is_intact {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Restarts sandboxes. Resumes paused sandboxes first.
async fn restart(args: &RestartArgs) -> anyhow::Result<ExitCode> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let operation = BulkOperation::Restart(args.grace);
    run_for_each(&client, &args.ids, operation, args.json).await
}

/// Operation on several sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BulkOperation {
    Kill,
    /// Removes sandboxes or snapshots.
    Remove,
    /// Removes listed sandboxes. Ignores sandboxes that were removed since they were listed.
    RemoveListed,
    /// Pauses sandboxes.
    Pause {
        /// True to wait until the shared store has the snapshots.
        durable: bool,
        /// True to discard the memory.
        disk_only: bool,
    },
    /// Resumes sandboxes.
    Resume {
        /// True to use stored states of sandboxes whose hosts were lost.
        from_stored: bool,
        /// True to discard the memory.
        reboot: bool,
    },
    /// Restarts sandboxes. The value is the time before processes are killed.
    Restart(Duration),
}

/// Runs an operation on the sandboxes in the arguments.
async fn run_bulk(args: &SandboxIdsArgs, operation: BulkOperation) -> anyhow::Result<ExitCode> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    run_for_each(&client, &args.ids, operation, args.json).await
}

/// Runs an operation on each object. Continues after failures. Without `json`, each id is printed
/// when its operation is complete, so that the output is correct even if this process is killed.
async fn run_for_each(
    client: &Client,
    ids: &[String],
    operation: BulkOperation,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let mut done: Vec<Value> = Vec::new();
    let mut code = ExitCode::SUCCESS;
    // First error of standard output. The operations on the remaining objects still run.
    let mut printed = Ok(());
    // Sequentially, so that the output and the errors are in the order of the arguments.
    for id in ids {
        match run_for_one(client, id, operation).await {
            Ok(record) if json => done.push(record),
            Ok(record) => {
                let id = record["id"].as_str().unwrap_or(id);
                printed = printed.and(table::show(false, &id, |id| format!("{id}\n")));
            }
            Err(e)
                if operation == BulkOperation::RemoveListed
                    && has_error_code(&e, "sandbox_not_found") => {}
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

/// Runs an operation on one object, and returns its record.
async fn run_for_one(client: &Client, id: &str, operation: BulkOperation) -> anyhow::Result<Value> {
    let record = match operation {
        // `false`: the record of the killed sandbox remains.
        BulkOperation::Kill => client.kill(id, false).await,
        BulkOperation::Remove | BulkOperation::RemoveListed => client.kill(id, true).await,
        BulkOperation::Resume {
            from_stored,
            reboot,
        } => {
            let resumed = client.resume_with(id, from_stored, reboot).await;
            if let Ok((record, true)) = &resumed {
                errln!(
                    "jiffy: {} continues from its stored state: later changes on its lost host are \
                     not included",
                    record.id
                );
            }
            resumed.map(|(record, _)| record)
        }
        BulkOperation::Restart(grace) => {
            if client.sandbox(id).await?.record.state == SandboxState::Paused {
                client.resume(id).await?;
            }
            client.restart(id, grace).await
        }
        BulkOperation::Pause { durable, disk_only } => {
            client.pause_with(id, durable, disk_only).await?;
            Ok(client.sandbox(id).await?.record)
        }
    };
    match record {
        Ok(record) => Ok(serde_json::to_value(table::without_tokens(record))?),
        // If no sandbox has this id, it may be the id of a snapshot.
        Err(e) if operation == BulkOperation::Remove && has_error_code(&e, "sandbox_not_found") => {
            match client.remove_snapshot(id).await {
                Ok(record) => Ok(serde_json::to_value(record)?),
                // Neither exists: the first error names the id as a sandbox.
                Err(error) if has_error_code(&error, "snapshot_not_found") => Err(e),
                Err(error) => Err(error),
            }
        }
        Err(e) => Err(e),
    }
}
