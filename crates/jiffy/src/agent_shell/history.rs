//! `jiffy history`: lists the commands of a project. The history is a part of the project's
//! *session*, which also has the project's sandbox.

use super::find_project;
use crate::cli::HistoryArgs;
use jiff::Timestamp;
use jiffy_client::terminal;
use jiffy_coding_agent::{CommandStatus, HistoryEntry, Session};
use serde::Serialize;
use std::process::ExitCode;

/// Maximum length of a command in the list, in characters.
const MAX_COMMAND_CHARS: usize = 100;
/// Maximum number of files of a command in the list.
const MAX_FILES: usize = 20;

/// Command in the list of `--json`. The field names are part of the interface.
#[derive(Serialize)]
struct ListedCommand<'a> {
    number: u64,
    started: String,
    command: &'a str,
    status: &'static str,
    exit_code: Option<u8>,
    snapshot: Option<&'a str>,
    changes: Vec<ListedChange>,
    not_copied: Vec<ListedRejection<'a>>,
}

/// Changed file, for `--json`.
#[derive(Serialize)]
struct ListedChange {
    path: String,
    kind: char,
}

/// Change that was not copied back to the host, for `--json`.
#[derive(Serialize)]
struct ListedRejection<'a> {
    path: String,
    reason: &'a str,
    conflict: bool,
    copy: Option<String>,
}

impl<'a> ListedCommand<'a> {
    fn new(entry: &'a HistoryEntry) -> Self {
        let (status, exit_code) = match entry.status {
            CommandStatus::Preparing => ("preparing", None),
            CommandStatus::Running => ("running", None),
            CommandStatus::Exited(code) => ("exited", Some(code)),
            CommandStatus::Interrupted => ("interrupted", None),
        };
        let changes = entry.changes.iter();
        let rejected = entry.rejected.iter();
        Self {
            number: entry.number,
            started: started(entry),
            command: &entry.command,
            status,
            exit_code,
            snapshot: entry.snapshot.as_deref(),
            changes: changes
                .map(|(path, change)| ListedChange {
                    path: path.to_string(),
                    kind: change.letter(),
                })
                .collect(),
            not_copied: rejected
                .map(|file| ListedRejection {
                    path: file.path.to_string(),
                    reason: &file.reason,
                    conflict: file.is_conflict,
                    copy: file.copy.as_ref().map(|copy| copy.display().to_string()),
                })
                .collect(),
        }
    }
}

/// Returns the start of a command in UTC.
fn started(entry: &HistoryEntry) -> String {
    let ms = i64::try_from(entry.started_ms).unwrap_or(0);
    let time = Timestamp::from_millisecond(ms).unwrap_or(Timestamp::UNIX_EPOCH);
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Returns the beginning of a command for a list.
pub fn first_line(command: &str) -> String {
    let line = command.trim_start().lines().next().unwrap_or_default();
    let mut text: String = line.chars().take(MAX_COMMAND_CHARS).collect();
    if text.len() < command.trim().len() {
        text.push('…');
    }
    terminal::line(&text).into_owned()
}

/// Prints the commands of a project, the latest last.
pub fn history(args: &HistoryArgs) -> anyhow::Result<ExitCode> {
    let project = find_project(args.project.as_deref())?;
    let entries = Session::read_history(&project)?;
    let skipped = entries
        .len()
        .saturating_sub(args.count.unwrap_or(usize::MAX));
    let commands: Vec<_> = entries[skipped..].iter().map(ListedCommand::new).collect();
    if args.json {
        outln!("{}", terminal::json(&commands)?);
        return Ok(ExitCode::SUCCESS);
    }
    for command in &commands {
        let status = match command.exit_code {
            Some(code) => format!("exit {code}"),
            None => command.status.to_owned(),
        };
        let (number, started) = (command.number, &command.started);
        outln!(
            "{number:>4}  {started}  {status:<12} {}",
            first_line(command.command)
        );
        for change in command.changes.iter().take(MAX_FILES) {
            outln!("        {} {}", change.kind, change.path);
        }
        if command.changes.len() > MAX_FILES {
            outln!(
                "        and {} more files",
                command.changes.len() - MAX_FILES
            );
        }
        for file in &command.not_copied {
            outln!("        not copied: {}", file.path);
        }
    }
    Ok(ExitCode::SUCCESS)
}
