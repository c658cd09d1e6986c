//! Tools for snapshots, forks and comparison.
//!
//! The functions of a tool check its arguments, call the API of the daemon, and return a bounded
//! result.

use super::sandboxes::{SandboxArguments, SandboxSummary};
use crate::catalog::{Effect, Reply, ToolEntry};
use crate::error::{ToolError, ToolResult};
use crate::options::ToolGroup;
use crate::output::cut_text;
use crate::session::Session;
use jiffy_api_types::{DifferenceKind, Forked};
use jiffy_client::{SnapshotAck, has_error_code};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Maximum number of changes that are compared.
const MAX_COMPARED: u32 = 10_000;
/// Maximum number of changes in a result.
const MAX_CHANGES: usize = 1000;
/// Value of `against` for the template.
const TEMPLATE: &str = "template";

/// Returns the tools.
pub fn tools() -> Vec<ToolEntry> {
    let group = ToolGroup::Snapshots;
    vec![
        ToolEntry::new(
            "snapshot",
            group,
            Effect::Additive,
            "Take a snapshot of a running sandbox: files, memory and processes. The sandbox stops \
             for a few milliseconds. Take one before a risky step.",
            snapshot,
        ),
        ToolEntry::new(
            "rollback",
            group,
            Effect::Destructive,
            "Roll back a sandbox to one of its snapshots: all later changes of files and processes \
             are lost.",
            rollback,
        ),
        ToolEntry::new(
            "fork",
            group,
            Effect::Additive,
            "Create copies of a running sandbox with its files, memory and processes, to try \
             alternatives in parallel. The copies end with this session.",
            fork,
        ),
        ToolEntry::new(
            "promote",
            group,
            Effect::Destructive,
            "Keep one copy of a fork and remove its siblings.",
            promote,
        ),
        ToolEntry::new(
            "diff",
            group,
            Effect::ReadOnly,
            "List files that a sandbox added, changed or removed, compared with its template, a \
             snapshot or another sandbox. At most 1000.",
            diff,
        ),
    ]
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SnapshotArguments {
    /// Id or name of the sandbox.
    sandbox: String,
    /// Name of the snapshot, usable in place of its id.
    name: Option<String>,
}

#[derive(Serialize, JsonSchema)]
struct SnapshotOutput {
    /// Id of the snapshot, for rollback, diff and sandbox_create.
    snapshot: String,
    /// Name of the snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// Time for which the sandbox was stopped, in milliseconds.
    stopped_ms: f64,
}

/// Takes a snapshot.
async fn snapshot(
    session: Arc<Session>,
    arguments: SnapshotArguments,
) -> ToolResult<Reply<SnapshotOutput>> {
    let (id, name) = (&arguments.sandbox, arguments.name.as_deref());
    let client = &session.client;
    let taken = client.snapshot_sandbox(id, name, SnapshotAck::Stored).await;
    let taken = taken.map_err(|e| ToolError::of_sandbox(id, &e))?;
    let output = SnapshotOutput {
        snapshot: taken.id,
        name: taken.name,
        stopped_ms: taken.stopped_ms,
    };
    Ok(output.into())
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RollbackArguments {
    /// Id or name of the sandbox.
    sandbox: String,
    /// Id or name of a snapshot of the sandbox or of its ancestors.
    snapshot: String,
}

/// Rolls a sandbox back to a snapshot.
async fn rollback(
    session: Arc<Session>,
    arguments: RollbackArguments,
) -> ToolResult<Reply<SandboxSummary>> {
    let (id, snapshot) = (&arguments.sandbox, &arguments.snapshot);
    let rolled_back = session.client.rollback(id, snapshot).await;
    let record = rolled_back.map_err(|e| ToolError::of_snapshot(id, snapshot, &e))?;
    // Processes and contexts of the time after the snapshot no longer exist.
    session
        .background
        .lock()
        .retain(|(s, _), _| *s != record.id);
    session.contexts.lock().retain(|(s, ..), _| *s != record.id);
    Ok(SandboxSummary::from(record).into())
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ForkArguments {
    /// Id or name of the sandbox.
    sandbox: String,
    /// Number of copies. Defaults to 1.
    #[schemars(range(min = 1, max = 100))]
    count: Option<u8>,
}

#[derive(Serialize, JsonSchema)]
struct ForkOutput {
    /// Snapshot that all copies start from.
    snapshot: String,
    /// Ids of the copies.
    sandboxes: Vec<String>,
    /// Errors of copies that were not created.
    errors: Vec<String>,
}

/// Forks a sandbox. The children are removed if the call is cancelled, and when the session ends.
async fn fork(session: Arc<Session>, arguments: ForkArguments) -> ToolResult<Reply<ForkOutput>> {
    let (id, count) = (arguments.sandbox, arguments.count.unwrap_or(1));
    let (forking, undoing) = (Arc::clone(&session), Arc::clone(&session));
    let fork = async move {
        let forked = forking.client.fork(&id, count.into()).await;
        let forked = forked.map_err(|e| ToolError::of_sandbox(&id, &e))?;
        for child in ids(&forked) {
            forking.lease(&child).await?;
        }
        Ok(forked)
    };
    let undo = |forked: Vec<Forked>| async move {
        for child in ids(&forked) {
            undoing.remove(&child).await;
        }
    };
    let forked = session.uncancelled(fork, undo).await?;
    let errors = forked.iter().filter_map(|child| child.error.as_ref());
    let output = ForkOutput {
        snapshot: forked
            .first()
            .map(|f| f.snapshot_id.clone())
            .unwrap_or_default(),
        sandboxes: ids(&forked),
        errors: errors.map(|error| cut_text(&error.message, 1024)).collect(),
    };
    Ok(output.into())
}

/// Returns the ids of the children.
fn ids(forked: &[Forked]) -> Vec<String> {
    let children = forked.iter().filter_map(|child| child.sandbox.as_ref());
    children
        .map(|sandbox| sandbox.added.jiffy.id.clone())
        .collect()
}

#[derive(Serialize, JsonSchema)]
struct PromoteOutput {
    /// Ids of the sandboxes that were removed.
    removed: Vec<String>,
}

async fn promote(
    session: Arc<Session>,
    arguments: SandboxArguments,
) -> ToolResult<Reply<PromoteOutput>> {
    let id = &arguments.sandbox;
    let removed = session.client.promote(id).await;
    let removed = removed.map_err(|e| ToolError::of_sandbox(id, &e))?;
    let removed: Vec<String> = removed.into_iter().map(|sandbox| sandbox.id).collect();
    removed.iter().for_each(|id| session.forget(id));
    Ok(PromoteOutput { removed }.into())
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DiffArguments {
    /// Id or name of the sandbox.
    sandbox: String,
    /// `template` (the default), or the id or name of a snapshot or of another sandbox of the same
    /// template, with which the contents of the files are compared.
    against: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum ChangeKind {
    /// The file was added.
    Added,
    /// The file was changed.
    Changed,
    /// The file was removed.
    Removed,
}

#[derive(Debug, PartialEq, Serialize, JsonSchema)]
struct DiffChange {
    /// Absolute path.
    path: String,
    /// Kind of the change: `added`, `changed` or `removed`.
    kind: ChangeKind,
    /// Former size in bytes. Absent for an added file, and for a comparison with the template.
    #[serde(skip_serializing_if = "Option::is_none")]
    size_before: Option<u64>,
    /// Present size in bytes. Absent for a removed file, and for a comparison with the template.
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<u64>,
}

impl DiffChange {
    fn new(path: String, kind: ChangeKind) -> Option<Self> {
        Some(Self {
            path: cut_text(&path, 1024),
            kind,
            size_before: None,
            size: None,
        })
    }
}

#[derive(Serialize, JsonSchema)]
struct DiffOutput {
    /// Changes, sorted by path.
    changes: Vec<DiffChange>,
    /// True if there are further changes.
    more: bool,
}

/// Lists the files that differ from the template, or from another sandbox or snapshot.
async fn diff(session: Arc<Session>, arguments: DiffArguments) -> ToolResult<Reply<DiffOutput>> {
    let (mut changes, more) = match arguments.against.filter(|against| against != TEMPLATE) {
        None => {
            let agent = session.agent(&arguments.sandbox).await?;
            let found = agent.changes(MAX_COMPARED).await?;
            let changes = found.changes.into_iter();
            let changes = changes.filter_map(|c| DiffChange::new(c.path, template_kind(c.kind)?));
            (changes.collect(), found.more)
        }
        Some(against) => compare(&session, &arguments.sandbox, &against).await?,
    };
    changes.sort_by(|one, other| one.path.cmp(&other.path));
    let more = more || changes.len() > MAX_CHANGES;
    changes.truncate(MAX_CHANGES);
    Ok(DiffOutput { changes, more }.into())
}

/// Returns the differences of a sandbox from another object, and whether there are more.
async fn compare(
    session: &Session,
    sandbox: &str,
    against: &str,
) -> ToolResult<(Vec<DiffChange>, bool)> {
    let client = &session.client;
    let failed = |e: anyhow::Error| ToolError::of_snapshot(sandbox, against, &e);
    let now = client.sandbox(sandbox).await.map_err(failed)?.record.id;
    // `against` may be the name of a snapshot and of a sandbox: the snapshot takes precedence.
    let earlier = match client.snapshot(against).await {
        Ok(record) => record.id,
        Err(e) if has_error_code(&e, "snapshot_not_found") => {
            let other = client.sandbox(against).await.map_err(|_| failed(e))?;
            other.record.id
        }
        Err(e) => return Err(failed(e)),
    };
    let compared = client.compare(&earlier, &now, MAX_CHANGES).await;
    let (comparison, more) = compared.map_err(failed)?;
    let changes = comparison.changes.into_iter().map(|change| {
        let kind = match change.kind {
            DifferenceKind::Added => ChangeKind::Added,
            DifferenceKind::Changed => ChangeKind::Changed,
            DifferenceKind::Removed => ChangeKind::Removed,
        };
        DiffChange {
            path: cut_text(&change.path, 1024),
            kind,
            size_before: change.a.map(|state| state.size),
            size: change.b.map(|state| state.size),
        }
    });
    Ok((changes.collect(), more || comparison.incomplete))
}

fn template_kind(kind: char) -> Option<ChangeKind> {
    match kind {
        'A' => Some(ChangeKind::Added),
        'C' => Some(ChangeKind::Changed),
        'D' => Some(ChangeKind::Removed),
        // The guest chose the letter.
        _ => None,
    }
}
