//! Conversion of lineages to the bodies of the API.
//!
//! The *lineage* of a sandbox or snapshot is the tree of sandboxes and snapshots that are connected
//! with it.

use super::moment;
use crate::caller::Caller;
use jiffy_api_types::{
    Lineage, LineageEdge, LineageKind, LineageNode, LineageRelation, LineageState,
};
use jiffy_sandbox_manager as manager;
use jiffy_sandbox_manager::NodeDetails;
use std::collections::HashSet;

/// Returns a lineage in the form that the caller may see.
pub(crate) fn lineage(caller: &Caller, lineage: manager::Lineage) -> Lineage {
    // Ids of sandboxes grant access to their ports, and read-only callers see a prefix. Ids of
    // snapshots are shown to each caller that sees the snapshot.
    let sandboxes = lineage.nodes.iter();
    let sandboxes = sandboxes.filter(|node| matches!(node.details, NodeDetails::Sandbox(_)));
    let sandboxes: HashSet<String> = sandboxes.map(|node| node.id.clone()).collect();
    let shown = |id: String| {
        if sandboxes.contains(&id) {
            caller.shown_id(&id).to_owned()
        } else {
            id
        }
    };
    let edges = lineage.edges.into_iter().map(|edge| LineageEdge {
        from: shown(edge.from),
        to: shown(edge.to),
        relation: match edge.relation {
            manager::LineageRelation::SnapshotOf => LineageRelation::SnapshotOf,
            manager::LineageRelation::StartedFrom => LineageRelation::StartedFrom,
            manager::LineageRelation::RolledBackTo => LineageRelation::RolledBackTo,
        },
        at: edge.at_ms.map(moment),
    });
    Lineage {
        edges: edges.collect(),
        nodes: lineage.nodes.into_iter().map(|n| node(caller, n)).collect(),
        truncated: lineage.is_truncated,
    }
}

/// Converts a node of a lineage, as `caller` may see it.
fn node(caller: &Caller, node: manager::LineageNode) -> LineageNode {
    let (kind, state) = match &node.details {
        NodeDetails::Sandbox(details) => {
            let state = details.as_ref().map(|d| d.state.into());
            (LineageKind::Sandbox, state.unwrap_or(LineageState::Removed))
        }
        NodeDetails::Snapshot(details) => {
            let state = match (details.is_removed, details.is_storing) {
                (true, _) => LineageState::Removed,
                (false, true) => LineageState::Storing,
                (false, false) => LineageState::Ready,
            };
            (LineageKind::Snapshot, state)
        }
    };
    let mut shown = LineageNode {
        id: node.id,
        kind,
        state,
        name: node.name,
        created_at: node.created_ms.map(moment),
        purpose: None,
        sandbox_id: None,
        parent_snapshot_id: None,
        template_id: None,
        memory_mb: None,
        disk_size_mb: None,
        bytes: None,
        count: 1,
    };
    let origin = match node.details {
        NodeDetails::Sandbox(details) => {
            shown.id = caller.shown_id(&shown.id).to_owned();
            details.map(|details| (details.template, details.size))
        }
        NodeDetails::Snapshot(details) => {
            shown.purpose = details.purpose;
            shown.sandbox_id = details.sandbox.map(|id| caller.shown_id(&id).to_owned());
            shown.parent_snapshot_id = details.parent;
            shown.bytes = Some(details.bytes);
            // Several consecutive snapshots may be one node.
            shown.count = details.count;
            details.template
        }
    };
    if let Some((template, size)) = origin {
        shown.template_id = Some(caller.display_name(&template));
        shown.memory_mb = Some(size.memory_mib);
        shown.disk_size_mb = Some(size.disk_mib);
    }
    shown
}
