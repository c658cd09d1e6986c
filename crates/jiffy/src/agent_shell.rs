//! `jiffy agent-shell`: shell commands of a coding agent in the sandbox of a project. A *session*
//! is this sandbox with the history of its commands, and a snapshot from before each command.

mod exec;
mod history;

use crate::cli::{AgentShellCommand, AgentShellStartArgs, EngineArgs, ProjectArgs, UndoArgs};
use crate::run::prepare;
use anyhow::Context;
pub use history::history;
use jiffy_client::is_remote;
use jiffy_coding_agent::{Project, Session, SessionOptions, UndoOptions};
use jiffy_engines::Host;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

/// Returns the project of `directory`, or of the current directory.
fn find_project(directory: Option<&Path>) -> anyhow::Result<Project> {
    match directory {
        Some(directory) => Project::at(directory),
        None => {
            let current = std::env::current_dir().context("the current directory was removed")?;
            Project::find(&current)
        }
    }
}

/// Opens the session of a project.
async fn open(args: &ProjectArgs, options: SessionOptions) -> anyhow::Result<Session> {
    let project = find_project(args.project.as_deref())?;
    let server = args.host.server();
    let is_remote = is_remote(&server)?;
    let client = jiffy_daemon::open_client(&server).await?;
    let templates = move |template: &str| {
        // A remote daemon has its own templates.
        if !is_remote {
            prepare(&Host::open()?, EngineArgs::default(), template)?;
        }
        Ok(())
    };
    Session::open(&project, client, options, Arc::new(templates)).await
}

/// Opens the session of a project that has one.
async fn open_existing(args: &ProjectArgs) -> anyhow::Result<Session> {
    let project = find_project(args.project.as_deref())?;
    anyhow::ensure!(
        project.has_session(),
        "{} has no session: `jiffy agent-shell exec` starts one",
        project.directory().display()
    );
    open(args, SessionOptions::default()).await
}

/// Runs a subcommand.
pub fn run(command: &AgentShellCommand) -> anyhow::Result<ExitCode> {
    match command {
        AgentShellCommand::Exec(args) => exec::run(args),
        AgentShellCommand::Start(args) => start(args),
        AgentShellCommand::Status(args) => status(args),
        AgentShellCommand::End(args) => end(args),
        AgentShellCommand::Hook(args) => Ok(crate::integrate::hook(args)),
    }
}

fn start(args: &AgentShellStartArgs) -> anyhow::Result<ExitCode> {
    crate::runtime()?.block_on(async {
        let mut session = open(&args.project, args.options()).await?;
        outln!("{}", session.prepare().await?);
        Ok(ExitCode::SUCCESS)
    })
}

fn status(args: &ProjectArgs) -> anyhow::Result<ExitCode> {
    let project = find_project(args.project.as_deref())?;
    let sandbox = Session::recorded_sandbox(&project)?;
    outln!("project  {}", project.directory().display());
    outln!("sandbox  {}", sandbox.as_deref().unwrap_or("none"));
    outln!("state    {}", project.state().display());
    Ok(ExitCode::SUCCESS)
}

/// Removes the sandbox of a project, its snapshots and its history.
fn end(args: &ProjectArgs) -> anyhow::Result<ExitCode> {
    crate::runtime()?.block_on(async {
        open_existing(args).await?.end().await?;
        Ok(ExitCode::SUCCESS)
    })
}

/// `jiffy undo`: rolls back the sandbox and the project directory.
pub fn undo(args: &UndoArgs) -> anyhow::Result<ExitCode> {
    crate::runtime()?.block_on(async {
        let mut session = open_existing(&args.project).await?;
        let options = UndoOptions {
            commands: args.count,
            force: args.force,
            files_only: args.files_only,
        };
        let report = session.undo(options).await?;
        for command in &report.commands {
            outln!("undone: {}", history::first_line(command));
        }
        for path in &report.restored {
            outln!("  {path}");
        }
        if let Some(directory) = &report.overwritten {
            outln!("overwritten files are in {}", directory.display());
        }
        Ok(ExitCode::SUCCESS)
    })
}
