//! Children of sandboxes.

use crate::app::App;
use crate::body::Optional;
use crate::caller::Caller;
use crate::error::{ApiError, ErrorBody};
use crate::lookup::Liveness;
use crate::wire::sandbox::{Sandbox, whole};
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use jiffy_sandbox_manager::{OperationError, SandboxRecord};
use serde::{Deserialize, Serialize};
use std::time::Duration;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ForkBody {
    timeout: Option<i64>,
    count: Option<u64>,
}

/// Result of one child.
#[derive(Debug, Serialize)]
pub(super) struct Forked {
    /// Snapshot that all children start from.
    #[serde(rename = "snapshotID")]
    snapshot_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Option<Sandbox>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorBody>,
}

/// Answer to a promotion.
#[derive(Debug, Serialize)]
pub(super) struct Promoted {
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    /// Sandboxes that went.
    removed: Vec<String>,
    /// Everything about them.
    jiffy: Vec<SandboxRecord>,
}

/// `POST /sandboxes/{id}/fork`: one entry per child, each with a sandbox or an error.
pub(super) async fn fork(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Optional(body): Optional<ForkBody>,
) -> Result<(StatusCode, Json<Vec<Forked>>), ApiError> {
    let timeout = body.timeout.map(|t| app.config.timeout(t)).transpose()?;
    let count = usize::try_from(body.count.unwrap_or(1)).unwrap_or(usize::MAX);
    if !caller.is_owner() && !(1..=app.config.max_fork).contains(&count) {
        let most = app.config.max_fork;
        return Err(ApiError::invalid(format!("`count` must be 1 to {most}")));
    }
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    let then = record.settings.on_timeout;
    let _room = app.room(&caller, record.size, count, then).await?;
    let limit = timeout.map(|t| t.map(Duration::from_secs));
    let report = app.sandboxes.fork(&record.id, count, limit).await?;
    let mut forked = Vec::with_capacity(report.children.len());
    for child in report.children {
        forked.push(entry(&app, &caller, &report.snapshot.id, child));
    }
    Ok((StatusCode::CREATED, Json(forked)))
}

fn entry(
    app: &App,
    caller: &Caller,
    snapshot: &str,
    child: Result<SandboxRecord, OperationError>,
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

/// `POST /sandboxes/{id}/promote`: this child stays, its siblings go.
pub(super) async fn promote(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Promoted>, ApiError> {
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    let gone = app.sandboxes.promote(&record.id).await?;
    Ok(Json(Promoted {
        sandbox_id: record.id,
        removed: gone.iter().map(|r| r.id.clone()).collect(),
        jiffy: gone.into_iter().map(|r| whole(&caller, r)).collect(),
    }))
}
