//! Requests to the API, and their results as updates of the model.
//!
//! A request runs in a task. Its result reaches the main loop as an update of the model.

use super::control::Operation;
use super::header::{ResourceSource, Resources};
use super::model::{SnapshotLine, Target};
use super::row::{Row, Usage, short_id};
use super::schedule::Read;
use super::text_view::TextSource;
use crate::sandbox::table::{age, taken};
use crate::sandbox::{inspect, logs};
use jiffy_client::{
    Client, SandboxChanges, SandboxOrSnapshot, SnapshotAck, has_error_code, terminal,
};
use jiffy_sandbox_manager::Bytes;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::mpsc::Sender;

/// Maximum number of console lines.
const LOG_LINES: u16 = 1000;
/// Maximum number of snapshots in the list for a rollback.
const MAX_SNAPSHOTS: usize = 1000;
/// Maximum time for which a request waits for events.
const EVENT_WAIT: Duration = Duration::from_secs(20);
/// Minimum interval of requests for events.
const EVENT_INTERVAL: Duration = Duration::from_millis(250);
/// Pauses after failed requests for events.
const MIN_RETRY_PAUSE: Duration = Duration::from_millis(500);
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(10);

/// Changed rows by id. `None` if the sandbox no longer exists.
pub type RowChanges = Vec<(String, Option<Row>)>;

/// Result of a request.
pub enum Update {
    /// All sandboxes.
    Listed(anyhow::Result<Vec<Row>>),
    /// Sandboxes that were read.
    Changed(anyhow::Result<RowChanges>),
    /// Usage by sandbox.
    Usage(anyhow::Result<BTreeMap<String, Usage>>),
    /// Resources of the host, the fleet or the key.
    Resources(anyhow::Result<Resources>),
    /// Events of sandboxes.
    Events(anyhow::Result<SandboxChanges>),
    /// End of an operation, with a description of its result, and the sandbox after it.
    Done {
        target: Target,
        result: anyhow::Result<String>,
        changes: RowChanges,
    },
    /// Lines of an open view.
    Text(TextSource, anyhow::Result<Vec<String>>),
    /// Snapshots for a rollback.
    Snapshots(Target, anyhow::Result<Vec<SnapshotLine>>),
}

/// Reads all sandboxes.
pub async fn list(client: &Client) -> anyhow::Result<Vec<Row>> {
    let all = client.listed_sandboxes(false).await?;
    Ok(all.iter().map(Row::new).collect())
}

/// Executes a read of sandboxes.
pub async fn read(client: &Client, read: Read) -> Update {
    match read {
        Read::List => Update::Listed(list(client).await),
        Read::Sandboxes(ids) => Update::Changed(sandboxes(client, ids).await),
    }
}

async fn sandboxes(client: &Client, ids: Vec<String>) -> anyhow::Result<RowChanges> {
    let mut changes = Vec::new();
    for id in ids {
        let row = match client.listed_sandbox(&id).await {
            Ok(sandbox) => Some(Row::new(&sandbox)),
            Err(e) if has_error_code(&e, "sandbox_not_found") => None,
            Err(e) => return Err(e),
        };
        changes.push((id, row));
    }
    Ok(changes)
}

/// Measures the usage of the sandboxes `measured`, and reads the last samples of the sandboxes
/// `sampled`. The daemon takes samples of all running sandboxes at a fixed interval.
pub async fn usage(
    client: &Client,
    measured: &[String],
    sampled: &[String],
) -> anyhow::Result<BTreeMap<String, Usage>> {
    let sampled: Vec<&str> = sampled.iter().map(String::as_str).collect();
    let measured: Vec<&str> = measured.iter().map(String::as_str).collect();
    let mut metrics = client.sampled_metrics(&sampled).await?;
    metrics.extend(client.metrics(&measured).await?);
    let usage = metrics
        .iter()
        .map(|(id, metric)| (id.clone(), Usage::from(metric)));
    Ok(usage.collect())
}

/// Returns the source of the resources that the caller may see. Called once, because rejected calls
/// are recorded in the audit log.
pub async fn resource_source(client: &Client) -> anyhow::Result<ResourceSource> {
    if client.fleet_nodes().await.is_ok() {
        return Ok(ResourceSource::Fleet);
    }
    match client.host().await {
        Ok(_) => Ok(ResourceSource::Host),
        Err(e) if has_error_code(&e, "forbidden") => Ok(ResourceSource::Key),
        Err(e) => Err(e),
    }
}

/// Reads the resources.
pub async fn resources(client: &Client, source: ResourceSource) -> anyhow::Result<Resources> {
    Ok(match source {
        ResourceSource::Fleet => Resources::Fleet(client.fleet_nodes().await?),
        ResourceSource::Host => Resources::Host(Box::new(client.host().await?)),
        ResourceSource::Key => Resources::Key(Box::new(client.limits().await?)),
    })
}

/// Sends the events of sandboxes until the receiver is closed.
pub async fn follow_events(client: Client, updates: Sender<Update>) {
    let mut position: Option<String> = None;
    let mut is_positioned = false;
    let mut pause = MIN_RETRY_PAUSE;
    loop {
        let changes = if is_positioned {
            client.sandbox_changes(position.clone(), EVENT_WAIT).await
        } else {
            let newest = client.newest_event().await;
            newest.map(|position| SandboxChanges {
                position,
                // Sandboxes may have changed before this position was known.
                is_incomplete: true,
                ..SandboxChanges::default()
            })
        };
        let delay = match &changes {
            Ok(changes) => {
                position.clone_from(&changes.position);
                is_positioned = true;
                pause = MIN_RETRY_PAUSE;
                EVENT_INTERVAL
            }
            Err(_) => {
                pause = (pause * 2).min(MAX_RETRY_PAUSE);
                pause
            }
        };
        if updates.send(Update::Events(changes)).await.is_err() {
            return;
        }
        tokio::time::sleep(delay).await;
    }
}

/// Executes an operation on a sandbox, and reads the sandbox afterwards.
pub async fn operate(client: &Client, operation: &Operation, target: Target) -> Update {
    let result = execute(client, operation, &target).await;
    // A failure is corrected by the next read of the list.
    let changes = sandboxes(client, vec![target.id.clone()]).await;
    Update::Done {
        target,
        result,
        changes: changes.unwrap_or_default(),
    }
}

/// Executes an operation on a sandbox. Returns the message for the user.
async fn execute(
    client: &Client,
    operation: &Operation,
    target: &Target,
) -> anyhow::Result<String> {
    let (id, label) = (&*target.id, &target.label);
    Ok(match operation {
        Operation::Pause => {
            // `false`: does not wait until the shared store has the memory.
            client.pause(id, false).await?;
            format!("paused {label}")
        }
        Operation::Resume => {
            client.resume(id).await?;
            format!("resumed {label}")
        }
        Operation::Fork => {
            let mut children = Vec::new();
            for child in client.fork(id, 1).await? {
                match (child.sandbox, child.error) {
                    (Some(sandbox), _) => children.push(sandbox.sandbox_id),
                    (None, Some(error)) => anyhow::bail!("{}", error.message),
                    (None, None) => {}
                }
            }
            format!("forked {label}: created {}", children.join(", "))
        }
        Operation::Snapshot => {
            let snapshot = client
                .snapshot_sandbox(id, None, SnapshotAck::Stored)
                .await?;
            format!("took snapshot {} of {label}", snapshot.id)
        }
        Operation::Rollback(snapshot) => {
            client.rollback(id, snapshot).await?;
            format!("rolled back {label} to snapshot {}", short_id(snapshot))
        }
        Operation::Kill => {
            // `false`: the record of the killed sandbox remains.
            client.delete(id, false).await?;
            format!("killed {label}")
        }
    })
}

/// Reads the text of a view. Texts of this program are not read.
pub async fn text(client: &Client, source: &TextSource) -> anyhow::Result<Vec<String>> {
    match source {
        TextSource::Details(target) => {
            let sandbox = client.sandbox(&target.id).await?;
            let text = inspect::text(&SandboxOrSnapshot::Sandbox(Box::new(sandbox.record)));
            Ok(text.lines().map(str::to_owned).collect())
        }
        TextSource::Log(target) => {
            let console: logs::Console = client.last_lines(&target.id, "logs", LOG_LINES).await?;
            Ok(console.logs.into_iter().map(|line| line.line).collect())
        }
        TextSource::Messages | TextSource::Help => Ok(Vec::new()),
    }
}

/// Reads the snapshots to which a sandbox can be rolled back, newest first.
pub async fn snapshots(client: &Client, target: &Target) -> anyhow::Result<Vec<SnapshotLine>> {
    let mut all = client.snapshots(Some(&target.id)).await?;
    all.sort_by_key(|snapshot| Reverse(snapshot.created_ms));
    all.truncate(MAX_SNAPSHOTS);
    let line = |snapshot: &jiffy_client::Listed<jiffy_api_types::SnapshotInfo>| {
        let text = format!(
            "{:<8}  {:>7} ago  {:<20}  {:>10}  {}",
            short_id(&snapshot.id),
            age(snapshot.created_ms),
            taken(snapshot),
            Bytes(snapshot.bytes).to_string(),
            snapshot.name.as_deref().unwrap_or_default(),
        );
        SnapshotLine {
            id: snapshot.id.clone(),
            text: terminal::line(text.trim_end()).into_owned(),
        }
    };
    Ok(all.iter().map(line).collect())
}
