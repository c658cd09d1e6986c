//! Completion of command lines in a shell.
//!
//! The shell runs this program with [`VARIABLE`] set, and the program prints the candidates. Ids
//! and names of sandboxes and snapshots come from the daemon of this host, if one runs.

use crate::cli::{Cli, CompletionShell};
use anyhow::Context;
use clap::CommandFactory;
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use clap_complete::env::{CompleteEnv, Shells};
use jiffy_daemon::local_daemon;
use jiffy_image::{Home, Templates, Visibility};
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

/// Environment variable with which the shell requests candidates.
const VARIABLE: &str = "COMPLETE";
/// Timeout of the daemon for candidates. Without an answer the list is empty.
const TIMEOUT: Duration = Duration::from_millis(100);
/// Name of the program, which the shell finds in `PATH`.
const PROGRAM: &str = "jiffy";

/// Kind of a value whose candidates come from the daemon or the data directory.
#[derive(Clone, Copy)]
enum ValueKind {
    Sandbox,
    Snapshot,
    SandboxOrSnapshot,
    Template,
}

/// Prints candidates and exits if the shell requested them.
pub fn answer_shell() {
    CompleteEnv::with_factory(command)
        .var(VARIABLE)
        .completer(PROGRAM)
        .complete();
}

/// `jiffy completions`.
pub fn print_script(shell: CompletionShell) -> anyhow::Result<ExitCode> {
    let shells = Shells::builtins();
    let completer = shells
        .completer(shell.name())
        .context("this shell has no completions")?;
    let mut script = Vec::new();
    completer.write_registration(VARIABLE, PROGRAM, PROGRAM, PROGRAM, &mut script)?;
    io::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the command line with candidates for its values.
fn command() -> clap::Command {
    with_candidates(Cli::command(), &[])
}

/// Adds candidates to a command. `path` has the names of the subcommands that lead to it.
fn with_candidates(command: clap::Command, path: &[&str]) -> clap::Command {
    command
        .mut_args(|arg| match value_kind(path, arg.get_id().as_str()) {
            Some(kind) => arg.add(ArgValueCandidates::new(move || candidates(kind))),
            None => arg,
        })
        .mut_subcommands(|subcommand| {
            let name = subcommand.get_name().to_owned();
            with_candidates(subcommand, &[path, &[&name]].concat())
        })
}

/// Returns the kind of the values of argument `id` of a subcommand. `None` if they have no
/// candidates.
fn value_kind(subcommand: &[&str], id: &str) -> Option<ValueKind> {
    match (subcommand, id) {
        (["inspect" | "rm"], "ids") => Some(ValueKind::SandboxOrSnapshot),
        (["create"], "from") | (["rollback"], "snapshot") => Some(ValueKind::Snapshot),
        // Ids in a shared store are not known to the daemon.
        (["store", _], _) => None,
        (["template", "build"], "recipe") => Some(ValueKind::Template),
        (["template", _], "name" | "names" | "from") => Some(ValueKind::Template),
        (["run" | "create" | "bench"], "template") => Some(ValueKind::Template),
        ([_], "id" | "ids") => Some(ValueKind::Sandbox),
        _ => None,
    }
}

/// Returns the candidates of a kind. The list is empty if the daemon does not answer in time.
fn candidates(kind: ValueKind) -> Vec<CompletionCandidate> {
    let candidates = match kind {
        ValueKind::Template => templates(),
        _ => from_daemon(kind),
    };
    candidates.unwrap_or_default()
}

fn templates() -> anyhow::Result<Vec<CompletionCandidate>> {
    let mut templates = Templates::new(&Home::locate()?).list()?;
    // Users do not enter the names of internal templates.
    templates.retain(|manifest| manifest.visibility != Visibility::Internal);
    let names = templates.iter().map(|manifest| manifest.reference());
    Ok(names.map(CompletionCandidate::new).collect())
}

fn from_daemon(kind: ValueKind) -> anyhow::Result<Vec<CompletionCandidate>> {
    crate::runtime()?
        .block_on(async { tokio::time::timeout(TIMEOUT, request_candidates(kind)).await })?
}

/// Returns ids and names of the objects that the daemon has. Fails if no daemon runs.
async fn request_candidates(kind: ValueKind) -> anyhow::Result<Vec<CompletionCandidate>> {
    let home = Home::locate()?;
    let stream = local_daemon::connect(&home).await;
    let client =
        jiffy_daemon::local_daemon::client_over(&home, stream.context("no daemon runs")?).await?;
    let mut candidates = Vec::new();
    // `SandboxOrSnapshot` needs both lists.
    if !matches!(kind, ValueKind::Snapshot) {
        for sandbox in client.listed_sandboxes(true).await? {
            let (id, name) = (sandbox.id.clone(), sandbox.name.clone());
            add(&mut candidates, id, name, sandbox.state.name());
        }
    }
    if !matches!(kind, ValueKind::Sandbox) {
        for snapshot in client.snapshots(None).await? {
            add(
                &mut candidates,
                snapshot.id.clone(),
                snapshot.name.clone(),
                "snapshot",
            );
        }
    }
    Ok(candidates)
}

/// Adds candidates for an id and for a name. The help text of the name shows the id, and the other
/// way round.
fn add(candidates: &mut Vec<CompletionCandidate>, id: String, name: Option<String>, state: &str) {
    let help = |other: &str| Some(format!("{state} {other}").trim_end().to_owned().into());
    if let Some(name) = &name {
        candidates.push(CompletionCandidate::new(name).help(help(&id)));
    }
    let other = name.unwrap_or_default();
    candidates.push(CompletionCandidate::new(id).help(help(&other)));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Appends the ids of arguments with candidates to `arguments`, each after its subcommands.
    fn completed(command: &clap::Command, path: &str, arguments: &mut Vec<String>) {
        for arg in command.get_arguments() {
            if arg.get::<ArgValueCandidates>().is_some() {
                arguments.push(format!("{path}{}", arg.get_id()));
            }
        }
        for subcommand in command.get_subcommands() {
            completed(
                subcommand,
                &format!("{path}{} ", subcommand.get_name()),
                arguments,
            );
        }
    }

    #[test]
    fn every_argument_that_names_a_sandbox_a_snapshot_or_a_template_is_completed() {
        let mut arguments = Vec::new();
        completed(&command(), "", &mut arguments);
        for expected in [
            "run template",
            "create template",
            "create from",
            "exec id",
            "shell id",
            "fork id",
            "rollback id",
            "rollback snapshot",
            "pause ids",
            "kill ids",
            "rm ids",
            "inspect ids",
            "template rm names",
            "template export name",
        ] {
            assert!(
                arguments.iter().any(|f| f == expected),
                "{expected}: {arguments:?}"
            );
        }
        let wrong = |f: &&String| f.starts_with("key") || f.starts_with("store");
        assert_eq!(arguments.iter().find(wrong), None);
    }

    #[test]
    fn scripts_of_all_shells_call_the_program() {
        for shell in [
            CompletionShell::Bash,
            CompletionShell::Zsh,
            CompletionShell::Fish,
        ] {
            let shells = Shells::builtins();
            let mut script = Vec::new();
            shells
                .completer(shell.name())
                .unwrap()
                .write_registration(VARIABLE, PROGRAM, PROGRAM, PROGRAM, &mut script)
                .unwrap();
            let script = String::from_utf8(script).unwrap();
            assert!(
                script.contains(VARIABLE) && script.contains(PROGRAM),
                "{script}"
            );
        }
    }
}
