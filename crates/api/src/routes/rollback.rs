//! `POST /sandboxes/{id}/rollback`.

use crate::app::App;
use crate::body::Required;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::lookup::Liveness;
use crate::wire::sandbox::whole;
use axum::Json;
use axum::extract::{Path, State};
use jiffy_engine_api::new_id;
use jiffy_sandbox_manager::{SandboxRecord, SandboxState};
use serde::{Deserialize, Serialize};

#[derive(Debug, Deserialize)]
pub(super) struct RollbackBody {
    #[serde(rename = "snapshotID")]
    snapshot_id: String,
}

#[derive(Debug, Serialize)]
pub(super) struct RolledBack {
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "snapshotID")]
    snapshot_id: String,
    #[serde(rename = "operationID")]
    operation_id: String,
    status: &'static str,
    #[serde(rename = "bootMs", skip_serializing_if = "Option::is_none")]
    boot_ms: Option<f64>,
    /// Everything about the sandbox.
    jiffy: SandboxRecord,
}

/// Puts a sandbox back to one of its snapshots, to any it descends from, or to a relative's; it
/// keeps its id. Its connections end.
pub(super) async fn rollback(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Required(body): Required<RollbackBody>,
) -> Result<Json<RolledBack>, ApiError> {
    let record = app.sandbox(&caller, &id, Liveness::Mendable)?;
    let wanted = app.ancestor_or_fetched(&caller, &record, &body.snapshot_id);
    let (snapshot, _held) = wanted.await?;
    let _room = match record.state {
        SandboxState::Running => None,
        _ => Some(app.room_again(&caller, record.size).await?),
    };
    let now = app.sandboxes.rollback(&record.id, &snapshot.id).await?;
    Ok(Json(RolledBack {
        sandbox_id: now.id.clone(),
        snapshot_id: snapshot.id,
        operation_id: new_id().map_err(|e| ApiError::internal(e.to_string()))?,
        status: "completed",
        boot_ms: now.boot_ms,
        jiffy: whole(&caller, now),
    }))
}
