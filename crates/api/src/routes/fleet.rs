//! Calls that return the state of the fleet, for administrators.
//!
//! The *coordinator* is the member (host) of the fleet that selects the hosts of new sandboxes and
//! declares silent members dead. Its *term* is its number, which each takeover increments. An
//! *epoch* of a member lasts from its registration with the coordinator until it is declared dead.
//! The *tables* are the API keys and template names that each host holds in memory, with the number
//! of their last commit. In a *mass silence*, more than half of the hosts are silent, and none is
//! declared dead.

use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::fleet::Fleet;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use jiffy_api_types::{FleetInfo, FleetNode, FleetNodes, FleetWhy, MassSilence};
use jiffy_fleet::SetupError;
use jiffy_fleet::node::{FleetStatus, NodeStatus};

/// `GET /fleet`: returns the state of the fleet as this host sees it.
pub(super) async fn fleet(
    State(app): State<App>,
    caller: Caller,
) -> Result<Json<FleetInfo>, ApiError> {
    let fleet = fleet_of(&app, &caller, "reading the state of the fleet")?;
    let (status, (records, store)) = tokio::join!(fleet.node().status(), fleet.backends());
    let own = status
        .nodes
        .iter()
        .find(|node| node.row.id == status.member);
    let tables = own.and_then(|node| Some(node.summary.as_ref()?.tables));
    let live = status.nodes.iter().filter(|node| node.row.state.is_live());
    let outdated = live.filter(|node| node.summary.as_ref().map(|s| s.tables) != tables);
    Ok(Json(FleetInfo {
        records,
        store,
        tables: tables.filter(|&number| number > 0),
        outdated_tables: outdated.map(|node| node.row.id.to_string()).collect(),
        losses: fleet.losses(),
        ..info(&status)
    }))
}

/// `GET /fleet/nodes`: returns the hosts of the fleet.
pub(super) async fn nodes(
    State(app): State<App>,
    caller: Caller,
) -> Result<Json<FleetNodes>, ApiError> {
    let status = status(&app, &caller).await?;
    let nodes = status.nodes.iter().map(node).collect();
    Ok(Json(FleetNodes { nodes }))
}

/// `GET /fleet/why/{sandboxID}`: explains the placement of a sandbox.
pub(super) async fn why(
    State(app): State<App>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<String>,
) -> Result<Json<FleetWhy>, ApiError> {
    let fleet = fleet_of(&app, &caller, "reading the state of the fleet")?;
    Ok(Json(app.why(fleet, &caller, headers, &id).await?))
}

/// Returns the fleet for an administrator.
pub(super) fn fleet_of<'a>(
    app: &'a App,
    caller: &Caller,
    action: &'static str,
) -> Result<&'a Fleet, ApiError> {
    caller.require_admin(action)?;
    app.fleet.as_ref().ok_or_else(|| {
        let message = format!("the fleet does not exist: {}", SetupError::NoMember);
        ApiError::not_found("not_found", message)
    })
}

async fn status(app: &App, caller: &Caller) -> Result<FleetStatus, ApiError> {
    let fleet = fleet_of(app, caller, "reading the state of the fleet")?;
    Ok(fleet.node().status().await)
}

/// Converts the state of the fleet for the response, with warnings for the operator.
fn info(status: &FleetStatus) -> FleetInfo {
    let coordinator = status.coordinator.as_ref();
    let mut warnings = Vec::new();
    if let Some(reason) = status.rejected {
        warnings.push(format!("the coordinator rejects this host: {reason}"));
    }
    if status.is_regressed {
        warnings.push(
            "the records are older than before: if they were restored from a backup, run \
             `jiffy fleet accept-restore`"
                .to_owned(),
        );
    }
    if status.authority.is_none() {
        warnings.push(
            "this host has no contact with the coordinator: it resumes no stored sandboxes"
                .to_owned(),
        );
    }
    FleetInfo {
        id: status.fleet.to_string(),
        host: status.member.to_string(),
        has_authority: status.authority.is_some(),
        is_ready: status.is_ready,
        coordinator: coordinator.map(|c| c.member.to_string()),
        term: coordinator.map(|c| c.term.0),
        shards: 1,
        is_directory_complete: coordinator.is_some_and(|c| c.is_directory_complete),
        mass_silence: status
            .mass_silence
            .map(|(silent, members)| MassSilence { silent, members }),
        warnings,
        nodes: status.nodes.iter().map(node).collect(),
        ..FleetInfo::default()
    }
}

/// Converts the state of one host for the response.
fn node(node: &NodeStatus) -> FleetNode {
    let summary = node.summary.as_ref();
    FleetNode {
        id: node.row.id.to_string(),
        state: node.row.state.name().to_owned(),
        epoch: node.row.epoch.0,
        address: node.row.address.clone(),
        version: node.row.version.clone(),
        heartbeat_age_ms: node.heartbeat_age_ms,
        running: summary.map(|s| s.running),
        paused: summary.map(|s| s.paused),
        unstored: summary.map(|s| s.unstored),
        warm: summary.map(|s| s.warm),
        free_memory_mib: summary.map(|s| s.free_memory_mib),
        labels: node
            .row
            .capacity
            .labels
            .iter()
            .map(|label| (label.name.clone(), label.value.clone()))
            .collect(),
    }
}
