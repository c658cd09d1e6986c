//! Tools that create, list and end sandboxes.
//!
//! A *session* is one connection of a client. Sandboxes that it creates are removed at its end.

use crate::catalog::{Effect, Reply, ToolEntry};
use crate::error::{ToolError, ToolResult};
use crate::images::import_image;
use crate::options::ToolGroup;
use crate::session::{SESSION_METADATA, Session};
use jiffy_api_types::SandboxInfo;
use jiffy_client::{NewSandbox, Sandbox, SandboxSettings};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Default timeout of a sandbox in seconds.
const DEFAULT_TIMEOUT_S: u32 = 3600;
/// Maximum number of sandboxes in a list.
const MAX_LISTED: usize = 100;

/// Returns the tools.
pub fn tools() -> Vec<ToolEntry> {
    let group = ToolGroup::Sandboxes;
    vec![
        ToolEntry::new(
            "sandbox_create",
            group,
            Effect::Additive,
            "Create a sandbox: an isolated Linux machine that keeps files and processes between \
             calls.",
            create,
        ),
        ToolEntry::new(
            "sandbox_list",
            group,
            Effect::ReadOnly,
            "List sandboxes, newest first.",
            list,
        ),
        ToolEntry::new(
            "sandbox_end",
            group,
            Effect::Destructive,
            "Kill a sandbox. Its files and processes are lost; its snapshots remain.",
            end,
        ),
    ]
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateArguments {
    /// Template to start from. Defaults to `base`; `code-interpreter-v1` has Python libraries and
    /// runs run_code.
    template: Option<String>,
    /// Image of a registry to start from, for example `python:3.12`, instead of a template.
    image: Option<String>,
    /// Id or name of a snapshot to start from, instead of a template.
    snapshot: Option<String>,
    /// Name of the sandbox, usable in place of its id.
    name: Option<String>,
    /// Number of virtual processors. Defaults to the template's number.
    #[schemars(range(min = 1, max = 64))]
    cpus: Option<u8>,
    /// Memory in MiB. Defaults to the template's size.
    memory_mb: Option<u32>,
    /// Access to the internet. Defaults to true.
    network: Option<bool>,
    /// Time after which the sandbox is killed, in seconds. Defaults to 3600.
    #[schemars(range(min = 1, max = 2_592_000))]
    timeout_s: Option<u32>,
    /// Let the sandbox run after the end of this session, until its timeout. Defaults to false.
    #[serde(default)]
    keep: bool,
}

/// Sandbox in a result.
#[derive(Serialize, JsonSchema)]
pub struct SandboxSummary {
    /// Id of the sandbox, for the argument `sandbox` of other tools.
    pub sandbox: String,
    /// Name of the sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// State: `running`, `paused`, `broken`, `creating` or `killed`.
    pub state: String,
    /// Template of the sandbox.
    pub template: String,
    /// Number of virtual processors.
    pub cpus: u8,
    /// Memory in MiB.
    pub memory_mb: u32,
    /// Name of the MCP session that created the sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
}

impl From<SandboxInfo> for SandboxSummary {
    fn from(info: SandboxInfo) -> Self {
        let mut metadata = info.settings.metadata;
        Self {
            sandbox: info.id,
            name: info.name,
            state: info.state.name().to_owned(),
            template: info.template,
            cpus: info.size.vcpus,
            memory_mb: info.size.memory_mib,
            session: metadata.remove(SESSION_METADATA),
        }
    }
}

/// Settings of a new sandbox.
#[derive(Default)]
pub struct SandboxRequest {
    /// Template.
    pub template: Option<String>,
    /// Image of a registry.
    pub image: Option<String>,
    /// Id or name of a snapshot.
    pub snapshot: Option<String>,
    /// Name of the sandbox.
    pub name: Option<String>,
    /// Number of virtual processors.
    pub cpus: Option<u8>,
    /// Memory in MiB.
    pub memory_mib: Option<u32>,
    /// False for a sandbox without access to the internet.
    pub network: Option<bool>,
    /// Timeout in seconds.
    pub timeout_s: Option<u32>,
    /// Let the sandbox run after the end of the session.
    pub keep: bool,
}

/// Creates a sandbox. `default_template` is used if the request has no source.
pub async fn create_sandbox(
    session: &Arc<Session>,
    request: SandboxRequest,
    default_template: &str,
) -> ToolResult<Sandbox> {
    let has_size = request.cpus.is_some() || request.memory_mib.is_some();
    let source = match (request.template, request.image, request.snapshot) {
        (None, None, Some(_)) if has_size => {
            return Err(ToolError::new(
                "a sandbox has the size of its snapshot: omit `cpus` and `memory_mb`",
            ));
        }
        (None, None, Some(snapshot)) => {
            let found = session.client.snapshot(&snapshot).await;
            let found = found.map_err(|e| ToolError::of_snapshot("", &snapshot, &e))?;
            found.id
        }
        (None, Some(image), None) => import_image(&session.client, &image).await?,
        (template, None, None) => {
            let template = template.unwrap_or_else(|| default_template.to_owned());
            // An invalid name is reported by the daemon.
            let exists = session.client.has_template(&template).await;
            if exists.unwrap_or(true) {
                template
            } else {
                session.templates.prepare(template).await?
            }
        }
        _ => {
            return Err(ToolError::new(
                "specify at most one of `template`, `image` and `snapshot`",
            ));
        }
    };
    let name = session.name(None).to_owned();
    let settings = SandboxSettings {
        name: request.name,
        metadata: BTreeMap::from([(SESSION_METADATA.to_owned(), name)]),
        internet: (request.network == Some(false)).then_some(false),
        ..SandboxSettings::default()
    };
    let new_sandbox = NewSandbox::of(source, BTreeMap::new())
        .with_partial_size(request.cpus, request.memory_mib, None)
        .with_settings(settings)
        .with_timeout_s(request.timeout_s.unwrap_or(DEFAULT_TIMEOUT_S));
    session.create(new_sandbox, request.keep).await
}

/// Creates a sandbox.
async fn create(
    session: Arc<Session>,
    arguments: CreateArguments,
) -> ToolResult<Reply<SandboxSummary>> {
    let request = SandboxRequest {
        template: arguments.template,
        image: arguments.image,
        snapshot: arguments.snapshot,
        name: arguments.name,
        cpus: arguments.cpus,
        memory_mib: arguments.memory_mb,
        network: arguments.network,
        timeout_s: arguments.timeout_s,
        keep: arguments.keep,
    };
    let sandbox = create_sandbox(&session, request, "base").await?;
    Ok(SandboxSummary::from(sandbox.record).into())
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ListArguments {
    /// Text in the id, name, template, state or session of the sandboxes. Defaults to all.
    query: Option<String>,
}

#[derive(Serialize, JsonSchema)]
struct SandboxList {
    /// Sandboxes, newest first.
    sandboxes: Vec<SandboxSummary>,
    /// Number of further sandboxes that are not in the list.
    omitted: usize,
}

/// Lists sandboxes, the newest first.
async fn list(session: Arc<Session>, arguments: ListArguments) -> ToolResult<Reply<SandboxList>> {
    let with_killed = false;
    let mut all = session.client.sandboxes(with_killed).await?;
    all.sort_by_key(|info| std::cmp::Reverse(info.created_ms));
    let mut sandboxes: Vec<SandboxSummary> = all.into_iter().map(SandboxSummary::from).collect();
    if let Some(query) = &arguments.query {
        sandboxes.retain(|s| {
            let texts = [Some(&s.sandbox), s.name.as_ref(), Some(&s.state)];
            let others = [Some(&s.template), s.session.as_ref()];
            let mut texts = texts.into_iter().chain(others).flatten();
            texts.any(|text| text.contains(query))
        });
    }
    let omitted = sandboxes.len().saturating_sub(MAX_LISTED);
    sandboxes.truncate(MAX_LISTED);
    Ok(SandboxList { sandboxes, omitted }.into())
}

/// Arguments of a tool for one sandbox.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SandboxArguments {
    /// Id or name of the sandbox.
    pub sandbox: String,
}

/// Kills a sandbox, and removes it from the session.
async fn end(
    session: Arc<Session>,
    arguments: SandboxArguments,
) -> ToolResult<Reply<SandboxSummary>> {
    let id = &arguments.sandbox;
    let forget_record = false;
    let ended = session.client.kill(id, forget_record).await;
    let ended = ended.map_err(|e| ToolError::of_sandbox(id, &e))?;
    session.forget(&ended.id);
    Ok(SandboxSummary::from(ended).into())
}
