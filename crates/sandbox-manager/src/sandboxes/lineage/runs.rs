//! Shortens a lineage for display: a long series of automatic snapshots becomes one node.
//!
//! The *lineage* of a sandbox or snapshot consists of the snapshots and sandboxes that are
//! connected with it: ancestors, descendants, and sandboxes created from them.

use super::{
    Lineage, LineageEdge, LineageNode, LineageRelation, NodeDetails, SnapshotDetails,
    UnfoldedSeries,
};
use jiffy_api_types::SnapshotPurpose;
use std::collections::{HashMap, HashSet};

/// Minimum number of snapshots in a series that becomes one node.
const MIN_RUN: usize = 4;

/// Replaces series of automatic snapshots by their newest snapshot. A series is a chain of
/// snapshots of one sandbox to which nothing else refers. `unfolded` series are not replaced.
pub(super) fn merge(
    nodes: Vec<LineageNode>,
    edges: Vec<LineageEdge>,
    unfolded: &UnfoldedSeries,
) -> Lineage {
    let runs = {
        let graph = Graph::new(&nodes, &edges);
        let heads = (0..nodes.len()).filter(|at| graph.is_head(*at));
        let runs = heads.map(|head| graph.run_from(head));
        let ids = |run: &[usize]| unfolded.contains(run.iter().map(|at| &*nodes[*at].id));
        runs.filter(|run| run.len() >= MIN_RUN && !ids(run))
            .collect::<Vec<_>>()
    };
    let mut nodes: Vec<Option<LineageNode>> = nodes.into_iter().map(Some).collect();
    let mut replaced = HashMap::new();
    for run in runs {
        let [older @ .., newest] = &*run else {
            continue;
        };
        // Nodes are in the order in which the parent module's walk over the lineage reached them.
        // The merged node takes the first position of the snapshots in its series.
        let place = run.iter().copied().min().unwrap_or(*newest);
        let Some(mut merged) = nodes[*newest].take() else {
            continue;
        };
        let older: Vec<_> = older.iter().filter_map(|at| nodes[*at].take()).collect();
        if let NodeDetails::Snapshot(details) = &mut merged.details {
            let parents = older.first().and_then(snapshot_details);
            details.parent = parents.and_then(|oldest| oldest.parent.clone());
            for member in older.iter().filter_map(snapshot_details) {
                details.bytes = details.bytes.saturating_add(member.bytes);
                details.count = details.count.saturating_add(member.count);
            }
        }
        replaced.extend(older.into_iter().map(|node| (node.id, merged.id.clone())));
        nodes[place] = Some(merged);
    }
    Lineage {
        nodes: nodes.into_iter().flatten().collect(),
        edges: edges
            .into_iter()
            .filter(|edge| !replaced.contains_key(&edge.from))
            .collect(),
        is_truncated: false,
    }
}

fn snapshot_details(node: &LineageNode) -> Option<&SnapshotDetails> {
    match &node.details {
        NodeDetails::Snapshot(details) => Some(details),
        NodeDetails::Sandbox(_) => None,
    }
}

/// Snapshots among the nodes, by position.
struct Graph<'a> {
    nodes: &'a [LineageNode],
    /// Positions of the children by id of the node.
    children: HashMap<&'a str, Vec<usize>>,
    /// Positions of nodes in the list, by id.
    positions: HashMap<&'a str, usize>,
    /// Snapshots from which sandboxes were created, or to which they were rolled back.
    targets: HashSet<&'a str>,
}

impl<'a> Graph<'a> {
    fn new(nodes: &'a [LineageNode], edges: &'a [LineageEdge]) -> Self {
        let mut children: HashMap<&str, Vec<usize>> = HashMap::new();
        for (at, node) in nodes.iter().enumerate() {
            if let Some(parent) = snapshot_details(node).and_then(|d| d.parent.as_deref()) {
                children.entry(parent).or_default().push(at);
            }
        }
        let positions = nodes.iter().enumerate();
        let positions = positions.map(|(at, node)| (&*node.id, at));
        let targets = edges
            .iter()
            .filter(|edge| edge.relation != LineageRelation::SnapshotOf);
        Self {
            nodes,
            children,
            positions: positions.collect(),
            targets: targets.map(|edge| &*edge.to).collect(),
        }
    }

    /// Returns the details of an automatic snapshot to which no sandbox refers.
    fn plain(&self, at: usize) -> Option<&SnapshotDetails> {
        let node = &self.nodes[at];
        let details = snapshot_details(node)?;
        let is_automatic = details.purpose == Some(SnapshotPurpose::Pause)
            || details.purpose == Some(SnapshotPurpose::Fork);
        let is_plain = is_automatic && node.name.is_none() && !self.targets.contains(&*node.id);
        is_plain.then_some(details)
    }

    /// Returns the next snapshot of a series.
    fn next(&self, at: usize) -> Option<usize> {
        let [child] = self.children.get(&*self.nodes[at].id)?.as_slice() else {
            return None;
        };
        let (own, next) = (self.plain(at)?, self.plain(*child)?);
        (own.sandbox == next.sandbox).then_some(*child)
    }

    /// Returns whether a series may begin with the snapshot.
    fn is_head(&self, at: usize) -> bool {
        let Some(details) = self.plain(at) else {
            return false;
        };
        let parent = details.parent.as_deref();
        let parent = parent.and_then(|id| self.positions.get(id));
        parent.is_none_or(|parent| self.next(*parent) != Some(at))
    }

    /// Returns the series that begins with a snapshot, oldest first.
    fn run_from(&self, head: usize) -> Vec<usize> {
        let mut run = vec![head];
        while let Some(next) = self.next(run[run.len() - 1]) {
            // Damaged records could form a cycle.
            if run.len() > self.nodes.len() {
                break;
            }
            run.push(next);
        }
        run
    }
}
