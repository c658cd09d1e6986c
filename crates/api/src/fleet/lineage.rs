//! Lineages, merged from the answers of all members. A sandbox that was resumed on another host
//! leaves snapshots on its former hosts, so one host does not know all of its lineage.
//!
//! A *member* is a host of the fleet. The *lineage* of a sandbox or snapshot consists of the
//! snapshots and sandboxes that are connected with it: ancestors, descendants, and sandboxes
//! created from them.

use super::Fleet;
use super::forward::Purpose;
use super::lists::add_incomplete;
use super::route::buffer;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::query::Query;
use axum::Json;
use axum::body::to_bytes;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use jiffy_api_types::{Lineage, LineageNode, LineageState};
use jiffy_sandbox_manager::MAX_LINEAGE_NODES;
use std::collections::HashMap;

/// Maximum size of the answer of a member.
const MAX_ANSWER_BYTES: usize = 32 << 20;

/// Reads the answer of a member. The inner value is `None` if the member does not know the object.
async fn read(response: Response) -> Option<Option<Lineage>> {
    if response.status() == StatusCode::NOT_FOUND {
        return Some(None);
    }
    if !response.status().is_success() {
        return None;
    }
    let body = to_bytes(response.into_body(), MAX_ANSWER_BYTES).await;
    Some(Some(serde_json::from_slice(&body.ok()?).ok()?))
}

impl Fleet {
    /// Returns the lineage of an object from all members that know it. The members filter their
    /// objects for the caller.
    pub(super) async fn lineage(
        &self,
        caller: &Caller,
        request: Request,
        next: Next,
    ) -> Result<Response, ApiError> {
        let (mut call, request) = buffer(caller, request).await?;
        call.purpose = Purpose::Part;
        let (own, others) = tokio::join!(next.run(request), self.send_to_all(&call, read));
        if !own.status().is_success() && own.status() != StatusCode::NOT_FOUND {
            return Ok(own);
        }
        let (status, headers) = (own.status(), own.headers().clone());
        let body = to_bytes(own.into_body(), MAX_ANSWER_BYTES).await;
        let body = body.map_err(|e| ApiError::internal(e.to_string()))?;
        let mut parts = Vec::new();
        if status.is_success() {
            let own = serde_json::from_slice(&body);
            parts.push(own.map_err(|e| ApiError::internal(e.to_string()))?);
        }
        let mut missing = Vec::new();
        for (member, _, answer) in others {
            match answer {
                Some(part) => parts.extend(part),
                None => missing.push(member),
            }
        }
        let query = Query::parse(call.uri.query().unwrap_or_default())?;
        if parts.is_empty()
            && let Some(id) = query.get("sandboxID")
            && let Some(host) = self.lost_sandbox(caller, id).and_then(|lost| lost.host)
        {
            return Err(self.host_lost(host));
        }
        let mut response = if parts.is_empty() {
            // The error of this member names the object.
            (status, headers, body).into_response()
        } else {
            Json(merge(parts)).into_response()
        };
        missing.sort();
        let names: Vec<_> = missing.iter().map(ToString::to_string).collect();
        add_incomplete(&mut response, &names);
        Ok(response)
    }
}

/// Merges lineages of one object. If several hosts report a node, a host that has it takes
/// precedence over hosts on which it is removed.
fn merge(parts: Vec<Lineage>) -> Lineage {
    let mut merged = Lineage {
        nodes: Vec::new(),
        edges: Vec::new(),
        truncated: false,
    };
    let mut places: HashMap<String, usize> = HashMap::new();
    for part in parts {
        merged.truncated |= part.truncated;
        for node in part.nodes {
            match places.get(&node.id) {
                None => {
                    places.insert(node.id.clone(), merged.nodes.len());
                    merged.nodes.push(node);
                }
                Some(&place) if merged.nodes[place].state == LineageState::Removed => {
                    merged.nodes[place] = node;
                }
                Some(_) => {}
            }
        }
        for edge in part.edges {
            if !merged.edges.contains(&edge) {
                merged.edges.push(edge);
            }
        }
    }
    // Times have one format, whose order is the order of the texts.
    let age = |node: &LineageNode| {
        let at = node.created_at.as_ref().map(|at| at.0.clone());
        (at.is_none(), at)
    };
    merged.nodes.sort_by_cached_key(age);
    merged.edges.sort_by_cached_key(|edge| {
        let at = edge.at.as_ref().map(|at| at.0.clone());
        (at.is_none(), at)
    });
    if merged.nodes.len() > MAX_LINEAGE_NODES {
        merged.truncated = true;
        // For most objects, the newest nodes are the most closely connected ones.
        merged.nodes.drain(..merged.nodes.len() - MAX_LINEAGE_NODES);
        let shown: std::collections::HashSet<_> = merged.nodes.iter().map(|n| &n.id).collect();
        merged
            .edges
            .retain(|edge| shown.contains(&edge.from) && shown.contains(&edge.to));
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_api_types::{LineageEdge, LineageKind, LineageRelation, Moment};

    /// Returns a snapshot that was created at this second.
    fn node(id: &str, second: u8, state: LineageState) -> LineageNode {
        LineageNode {
            id: id.to_owned(),
            kind: LineageKind::Snapshot,
            state,
            name: None,
            created_at: Some(Moment(format!("2026-01-01T00:00:{second:02}Z"))),
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

    /// Returns the part of a lineage that one member knows. All edges are of snapshots.
    fn part(nodes: Vec<LineageNode>, edges: &[(&str, &str)]) -> Lineage {
        let edges = edges.iter().map(|(from, to)| LineageEdge {
            from: (*from).to_owned(),
            to: (*to).to_owned(),
            relation: LineageRelation::SnapshotOf,
            at: None,
        });
        Lineage {
            nodes,
            edges: edges.collect(),
            truncated: false,
        }
    }

    #[test]
    fn nodes_and_edges_of_several_hosts_appear_once_and_in_order() {
        use LineageState::{Ready, Removed};
        // The sandbox `s` has moved: the former host knows it by its snapshots only.
        let former = part(
            vec![node("a", 1, Ready), node("s", 2, Removed)],
            &[("a", "s")],
        );
        let home = part(
            vec![
                node("s", 2, Ready),
                node("b", 0, Ready),
                node("a", 1, Removed),
            ],
            &[("b", "s"), ("a", "s")],
        );
        for parts in [vec![former.clone(), home.clone()], vec![home, former]] {
            let merged = merge(parts);
            let nodes: Vec<_> = merged.nodes.iter().map(|n| (&*n.id, n.state)).collect();
            assert_eq!(nodes, [("b", Ready), ("a", Ready), ("s", Ready)]);
            assert_eq!(merged.edges.len(), 2);
        }
    }

    #[test]
    fn the_number_of_nodes_is_bounded() {
        let nodes = |host: usize| {
            let nodes = 0..MAX_LINEAGE_NODES / 2 + 1;
            nodes.map(move |n| node(&format!("{host}-{n}"), 1, LineageState::Ready))
        };
        let merged = merge(vec![
            part(nodes(0).collect(), &[("0-0", "0-1")]),
            part(nodes(1).collect(), &[("1-1", "1-2")]),
        ]);
        assert!(merged.truncated);
        assert_eq!(merged.nodes.len(), MAX_LINEAGE_NODES);
        // An edge of a node that is not shown is omitted.
        assert_eq!(merged.edges.len(), 1);
    }
}
