//! `jiffy tree`: prints the lineage of a sandbox or snapshot as a tree.
//!
//! The *lineage* of a sandbox or snapshot consists of the snapshots and sandboxes that are
//! connected with it: ancestors, descendants, and sandboxes created from them.

use super::table::{age_of, short, show};
use crate::cli::TreeArgs;
use jiffy_api_types::{
    Lineage, LineageEdge, LineageKind, LineageNode, LineageRelation, LineageState, SnapshotPurpose,
};
use jiffy_client::terminal::line;
use jiffy_sandbox_manager::Bytes;
use std::collections::{HashMap, HashSet};

/// Maximum number of indented levels. Deeper levels have the same indentation, so that the length
/// of a line is bounded.
const MAX_LEVELS: usize = 40;

/// Prints the lineage.
pub async fn run(args: &TreeArgs) -> anyhow::Result<()> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let target = client.sandbox_or_snapshot(&args.id).await?;
    let lineage = client.lineage(&target, args.unfold).await?;
    show(args.json, &lineage, |lineage| text(lineage, target.id()))?;
    if lineage.truncated {
        errln!("jiffy: the lineage has more than 5000 objects: only the nearest ones are shown");
    }
    Ok(())
}

/// Returns the lineage as a tree: below each sandbox its snapshots and rollbacks, and below each
/// snapshot the sandboxes that were created from it. `target` is marked.
fn text(lineage: &Lineage, target: &str) -> String {
    let mut tree = Tree::new(lineage, target);
    let is_root = |node: &&LineageNode| !tree.inner.contains(&*node.id);
    let (roots, inner): (Vec<_>, Vec<_>) = lineage.nodes.iter().partition(is_root);
    // Nodes that are below no root, because a relation is missing, come last.
    for node in roots.into_iter().chain(inner) {
        tree.add(node, "", "", 0);
    }
    tree.out
}

/// Line below a node.
enum Child<'a> {
    Node(&'a LineageNode),
    Rollback(&'a LineageEdge),
}

/// Tree that is being printed.
struct Tree<'a> {
    target: &'a str,
    nodes: HashMap<&'a str, &'a LineageNode>,
    /// Children by id of the node above them.
    children: HashMap<&'a str, Vec<Child<'a>>>,
    /// Nodes that are below another one.
    inner: HashSet<&'a str>,
    shown: HashSet<&'a str>,
    out: String,
}

impl<'a> Tree<'a> {
    /// Indexes the nodes and their children for drawing a tree.
    fn new(lineage: &'a Lineage, target: &'a str) -> Self {
        let nodes: HashMap<_, _> = lineage.nodes.iter().map(|n| (&*n.id, n)).collect();
        let mut children: HashMap<&str, Vec<Child>> = HashMap::new();
        let mut inner = HashSet::new();
        // The edges are sorted by time.
        for edge in &lineage.edges {
            let (parent, child) = match edge.relation {
                LineageRelation::RolledBackTo => (&*edge.from, Some(Child::Rollback(edge))),
                _ => {
                    inner.insert(&*edge.from);
                    (&*edge.to, nodes.get(&*edge.from).copied().map(Child::Node))
                }
            };
            children.entry(parent).or_default().extend(child);
        }
        Self {
            target,
            nodes,
            children,
            inner,
            shown: HashSet::new(),
            out: String::new(),
        }
    }

    /// Adds a node that is not shown yet, and the nodes below it. `first` precedes its line, and
    /// `rest` the lines below.
    fn add(&mut self, node: &'a LineageNode, first: &str, rest: &str, level: usize) {
        if !self.shown.insert(&node.id) {
            return;
        }
        let mark = if node.id == self.target { "  <--" } else { "" };
        self.out += &format!("{first}{}{mark}\n", described(node));
        let children = self.children.remove(&*node.id).unwrap_or_default();
        let last = children.len().saturating_sub(1);
        for (at, child) in children.into_iter().enumerate() {
            let (branch, below) = match (at == last, level < MAX_LEVELS) {
                (_, false) => ("", ""),
                (false, true) => ("├─ ", "│  "),
                (true, true) => ("└─ ", "   "),
            };
            let first = format!("{rest}{branch}");
            match child {
                Child::Node(node) => self.add(node, &first, &format!("{rest}{below}"), level + 1),
                Child::Rollback(edge) => {
                    let name = self.nodes.get(&*edge.to).and_then(|n| n.name.as_deref());
                    let name = name.map_or(short(&edge.to).into(), line);
                    let age = edge.at.as_ref().map(age_of).unwrap_or_default();
                    self.out += &format!("{first}rolled back to {name}{age}\n");
                }
            }
        }
    }
}

/// Describes a node in one line.
fn described(node: &LineageNode) -> String {
    let name = node.name.as_deref().map(|name| format!(" {}", line(name)));
    let name = name.unwrap_or_default();
    let id = short(&node.id);
    let age = node.created_at.as_ref().map(age_of).unwrap_or_default();
    let state = node.state.name();
    if node.kind == LineageKind::Sandbox {
        return format!("sandbox {id}{name}: {state}{age}");
    }
    let what = match node.purpose {
        _ if node.state == LineageState::Removed => "removed snapshot",
        Some(SnapshotPurpose::Pause) => "pause",
        Some(SnapshotPurpose::Fork) => "fork",
        _ => "snapshot",
    };
    let count = match node.count {
        0 | 1 => String::new(),
        count => format!(", {count} snapshots"),
    };
    let size = match (node.state, node.bytes) {
        (LineageState::Storing, _) => ", storing".to_owned(),
        (_, Some(bytes)) if bytes > 0 => format!(", {}", Bytes(bytes)),
        _ => String::new(),
    };
    format!("{what} {id}{name}{count}{size}{age}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a running sandbox or a stored snapshot.
    fn node(id: &str, kind: LineageKind, name: Option<&str>) -> LineageNode {
        let state = match kind {
            LineageKind::Sandbox => LineageState::Running,
            LineageKind::Snapshot => LineageState::Ready,
        };
        LineageNode {
            id: id.to_owned(),
            kind,
            state,
            name: name.map(str::to_owned),
            created_at: None,
            purpose: None,
            sandbox_id: None,
            parent_snapshot_id: None,
            template_id: None,
            memory_mb: None,
            disk_size_mb: None,
            bytes: None,
            count: 1,
        }
    }

    fn edge(from: &str, relation: LineageRelation, to: &str) -> LineageEdge {
        LineageEdge {
            from: from.to_owned(),
            to: to.to_owned(),
            relation,
            at: None,
        }
    }

    #[test]
    fn snapshots_and_forks_are_below_their_origin() {
        use LineageKind::{Sandbox, Snapshot};
        use LineageRelation::{RolledBackTo, SnapshotOf, StartedFrom};
        let lineage = Lineage {
            nodes: vec![
                node("agent", Sandbox, Some("a\n")),
                node("step1", Snapshot, None),
                node("step2", Snapshot, Some("two")),
                node("child", Sandbox, None),
            ],
            edges: vec![
                edge("step1", SnapshotOf, "agent"),
                edge("child", StartedFrom, "step1"),
                edge("step2", SnapshotOf, "agent"),
                edge("agent", RolledBackTo, "step1"),
            ],
            truncated: false,
        };
        let expected = "sandbox agent a\\n: running
├─ snapshot step1
│  └─ sandbox child: running  <--
├─ snapshot step2 two
└─ rolled back to step1
";
        assert_eq!(text(&lineage, "child"), expected);
    }

    #[test]
    fn deep_and_cyclic_lineages_have_short_lines() {
        let count = 1000;
        let id = |at: usize| format!("n{}", at % count);
        let nodes = (0..count).map(|at| node(&id(at), LineageKind::Sandbox, None));
        let edges = (0..count).map(|at| edge(&id(at + 1), LineageRelation::StartedFrom, &id(at)));
        let lineage = Lineage {
            nodes: nodes.collect(),
            edges: edges.collect(),
            truncated: false,
        };
        let text = text(&lineage, "n0");
        assert_eq!(text.lines().count(), count);
        assert!(text.lines().all(|line| line.chars().count() < 200));
    }
}
