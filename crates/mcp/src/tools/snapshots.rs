//! Tools for snapshots, forks and comparison.

use super::sandboxes::{SandboxArguments, SandboxRequest, SandboxSummary, create_sandbox};
use crate::catalog::{Effect, Reply, ToolEntry};
use crate::error::{ToolError, ToolResult};
use crate::options::ToolGroup;
use crate::output::cut_text;
use crate::session::{RemoveOnDrop, Session};
use jiffy_agent_client::{AgentClient, FileChanges};
use jiffy_api_types::Forked;
use jiffy_client::SnapshotAck;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
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
            "List files that a sandbox changed, at most 1000.",
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
    /// `template` (the default), or the id or name of a snapshot of the sandbox. For a snapshot, a
    /// temporary sandbox is created.
    against: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
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
}

#[derive(Serialize, JsonSchema)]
struct DiffOutput {
    /// Changes, sorted by path.
    changes: Vec<DiffChange>,
    /// True if there are further changes.
    more: bool,
}

async fn diff(session: Arc<Session>, arguments: DiffArguments) -> ToolResult<Reply<DiffOutput>> {
    let agent = session.agent(&arguments.sandbox).await?;
    let now = agent.changes(MAX_COMPARED).await?;
    let snapshot = arguments.against.filter(|against| against != TEMPLATE);
    let (mut changes, is_incomplete) = match snapshot {
        None => {
            let is_incomplete = now.more;
            let changes = now.changes.into_iter();
            let changes = changes.filter_map(|c| Some((c.path, template_kind(c.kind)?)));
            (changes.collect(), is_incomplete)
        }
        Some(snapshot) => {
            let request = SandboxRequest {
                snapshot: Some(snapshot),
                network: Some(false),
                ..SandboxRequest::default()
            };
            let earlier = create_sandbox(&session, request, "").await?;
            let removal = RemoveOnDrop::new(&session, &earlier);
            let result = compare(&agent, now, &session.client.agent(&earlier)?).await;
            removal.finish().await;
            result?
        }
    };
    changes.sort();
    let more = is_incomplete || changes.len() > MAX_CHANGES;
    changes.truncate(MAX_CHANGES);
    let changes = changes.into_iter().map(|(path, kind)| DiffChange {
        path: cut_text(&path, 1024),
        kind,
    });
    let changes = changes.collect();
    Ok(DiffOutput { changes, more }.into())
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

/// Returns the changes between two sandboxes of one template, and whether they are incomplete.
async fn compare(
    agent: &AgentClient,
    now: FileChanges,
    earlier_agent: &AgentClient,
) -> ToolResult<(Vec<(String, ChangeKind)>, bool)> {
    let earlier = earlier_agent.changes(MAX_COMPARED).await?;
    let is_incomplete = now.more || earlier.more;
    let (now, earlier) = (by_path(now), by_path(earlier));
    let mut changes = Vec::new();
    for path in now
        .keys()
        .chain(earlier.keys().filter(|path| !now.contains_key(*path)))
    {
        let kinds = (now.get(path).copied(), earlier.get(path).copied());
        let kind = match exists_in(kinds) {
            (true, false) => ChangeKind::Added,
            (false, true) => ChangeKind::Removed,
            (false, false) => continue,
            // Both sandboxes may have changed the file in the same way.
            (true, true) if matches!(kinds, (Some(_), Some(_))) => {
                if is_equal(agent, earlier_agent, path).await? {
                    continue;
                }
                ChangeKind::Changed
            }
            (true, true) => ChangeKind::Changed,
        };
        changes.push((path.clone(), kind));
    }
    Ok((changes, is_incomplete))
}

fn by_path(changes: FileChanges) -> BTreeMap<String, char> {
    changes
        .changes
        .into_iter()
        .map(|c| (c.path, c.kind))
        .collect()
}

/// Returns whether a path exists in both sandboxes, for its changes relative to the template.
fn exists_in((now, earlier): (Option<char>, Option<char>)) -> (bool, bool) {
    let exists = |own: Option<char>, other: Option<char>| match own {
        Some(kind) => kind != 'D',
        // The file is as in the template: it exists there unless the other sandbox added it.
        None => other != Some('A'),
    };
    (exists(now, earlier), exists(earlier, now))
}

/// Returns whether a file has the same type, size, permissions and time in both sandboxes.
async fn is_equal(agent: &AgentClient, earlier: &AgentClient, path: &str) -> ToolResult<bool> {
    let (a, b) = tokio::join!(agent.stat(path, None), earlier.stat(path, None));
    let failed = |e| ToolError::of_path("compare", path, &e);
    let (a, b) = (a.map_err(failed)?, b.map_err(failed)?);
    Ok(a.kind == b.kind
        && (a.size, a.mode, a.modified_time, a.symlink_target)
            == (b.size, b.mode, b.modified_time, b.symlink_target))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn existence_follows_from_the_changes_relative_to_the_template() {
        for (now, earlier, expected) in [
            (Some('A'), None, (true, false)),
            (None, Some('A'), (false, true)),
            (Some('D'), None, (false, true)),
            (None, Some('D'), (true, false)),
            (Some('C'), None, (true, true)),
            (None, Some('C'), (true, true)),
            (Some('A'), Some('A'), (true, true)),
            (Some('D'), Some('D'), (false, false)),
            (Some('D'), Some('C'), (false, true)),
        ] {
            assert_eq!(exists_in((now, earlier)), expected, "{now:?} {earlier:?}");
        }
    }
}
