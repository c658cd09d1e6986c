//! `POST /sandboxes/{id}/rollback`.

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

/// Rolls a sandbox back to one of its snapshots, an ancestor, or a snapshot of a relative. The
/// sandbox retains its id; its connections are closed.
pub(super) async fn rollback(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Required(body): Required<RollbackSandbox>,
) -> Result<Json<RolledBack>, ApiError> {
    let record = app.sandbox(&caller, &id, Liveness::IncludingBroken)?;
    let target = app.ancestor_or_fetched(&caller, &record, &body.snapshot_id);
    let (snapshot, _held) = target.await?;
    let _permit = match record.state() {
        SandboxState::Running => None,
        _ => Some(app.quota.reserve_restart(&caller, record.size()).await?),
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
