//! State of the fleet, for administrators.

use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use axum::Json;
use axum::extract::State;
use jiffy_api_types::{FleetInfo, FleetNode, FleetNodes, MassSilence};
use jiffy_fleet::SetupError;
use jiffy_fleet::node::{FleetStatus, NodeStatus};
use jiffy_fleet_core::record::MemberState;

/// `GET /fleet`: returns the state of the fleet as this host sees it.
pub(super) async fn fleet(
    State(app): State<App>,
    caller: Caller,
) -> Result<Json<FleetInfo>, ApiError> {
    Ok(Json(info(&status(&app, &caller).await?)))
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

async fn status(app: &App, caller: &Caller) -> Result<FleetStatus, ApiError> {
    caller.require_admin("reading the state of the fleet")?;
    let fleet = app.fleet.as_ref().ok_or_else(|| {
        let message = format!("the fleet does not exist: {}", SetupError::NoMember);
        ApiError::not_found("not_found", message)
    })?;
    Ok(fleet.node().status().await)
}

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
    }
}

fn node(node: &NodeStatus) -> FleetNode {
    let state = match node.row.state {
        MemberState::Up => "up",
        MemberState::Draining => "draining",
        MemberState::Dead => "dead",
        MemberState::Left => "left",
    };
    let summary = node.summary.as_ref();
    FleetNode {
        id: node.row.id.to_string(),
        state: state.to_owned(),
        epoch: node.row.epoch.0,
        address: node.row.address.clone(),
        version: node.row.version.clone(),
        heartbeat_age_ms: node.heartbeat_age_ms,
        running: summary.map(|s| s.running),
        paused: summary.map(|s| s.paused),
        unstored: summary.map(|s| s.unstored),
        warm: summary.map(|s| s.warm),
        free_memory_mib: summary.map(|s| s.free_memory_mib),
    }
}
