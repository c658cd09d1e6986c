//! Forks of sandboxes.

use crate::app::App;
use crate::body::Optional;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::lookup::Liveness;
use crate::wire::sandbox::whole;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use jiffy_api_types::{ForkSandbox, Forked, Promoted};
use jiffy_sandbox_manager::{OperationError, Sandbox};
use std::time::Duration;

/// `POST /sandboxes/{id}/fork`: creates children. The response has one entry per child, with a
/// sandbox or an error.
pub(super) async fn fork(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Optional(body): Optional<ForkSandbox>,
) -> Result<(StatusCode, Json<Vec<Forked>>), ApiError> {
    // Validate the request before looking up the sandbox.
    let timeout = body.timeout.map(|t| app.config.timeout(t)).transpose()?;
    let count = usize::try_from(body.count.unwrap_or(1)).unwrap_or(usize::MAX);
    // The configured maximum does not apply to the host's owner. `Sandboxes::fork` has a limit of
    // its own.
    if !caller.is_owner() && !(1..=app.config.max_fork).contains(&count) {
        let max_fork = app.config.max_fork;
        return Err(ApiError::invalid(format!(
            "`count` must be 1 to {max_fork}"
        )));
    }
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    let _permit = app.quota.reserve_children(&caller, &record, count).await?;
    // `None` retains the timeout of the parent, and `Some(None)` means no timeout.
    let limit = timeout.map(|t| t.map(Duration::from_secs));
    let report = app.sandboxes.fork(record.id(), count, limit).await?;
    let mut forked = Vec::with_capacity(report.children.len());
    for child in report.children {
        // A failed child does not affect the other children.
        forked.push(entry(&app, &caller, report.snapshot.id(), child));
    }
    Ok((StatusCode::CREATED, Json(forked)))
}

/// Converts the result of a child for the response.
fn entry(
    app: &App,
    caller: &Caller,
    snapshot: &str,
    child: Result<Sandbox, OperationError>,
) -> Forked {
    let (sandbox, error) = match child {
        Ok(child) => (Some(app.answer(caller, &child)), None),
        Err(e) => (None, Some(ApiError::from(e).body(caller.is_admin()))),
    };
    Forked {
        snapshot_id: snapshot.to_owned(),
        sandbox,
        error,
    }
}

/// `POST /sandboxes/{id}/promote`: retains this child and removes its siblings.
pub(super) async fn promote(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Promoted>, ApiError> {
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    let removed_siblings = app.sandboxes.promote(record.id()).await?;
    Ok(Json(Promoted {
        sandbox_id: record.id().to_owned(),
        removed: removed_siblings.iter().map(|r| r.id().to_owned()).collect(),
        jiffy: removed_siblings
            .into_iter()
            .map(|r| whole(&caller, r))
            .collect(),
    }))
}
