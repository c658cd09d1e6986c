//! `POST /sandboxes/{id}/rollback`: returns a sandbox to a snapshot.

use crate::app::App;
use crate::body::Required;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::lookup::Liveness;
use crate::wire::sandbox::whole;
use axum::Json;
use axum::extract::{Path, State};
use jiffy_api_types::{RollbackSandbox, RollbackStatus, RolledBack};
use jiffy_engine_api::new_id;
use jiffy_sandbox_manager::SandboxState;

/// Rolls a sandbox back to one of its snapshots, to an ancestor, or to a snapshot of a related
/// sandbox. The sandbox retains its id. Its connections are closed.
pub(super) async fn rollback(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Required(body): Required<RollbackSandbox>,
) -> Result<Json<RolledBack>, ApiError> {
    let record = app.sandbox(&caller, &id, Liveness::IncludingBroken)?;
    let target = app.ancestor_or_fetched(&caller, &record, &body.snapshot_id);
    // `_held` protects a fetched snapshot from garbage collection until the rollback is complete.
    let (snapshot, _held) = target.await?;
    // A running sandbox already uses its quota.
    let _permit = match record.state() {
        SandboxState::Running => None,
        _ => Some(app.quota.reserve_restart(&caller, &record).await?),
    };
    let now = app.sandboxes.rollback(record.id(), snapshot.id()).await?;
    Ok(Json(RolledBack {
        sandbox_id: now.id().to_owned(),
        snapshot_id: snapshot.id().to_owned(),
        operation_id: new_id().map_err(|e| ApiError::internal(e.to_string()))?,
        status: RollbackStatus::Completed,
        boot_ms: now.boot_ms(),
        jiffy: whole(&caller, now),
    }))
}
