//! `jiffy agent-shell exec`: runs a command in the sandbox of a project. The *session* of a project
//! is its sandbox with the history of its commands. A *ticket* is a command that was entered in the
//! history, and that can be executed.

use super::open;
use crate::FAILURE_EXIT_CODE;
use crate::cli::{AgentShellExecArgs, ExecArgs};
use crate::run::outcome::Outcome;
use crate::run::{Signals, session};
use crate::sandbox::exec::RemoteSandbox;
use anyhow::Context;
use jiffy_coding_agent::{
    CommandTicket, HistoryEntry, MAX_COMMAND_BYTES, Session, SessionOptions, ShellCommand, quote,
};
use std::collections::BTreeMap;
use std::io::Read;
use std::process::ExitCode;
use std::time::Instant;

/// Returns the command of the arguments.
fn command(args: &AgentShellExecArgs) -> anyhow::Result<ShellCommand> {
    let text = match (&args.file, &args.command[..]) {
        (Some(path), _) => {
            let context = || format!("cannot read the command from {}", path.display());
            let file = std::fs::File::open(path).with_context(context)?;
            let mut text = String::new();
            // One byte more than the maximum, so that a longer command is noticed and rejected.
            let limit = MAX_COMMAND_BYTES as u64 + 1;
            file.take(limit)
                .read_to_string(&mut text)
                .with_context(context)?;
            // The hook of a coding agent has written the file for this command only.
            std::fs::remove_file(path).with_context(context)?;
            text
        }
        (None, [text]) => text.clone(),
        (None, words) => words
            .iter()
            .map(|word| quote(word))
            .collect::<Vec<_>>()
            .join(" "),
    };
    let workdir = args.workdir.as_ref().map(std::path::absolute).transpose()?;
    let workdir = workdir.map(|dir| dir.canonicalize().unwrap_or(dir));
    let workdir = workdir.map(|dir| dir.into_os_string().into_string());
    let command = ShellCommand {
        text,
        workdir: workdir
            .transpose()
            .ok()
            .context("the working directory is not UTF-8")?,
        background: args.background,
    };
    command.check()?;
    Ok(command)
}

/// Runs the command and returns its exit code. The command is never run on this host.
pub fn run(args: &AgentShellExecArgs) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let command = command(args).context("the command was not run")?;
    let runtime = crate::runtime()?;
    let outcome = runtime.block_on(execute(args, &command));
    // A thread may be blocked in reading standard input: the shutdown must not wait for it.
    runtime.shutdown_background();
    // Print a report for people, not JSON.
    outcome?.report(false, start)
}

/// Executes a command in the sandbox of the project: copies changed files into it, runs the
/// command, and copies its changes back.
async fn execute(args: &AgentShellExecArgs, command: &ShellCommand) -> anyhow::Result<Outcome> {
    let mut signals = Signals::new()?;
    let begin = async {
        let mut session = open(&args.project, SessionOptions::default()).await?;
        let ticket = session.begin(command).await?;
        anyhow::Ok((session, ticket))
    };
    let begun = tokio::select! {
        begun = begin => begun.context("the command was not run"),
        // The next command removes the incomplete entry of the history.
        number = signals.next() => return Ok(Outcome::interrupted(number)),
    };
    let (session, ticket) = begun?;
    // A command in the background releases the session while it runs, because later commands need
    // the lock of the session.
    let session = (!args.background).then_some(session);
    // The words of the ticket start a script. It changes to the working directory of the command
    // and runs the command as root, so the script itself can start in any directory.
    let exec = ExecArgs {
        env: Vec::new(),
        workdir: Some("/".to_owned()),
        user: Some("root".to_owned()),
        timeout: None,
        interactive: args.interactive,
        tty: false,
        json: false,
        command: ticket.words.clone(),
    };
    let client = jiffy_daemon::open_client(&args.project.host.server()).await?;
    let target = RemoteSandbox::new(client, ticket.sandbox.clone())?;
    let outcome = session::run(&exec, &target, BTreeMap::new(), &mut signals).await?;
    finish(args, session, ticket, outcome).await
}

/// Copies the changes of the command to this host, and adds the result to the outcome.
async fn finish(
    args: &AgentShellExecArgs,
    session: Option<Session>,
    ticket: CommandTicket,
    mut outcome: Outcome,
) -> anyhow::Result<Outcome> {
    let code = outcome.finished.then_some(outcome.code);
    let finish = async {
        let mut session = match session {
            Some(session) => session,
            None => open(&args.project, SessionOptions::default()).await?,
        };
        session.finish(ticket, code).await
    };
    let text = match finish.await {
        Ok(entry) => entry.map(|entry| {
            let is_conflict = entry.rejected.iter().any(|file| file.is_conflict);
            (rejections(&entry), is_conflict)
        }),
        Err(e) => {
            let text = format!(
                "the changes of the command were not copied to the host: {}",
                crate::error_text::describe(&e)
            );
            Some((text, true))
        }
    };
    let Some((text, is_failure)) = text.filter(|(text, _)| !text.is_empty()) else {
        return Ok(outcome);
    };
    outcome.message = Some(match outcome.message {
        Some(message) => format!("{message}\n{text}"),
        None => text,
    });
    if is_failure && outcome.code == 0 {
        outcome.code = FAILURE_EXIT_CODE;
    }
    Ok(outcome)
}

/// Returns a message about files that were not copied to the host.
fn rejections(entry: &HistoryEntry) -> String {
    let lines = entry.rejected.iter().map(|file| {
        let kind = if file.is_conflict {
            "conflict"
        } else {
            "not copied"
        };
        let copy = match &file.copy {
            Some(path) => format!("the sandbox's version is {}", path.display()),
            None => "the sandbox deleted it".to_owned(),
        };
        let path = &file.path;
        format!(
            "{kind}: {path}: {}; the file of the host is unchanged, {copy}",
            file.reason
        )
    });
    lines.collect::<Vec<_>>().join("\n")
}
