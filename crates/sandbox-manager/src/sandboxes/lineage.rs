//! Lineage of a sandbox or snapshot: all sandboxes and snapshots that are connected with it.
//!
//! The walk starts at one object and follows the indexes from object to object. It therefore reads
//! only records of this lineage, however many sandboxes other owners have.
//!
//! If snapshots between a snapshot and its parent were removed, they are *pruned*: the record of
//! the snapshot below them has their number, and describes the newest of them (`PrunedAncestors`).

mod runs;

use super::Sandboxes;
use super::snapshot_index::SnapshotIndex;
use crate::lineage_record::Rollback;
use crate::sandbox::Sandbox;
use crate::snapshot::Snapshot;
use jiffy_api_types::{SandboxSize, SandboxState, SnapshotPurpose, StateName};
use std::collections::{HashMap, HashSet, VecDeque};

/// Maximum number of nodes of a lineage.
pub const MAX_LINEAGE_NODES: usize = 5000;
/// Maximum number of objects that a walk reads. Series of automatic snapshots become one node, so a
/// walk may read more objects than the lineage has nodes.
const MAX_VISITED: usize = 4 * MAX_LINEAGE_NODES;

/// Object at which a lineage starts, by its complete id.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LineageObject {
    /// Sandbox.
    Sandbox(String),
    /// Snapshot.
    Snapshot(String),
}

/// Series of automatic snapshots that are not shortened to one node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum UnfoldedSeries {
    /// None.
    #[default]
    None,
    /// All series.
    All,
    /// The series that contain one of these snapshots.
    Containing(HashSet<String>),
}

impl UnfoldedSeries {
    /// Returns whether a series with the snapshots `ids` is not shortened.
    fn contains<'a>(&self, mut ids: impl Iterator<Item = &'a str>) -> bool {
        match self {
            Self::None => false,
            Self::All => true,
            Self::Containing(unfolded) => ids.any(|id| unfolded.contains(id)),
        }
    }
}

/// Connected sandboxes and snapshots.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Lineage {
    /// Nodes, oldest first. Nodes of unknown age come last.
    pub nodes: Vec<LineageNode>,
    /// Edges between these nodes.
    pub edges: Vec<LineageEdge>,
    /// True if nodes are missing because of [`MAX_LINEAGE_NODES`].
    pub is_truncated: bool,
}

/// Sandbox or snapshot of a lineage.
#[derive(Debug, Clone, PartialEq)]
pub struct LineageNode {
    /// Id.
    pub id: String,
    /// Name.
    pub name: Option<String>,
    /// Time of the creation, in milliseconds since 1970. `None` if the record was removed.
    pub created_ms: Option<u64>,
    /// Details of a sandbox or of a snapshot.
    pub details: NodeDetails,
}

/// Details of a node that depend on its kind.
#[derive(Debug, Clone, PartialEq)]
pub enum NodeDetails {
    /// Sandbox. `None` if it was killed and its record may be removed.
    Sandbox(Option<SandboxDetails>),
    /// Snapshot, or several consecutive snapshots.
    Snapshot(SnapshotDetails),
}

/// Details of a sandbox.
#[derive(Debug, Clone, PartialEq)]
pub struct SandboxDetails {
    /// State.
    pub state: StateName,
    /// Template.
    pub template: String,
    /// Resources.
    pub size: SandboxSize,
}

/// Details of a snapshot. For several snapshots: of the newest one.
#[derive(Debug, Clone, PartialEq)]
pub struct SnapshotDetails {
    /// Sandbox that the snapshot was taken of. `None` if it is unknown.
    pub sandbox: Option<String>,
    /// Nearest ancestor that is a node. For several snapshots: of the oldest one.
    pub parent: Option<String>,
    /// Purpose. `None` if the record was removed.
    pub purpose: Option<SnapshotPurpose>,
    /// Template and resources. `None` if the record was removed.
    pub template: Option<(String, SandboxSize)>,
    /// True if the snapshot is being stored.
    pub is_storing: bool,
    /// True if a client removed the snapshot. It may remain as long as other objects need it.
    pub is_removed: bool,
    /// Disk space without the ancestors, in bytes. For several snapshots: the sum.
    pub bytes: u64,
    /// Number of snapshots.
    pub count: u64,
}

/// Relation of two nodes.
#[derive(Debug, Clone, PartialEq)]
pub struct LineageEdge {
    /// Id of the node that has the relation.
    pub from: String,
    /// Id of the related node.
    pub to: String,
    /// Relation.
    pub relation: LineageRelation,
    /// Time, in milliseconds since 1970. `None` if it is unknown.
    pub at_ms: Option<u64>,
}

/// Relation between a sandbox and a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineageRelation {
    /// The snapshot `from` was taken of the sandbox `to`.
    SnapshotOf,
    /// The sandbox `from` was created from the snapshot `to`.
    StartedFrom,
    /// The sandbox `from` was rolled back to the snapshot `to`.
    RolledBackTo,
}

/// Part of a sandbox's record that the walk needs.
struct SandboxParts {
    node: LineageNode,
    snapshot: Option<String>,
    started_from: Option<String>,
    rollbacks: Vec<Rollback>,
}

impl Sandboxes {
    /// Returns the lineage of an object. Only objects whose owner `is_visible` are nodes, and only
    /// they connect other objects. The snapshots of `unfolded` series are single nodes.
    pub fn lineage(
        &self,
        start: LineageObject,
        unfolded: &UnfoldedSeries,
        is_visible: impl Fn(Option<&str>) -> bool,
    ) -> Lineage {
        let mut walk = Walk {
            host: self,
            is_visible,
            nodes: Vec::new(),
            sandboxes: HashMap::new(),
            seen: HashSet::new(),
            queue: VecDeque::new(),
        };
        walk.enqueue(start);
        while let Some(object) = walk.queue.pop_front() {
            if walk.nodes.len() >= MAX_VISITED {
                walk.queue.push_front(object);
                break;
            }
            match object {
                LineageObject::Sandbox(id) => walk.sandbox(id),
                LineageObject::Snapshot(id) => walk.snapshot(id),
            }
        }
        walk.finish(unfolded)
    }
}

/// Walk from object to object, the nearest first.
struct Walk<'a, F> {
    host: &'a Sandboxes,
    is_visible: F,
    nodes: Vec<LineageNode>,
    /// Sandboxes among the nodes by id, with the snapshots to which they are related.
    sandboxes: HashMap<String, SandboxParts>,
    seen: HashSet<LineageObject>,
    queue: VecDeque<LineageObject>,
}

impl<F: Fn(Option<&str>) -> bool> Walk<'_, F> {
    fn enqueue(&mut self, object: LineageObject) {
        if self.seen.insert(object.clone()) {
            self.queue.push_back(object);
        }
    }

    fn enqueue_snapshots(&mut self, ids: impl IntoIterator<Item = String>) {
        for id in ids {
            self.enqueue(LineageObject::Snapshot(id));
        }
    }

    /// Adds a sandbox, and queues the snapshots that are related to it.
    fn sandbox(&mut self, id: String) {
        let parts = self.host.with_sandbox(&id, |record| {
            (self.is_visible)(record.owner()).then(|| sandbox_parts(record))
        });
        let parts = match parts {
            // The sandbox belongs to another owner.
            Some(None) => return,
            Some(Some(parts)) => parts,
            None => SandboxParts::removed(&id),
        };
        let taken = {
            let snapshots = self.host.0.catalog.read();
            let taken = snapshots.taken_of(&id).filter(|s| self.is_node(s));
            let mut taken: Vec<_> = taken.map(|s| (s.created_ms, s.id.clone())).collect();
            drop(snapshots);
            taken.sort();
            taken
        };
        self.nodes.push(parts.node.clone());
        self.enqueue_snapshots(parts.started_from.iter().cloned());
        self.enqueue_snapshots(taken.into_iter().map(|(_, id)| id));
        self.enqueue_snapshots(parts.rollbacks.iter().map(|r| r.snapshot.clone()));
        // The record of the present snapshot exists, unless the sandbox is broken.
        let present = parts.snapshot.clone();
        self.enqueue_snapshots(present.filter(|id| self.host.0.catalog.get(id).is_some()));
        self.sandboxes.insert(id, parts);
    }

    /// Adds a snapshot, and queues the objects that are related to it.
    fn snapshot(&mut self, id: String) {
        let (node, related) = {
            let snapshots = self.host.0.catalog.read();
            let related: Vec<String> = match snapshots.get(&id) {
                Some(record) if !self.is_node(record) => return,
                Some(record) => {
                    let parent = snapshots.get(record.parent.as_deref().unwrap_or_default());
                    let parent = parent.map(|s| s.id.clone());
                    let pruned = record.pruned.as_ref().map(|p| p.newest.clone());
                    let children = snapshots.children(&id).map(str::to_owned);
                    parent.into_iter().chain(pruned).chain(children).collect()
                }
                None => Vec::new(),
            };
            let below = snapshots.below_pruned(&id).filter(|s| self.is_node(s));
            let below: Vec<String> = below.map(|s| s.id.clone()).collect();
            let node = snapshot_node(&snapshots, &id, |s| self.is_node(s));
            (node, related.into_iter().chain(below))
        };
        let sandbox = match &node.details {
            NodeDetails::Snapshot(details) => details.sandbox.clone(),
            NodeDetails::Sandbox(_) => None,
        };
        self.nodes.push(node);
        let related: Vec<String> = related.collect();
        self.enqueue_snapshots(related);
        let indexes = &self.host.0.indexes;
        let started = indexes.started.some_of(&id, MAX_VISITED);
        let users = indexes.users.some_of(&id, MAX_VISITED);
        for id in sandbox.into_iter().chain(started).chain(users) {
            self.enqueue(LineageObject::Sandbox(id));
        }
    }

    fn is_node(&self, record: &Snapshot) -> bool {
        record.is_in_lineage() && (self.is_visible)(record.owner())
    }

    /// Returns the lineage: the nodes with their edges, and series as single nodes except
    /// `unfolded` ones.
    fn finish(self, unfolded: &UnfoldedSeries) -> Lineage {
        let edges = self.edges();
        let is_incomplete = !self.queue.is_empty();
        let mut lineage = runs::merge(self.nodes, edges, unfolded);
        lineage.is_truncated = is_incomplete || lineage.nodes.len() > MAX_LINEAGE_NODES;
        // The walk visited the nearest nodes first.
        lineage.nodes.truncate(MAX_LINEAGE_NODES);
        lineage.remove_dangling();
        lineage
            .nodes
            .sort_by_cached_key(|n| (n.created_ms.unwrap_or(u64::MAX), n.id.clone()));
        lineage
    }

    /// Returns the relations of all nodes. Some may refer to objects that are not nodes.
    fn edges(&self) -> Vec<LineageEdge> {
        // Oldest snapshot of each sandbox, with the time of its creation.
        let mut first: HashMap<&str, (u64, &SnapshotDetails)> = HashMap::new();
        let mut of_sandbox: HashMap<&str, &str> = HashMap::new();
        let mut edges = Vec::new();
        for node in &self.nodes {
            let NodeDetails::Snapshot(details) = &node.details else {
                continue;
            };
            let Some(sandbox) = details.sandbox.as_deref() else {
                continue;
            };
            edges.push(LineageEdge {
                from: node.id.clone(),
                to: sandbox.to_owned(),
                relation: LineageRelation::SnapshotOf,
                at_ms: node.created_ms,
            });
            of_sandbox.insert(&node.id, sandbox);
            let at = node.created_ms.unwrap_or(u64::MAX);
            let oldest = first.entry(sandbox).or_insert((at, details));
            if at < oldest.0 {
                *oldest = (at, details);
            }
        }
        for (id, parts) in &self.sandboxes {
            // Records of earlier versions and removed sandboxes have no `started_from`. The origin
            // is then the parent of the sandbox's oldest snapshot. If no snapshot was taken of the
            // sandbox, the origin is the sandbox's own parent snapshot.
            let inherited = match first.get(&**id) {
                Some((_, details)) => details.parent.as_deref(),
                None => parts.snapshot.as_deref(),
            };
            let inherited = inherited.filter(|s| of_sandbox.get(s).is_some_and(|of| of != id));
            let origin = parts.started_from.as_deref().or(inherited);
            edges.extend(origin.map(|snapshot| LineageEdge {
                from: id.clone(),
                to: snapshot.to_owned(),
                relation: LineageRelation::StartedFrom,
                at_ms: parts.node.created_ms,
            }));
            edges.extend(parts.rollbacks.iter().map(|rollback| LineageEdge {
                from: id.clone(),
                to: rollback.snapshot.clone(),
                relation: LineageRelation::RolledBackTo,
                at_ms: Some(rollback.at_ms),
            }));
        }
        edges
    }
}

impl Lineage {
    /// Removes references to objects that are not nodes, and sorts the edges.
    fn remove_dangling(&mut self) {
        let ids: HashSet<String> = self.nodes.iter().map(|node| node.id.clone()).collect();
        self.edges
            .retain(|edge| ids.contains(&edge.from) && ids.contains(&edge.to));
        for node in &mut self.nodes {
            if let NodeDetails::Snapshot(details) = &mut node.details {
                details.parent = details.parent.take().filter(|id| ids.contains(id));
            }
        }
        // A snapshot that several series refer to has one edge to each.
        self.edges
            .sort_by_cached_key(|e| (e.at_ms, e.from.clone(), e.to.clone(), e.relation as u8));
        self.edges.dedup();
    }
}

impl SandboxParts {
    /// Returns the parts of a sandbox without a record.
    fn removed(id: &str) -> Self {
        Self {
            node: LineageNode {
                id: id.to_owned(),
                name: None,
                created_ms: None,
                details: NodeDetails::Sandbox(None),
            },
            snapshot: None,
            started_from: None,
            rollbacks: Vec::new(),
        }
    }
}

/// Returns the node of a sandbox in the lineage, and the origin of the sandbox.
fn sandbox_parts(record: &Sandbox) -> SandboxParts {
    let details = SandboxDetails {
        state: record.state.kind(),
        template: record.template.clone(),
        size: record.size,
    };
    let is_killed = record.state == SandboxState::Killed;
    SandboxParts {
        node: LineageNode {
            id: record.id.clone(),
            name: record.name.clone(),
            created_ms: Some(record.created_ms),
            details: NodeDetails::Sandbox((!is_killed).then_some(details)),
        },
        // A killed sandbox does not need its snapshot, which may be removed at any time.
        snapshot: record.snapshot.clone().filter(|_| !is_killed),
        started_from: record.started_from.clone(),
        rollbacks: record.rollbacks.clone(),
    }
}

/// Returns the node of a snapshot, which may have been removed.
fn snapshot_node(
    snapshots: &SnapshotIndex,
    id: &str,
    is_node: impl Fn(&Snapshot) -> bool,
) -> LineageNode {
    if let Some(record) = snapshots.get(id) {
        let pruned = record.pruned.as_ref().map(|pruned| pruned.newest.clone());
        return LineageNode {
            id: record.id.clone(),
            name: record.name.clone(),
            created_ms: Some(record.created_ms),
            details: NodeDetails::Snapshot(SnapshotDetails {
                sandbox: Some(record.sandbox.clone()),
                parent: pruned.or(record.parent.clone()),
                purpose: Some(record.purpose),
                template: Some((record.template.clone(), record.size)),
                is_storing: record.storing,
                is_removed: record.purpose == SnapshotPurpose::Requested && !record.retained,
                bytes: record.bytes,
                count: 1,
            }),
        };
    }
    // The record was removed. A snapshot below it still describes it (`PrunedAncestors`).
    let below = snapshots.below_pruned(id).find(|s| is_node(s));
    let pruned = below.and_then(|s| s.pruned.as_ref());
    LineageNode {
        id: id.to_owned(),
        name: None,
        created_ms: pruned.map(|p| p.created_ms),
        details: NodeDetails::Snapshot(SnapshotDetails {
            sandbox: pruned.map(|p| p.sandbox.clone()),
            parent: below.and_then(|s| s.parent.clone()),
            purpose: None,
            template: None,
            is_storing: false,
            is_removed: true,
            bytes: 0,
            count: pruned.map_or(1, |p| p.count),
        }),
    }
}
