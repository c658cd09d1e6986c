//! Snapshots.

use crate::app::App;
use crate::body::Optional;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::lookup::Liveness;
use crate::page::{NEXT, Page};
use crate::query::Query;
use crate::wire::snapshot::Snapshot;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use jiffy_engine::{Engine, is_reserved};
use jiffy_host::SnapshotRecord;
use serde::Deserialize;

/// Longest name.
pub(crate) const MAX_NAME: usize = 128;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SnapshotBody {
    name: Option<String>,
    memory: Option<bool>,
    durable: Option<bool>,
}

/// `[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}`: what also templates and tags are made of. What reads as an
/// id is no name.
fn is_name(name: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || "._:/-".contains(c);
    name.len() <= MAX_NAME
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(good)
        && !is_reserved(name)
}

/// `POST /sandboxes/{id}/snapshots`: of one that runs, which runs on, or of one that sleeps.
pub(super) async fn take<E: Engine>(
    State(app): State<App<E>>,
    caller: Caller,
    Path(id): Path<String>,
    Optional(body): Optional<SnapshotBody>,
) -> Result<Response, ApiError> {
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    if body.memory == Some(false) {
        return Err(ApiError::unsupported(
            "`memory: false` is not supported: a snapshot is of memory and disk together",
        ));
    }
    if let Some(name) = &body.name
        && !is_name(name)
    {
        return Err(ApiError::invalid(format!(
            "`name` must begin with a letter or digit and go on with those and `._:/-`, {MAX_NAME} \
             at most; what reads as an id is no name"
        )));
    }
    let durable = body.durable == Some(true);
    if durable {
        app.sandboxes.snapshots().expect_store()?;
    }
    let mut taken = app.sandboxes.snapshot(&record.id, body.name).await?;
    if durable {
        taken = app.sandboxes.snapshots().wait_stored(&taken.id).await?;
    }
    Ok((
        StatusCode::CREATED,
        Json(Snapshot::new(&app, &caller, &taken)),
    )
        .into_response())
}

/// `GET /snapshots`: those that were asked for, newest first, in pages. The host's owner gets all
/// with `all=true`.
pub(super) async fn list<E: Engine>(
    State(app): State<App<E>>,
    caller: Caller,
    query: Query,
) -> Result<Response, ApiError> {
    let page = Page::from_query(&query)?;
    let everything = query.flag("all")? && caller.is_owner();
    let mut found = app.sandboxes.snapshots().list(None)?;
    found.retain(|s| match everything {
        true => true,
        false => s.purpose == jiffy_host::SnapshotPurpose::Asked && s.kept && app.shows(&caller, s),
    });
    if let Some(id) = query.get("sandboxID") {
        // Those taken of it, and those it descends from. A snapshot outlives its sandbox.
        let sandbox = app.sandbox(&caller, id, Liveness::Mendable).ok();
        let lineage = match &sandbox {
            Some(sandbox) => app.sandboxes.snapshots().list(Some(&sandbox.id))?,
            None => Vec::new(),
        };
        let id = sandbox.as_ref().map_or(id, |sandbox| &sandbox.id);
        let id = caller.shown_id(id);
        let of_it = |s: &SnapshotRecord| caller.shown_id(&s.sandbox) == id;
        found.retain(|s| of_it(s) || lineage.iter().any(|l| l.id == s.id));
    }
    if let Some(name) = query.get("name") {
        found.retain(|s| s.name.as_deref() == Some(name));
    }
    let (found, next) = page.cut(found, |s| (s.created_ms, s.id.clone()));
    let shown = found.iter().map(|s| Snapshot::new(&app, &caller, s));
    let shown: Vec<Snapshot> = shown.collect();
    let mut response = Json(shown).into_response();
    if let Some(next) = next {
        response.headers_mut().insert(NEXT, next);
    }
    Ok(response)
}

/// `GET /snapshots/{id}`.
pub(super) async fn one<E: Engine>(
    State(app): State<App<E>>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Snapshot>, ApiError> {
    let found = app.snapshot_or_stored(&caller, &id).await?;
    Ok(Json(Snapshot::new(&app, &caller, &found)))
}
