//! Tools that run commands.
//!
//! A command runs to its end, or in the background. `sandbox_process` reads the output of a
//! background command, and sends input.

use crate::catalog::{Effect, Reply, ToolEntry};
use crate::command::{self, Background, BackgroundEnd, CommandResult, CommandSpec};
use crate::error::{ToolError, ToolResult};
use crate::options::ToolGroup;
use crate::session::Session;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Default timeout of a command in seconds.
pub const DEFAULT_TIMEOUT_S: u32 = 60;
/// Maximum timeout of a command in seconds.
const MAX_TIMEOUT_S: u32 = 24 * 3600;
/// Maximum time of a call that waits for a command in the background.
const MAX_WAIT_S: u32 = 600;
/// Time for a killed process to exit.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the tools.
pub fn tools() -> Vec<ToolEntry> {
    let group = ToolGroup::Commands;
    vec![
        ToolEntry::new(
            "sandbox_exec",
            group,
            Effect::Destructive,
            "Run a shell command in a sandbox. stdout and stderr have at most 16 KiB each: the \
             beginning and the end of longer output, which is complete (up to 64 MiB) in the file \
             that the result names. With `background`, returns at once with the id for \
             sandbox_process.",
            exec,
        ),
        ToolEntry::new(
            "sandbox_process",
            group,
            Effect::Destructive,
            "Control a command that sandbox_exec started in the background: read its output since \
             the previous read, write to its standard input, or kill it.",
            process,
        ),
    ]
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ExecArguments {
    /// Id or name of the sandbox.
    sandbox: String,
    /// Command for the shell.
    command: String,
    /// Working directory. Defaults to the template's.
    cwd: Option<String>,
    /// Additional environment variables.
    #[serde(default)]
    env: BTreeMap<String, String>,
    /// Time after which the command is killed, in seconds. Defaults to 60; in the background the
    /// command has no default timeout.
    #[schemars(range(min = 1, max = 86_400))]
    timeout_s: Option<u32>,
    /// Return at once, and let the command run. Defaults to false.
    #[serde(default)]
    background: bool,
}

/// Result of a command.
#[derive(Serialize, JsonSchema)]
pub struct ExecOutput {
    /// Exit code; 128 + number if a signal terminated the command. Absent if the command was killed
    /// at its timeout or runs in the background.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// Standard output, at most 16 KiB.
    pub stdout: String,
    /// Standard error, at most 16 KiB.
    pub stderr: String,
    /// True if the command was killed at its timeout.
    pub timed_out: bool,
    /// True if the command was killed because the sandbox had no memory left.
    pub oom_killed: bool,
    /// Number of bytes of standard output.
    pub stdout_bytes: u64,
    /// Number of bytes of standard error.
    pub stderr_bytes: u64,
    /// File in the sandbox with the complete standard output, if `stdout` is not complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stdout_file: Option<String>,
    /// File in the sandbox with the complete standard error, if `stderr` is not complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stderr_file: Option<String>,
    /// Id of a command in the background, for sandbox_process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<u32>,
}

impl From<CommandResult> for ExecOutput {
    fn from(result: CommandResult) -> Self {
        let status = result.status.as_ref();
        Self {
            exit_code: status.map(|status| status.exit_code),
            timed_out: status.is_none(),
            oom_killed: status.is_some_and(|status| status.oom_killed),
            stdout: result.stdout.text,
            stderr: result.stderr.text,
            stdout_bytes: result.stdout.bytes,
            stderr_bytes: result.stderr.bytes,
            stdout_file: result.stdout.file,
            stderr_file: result.stderr.file,
            id: None,
        }
    }
}

/// Returns a timeout in the permitted range.
pub fn timeout(seconds: Option<u32>, default: u32) -> ToolResult<Duration> {
    let seconds = seconds.unwrap_or(default);
    if (1..=MAX_TIMEOUT_S).contains(&seconds) {
        return Ok(Duration::from_secs(seconds.into()));
    }
    Err(ToolError::new(format!(
        "`timeout_s` must be 1 to {MAX_TIMEOUT_S}"
    )))
}

/// `sandbox_exec`: runs a command, or starts it in the background.
async fn exec(session: Arc<Session>, arguments: ExecArguments) -> ToolResult<Reply<ExecOutput>> {
    let limit = match (arguments.timeout_s, arguments.background) {
        (None, true) => None,
        (seconds, _) => Some(timeout(seconds, DEFAULT_TIMEOUT_S)?),
    };
    let spec = CommandSpec {
        command: arguments.command,
        cwd: arguments.cwd,
        env: arguments.env,
        timeout: limit,
    };
    if !arguments.background {
        let result = command::run(&session, &arguments.sandbox, &spec).await?;
        return Ok(ExecOutput::from(result).into());
    }
    // A command in the background belongs to the sandbox, not to its name.
    let (sandbox, _) = session.running(&arguments.sandbox).await?;
    let sandbox = sandbox.record.id;
    let background = Background::start(&session, &sandbox, &spec).await?;
    let id = background.pid;
    let key = (sandbox, id);
    session.background.lock().insert(key, background);
    let output = ExecOutput {
        exit_code: None,
        stdout: String::new(),
        stderr: String::new(),
        timed_out: false,
        oom_killed: false,
        stdout_bytes: 0,
        stderr_bytes: 0,
        stdout_file: None,
        stderr_file: None,
        id: Some(id),
    };
    Ok(output.into())
}

/// Action on a command in the background.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum ProcessAction {
    /// Returns the output since the previous read.
    Read,
    /// Writes `input` to standard input.
    Write,
    /// Kills the command.
    Kill,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ProcessArguments {
    /// Id or name of the sandbox.
    sandbox: String,
    /// Id that sandbox_exec returned.
    id: u32,
    /// Action: read, write or kill.
    action: ProcessAction,
    /// Text for the action `write`. End lines with a line feed.
    input: Option<String>,
    /// Maximum time to wait for output or the end of the command, in seconds. Defaults to 0.
    #[serde(default)]
    #[schemars(range(min = 0, max = 600))]
    wait_s: u32,
}

#[derive(Serialize, JsonSchema)]
struct ProcessOutput {
    /// True while the command runs.
    running: bool,
    /// Exit code; 128 + number if a signal terminated the command.
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<i32>,
    /// Standard output since the previous call, at most 16 KiB: beginning and end.
    stdout: String,
    /// Standard error since the previous call, at most 16 KiB: beginning and end.
    stderr: String,
    /// Reason if the command ended without an exit code.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// `sandbox_process`: reads the output of a background process, writes to it, or kills it.
async fn process(
    session: Arc<Session>,
    arguments: ProcessArguments,
) -> ToolResult<Reply<ProcessOutput>> {
    if arguments.wait_s > MAX_WAIT_S {
        let message = format!("`wait_s` must be at most {MAX_WAIT_S}");
        return Err(ToolError::new(message));
    }
    let (sandbox, agent) = session.running(&arguments.sandbox).await?;
    let key = (sandbox.record.id, arguments.id);
    let known = session.background.lock().get(&key).cloned();
    let background = match known {
        Some(background) => background,
        None => {
            // An earlier server started the command.
            let background = Background::connect(&agent, arguments.id).await?;
            let started = Arc::clone(&background);
            session.background.lock().insert(key.clone(), started);
            background
        }
    };
    match (arguments.action, &arguments.input) {
        (ProcessAction::Read, None) => {}
        (ProcessAction::Write, Some(input)) => background.write(input.as_bytes()).await?,
        (ProcessAction::Kill, None) => background.kill(KILL_TIMEOUT).await,
        (ProcessAction::Write, None) => {
            return Err(ToolError::new("the action `write` needs `input`"));
        }
        (_, Some(_)) => {
            return Err(ToolError::new("only the action `write` accepts `input`"));
        }
    }
    let wait = Duration::from_secs(arguments.wait_s.into());
    let output = background.read(wait).await;
    let (exit_code, reason) = match &output.end {
        Some(BackgroundEnd::Exited(status)) => (Some(status.exit_code), None),
        Some(BackgroundEnd::TimedOut) => (None, Some("killed at its timeout".to_owned())),
        Some(BackgroundEnd::Lost(reason)) => (None, Some(reason.clone())),
        None => (None, None),
    };
    if output.end.is_some() {
        session.background.lock().remove(&key);
    }
    let output = ProcessOutput {
        running: output.end.is_none(),
        exit_code,
        stdout: output.stdout.text(None).0,
        stderr: output.stderr.text(None).0,
        reason,
    };
    Ok(output.into())
}
