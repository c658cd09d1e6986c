//! The tool that runs a command or code in a new sandbox.

use super::code::{self, CodeOutput};
use super::commands::{DEFAULT_TIMEOUT_S, ExecOutput, timeout};
use super::sandboxes::{SandboxRequest, create_sandbox};
use crate::catalog::{Effect, Reply, ToolEntry};
use crate::command::{self, CommandSpec};
use crate::error::{ToolError, ToolResult};
use crate::options::ToolGroup;
use crate::session::{RemoveOnDrop, Session};
use jiffy_client::Sandbox;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Time of the sandbox in addition to the timeout of the command, in seconds.
const SPARE_S: u64 = 60;

/// Returns the tool.
pub fn tools() -> Vec<ToolEntry> {
    vec![ToolEntry::new(
        "sandbox_run",
        ToolGroup::Sandboxes,
        Effect::Additive,
        "Run one shell command, or one piece of code, in a new sandbox that is removed afterwards. \
         Use sandbox_create for several steps.",
        run,
    )]
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RunArguments {
    /// Command for the shell. Specify either `command` or `code`.
    command: Option<String>,
    /// Code for the code interpreter.
    code: Option<String>,
    /// Language of the code: python, javascript, typescript or bash. Defaults to python.
    language: Option<String>,
    /// Template. Defaults to `base` for a command and to `code-interpreter-v1` for code.
    template: Option<String>,
    /// Image of a registry to start from, for example `python:3.12`, instead of a template.
    image: Option<String>,
    /// Files to write before the start: text by path.
    #[serde(default)]
    files: BTreeMap<String, String>,
    /// Time after which the command is killed, in seconds. Defaults to 60.
    #[schemars(range(min = 1, max = 86_400))]
    timeout_s: Option<u32>,
}

#[derive(Serialize, JsonSchema)]
struct RunOutput {
    /// Result of the command.
    #[serde(skip_serializing_if = "Option::is_none")]
    command: Option<ExecOutput>,
    /// Result of the code.
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<CodeOutput>,
}

/// Runs a command or code in a new sandbox, which is removed afterwards.
async fn run(session: Arc<Session>, arguments: RunArguments) -> ToolResult<Reply<RunOutput>> {
    let limit = timeout(arguments.timeout_s, DEFAULT_TIMEOUT_S)?;
    let default_template = match (&arguments.command, &arguments.code) {
        (Some(_), None) if arguments.language.is_some() => {
            return Err(ToolError::new("`language` applies to `code` only: omit it"));
        }
        (Some(_), None) => "base",
        (None, Some(_)) => code::TEMPLATE,
        _ => return Err(ToolError::new("specify either `command` or `code`")),
    };
    let request = SandboxRequest {
        template: arguments.template.clone(),
        image: arguments.image.clone(),
        timeout_s: u32::try_from(limit.as_secs() + SPARE_S).ok(),
        ..SandboxRequest::default()
    };
    let sandbox = create_sandbox(&session, request, default_template).await?;
    let removal = RemoveOnDrop::new(&session, &sandbox);
    let result = run_in(&session, &sandbox, arguments, limit).await;
    removal.finish().await;
    result
}

/// Runs the command or the code in the new sandbox.
async fn run_in(
    session: &Arc<Session>,
    sandbox: &Sandbox,
    arguments: RunArguments,
    limit: Duration,
) -> ToolResult<Reply<RunOutput>> {
    let agent = session.use_agent(sandbox)?;
    for (path, text) in arguments.files {
        let written = agent.write(&path, None, text).await;
        written.map_err(|e| ToolError::of_path("write", &path, &e))?;
    }
    if let Some(command) = arguments.command {
        let spec = CommandSpec {
            command,
            timeout: Some(limit),
            ..CommandSpec::default()
        };
        let mut output = ExecOutput::from(command::run(session, &sandbox.record.id, &spec).await?);
        // The files are removed with the sandbox.
        output.stdout_file = None;
        output.stderr_file = None;
        let command = Some(output);
        return Ok(RunOutput {
            command,
            code: None,
        }
        .into());
    }
    let request = code::CodeRequest {
        code: arguments.code.unwrap_or_default(),
        language: arguments.language,
        context: None,
        timeout: limit,
    };
    let (output, images) = code::run_in(session, sandbox, request).await?;
    let output = RunOutput {
        command: None,
        code: Some(output),
    };
    Ok(Reply::with_images(output, images))
}
