//! Calls on snapshots: taking, listing and describing them.
//!
//! A *captured* snapshot is acknowledged to its client when its memory is frozen; its files are
//! completed in the background.

use crate::app::App;
use crate::body::Optional;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::lookup::Liveness;
use crate::page::{Page, with_next};
use crate::query::Query;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use jiffy_api_types::{MAX_SNAPSHOT_NAME, Snapshot, SnapshotAck, SnapshotContent, SnapshotSandbox};
use jiffy_engine_api::is_reserved;
use jiffy_sandbox_manager::{self as manager, ListOrder, ListedSnapshots};

/// Returns whether the response is sent as soon as the memory is captured. The request decides,
/// otherwise the default of the caller's key, otherwise the default of the daemon.
fn is_only_captured(app: &App, caller: &Caller, body: &SnapshotSandbox) -> Result<bool, ApiError> {
    if body.durable == Some(true) {
        return match body.ack {
            Some(SnapshotAck::Captured) => Err(ApiError::invalid(
                "`durable` waits until the store has the snapshot: omit `ack: captured`",
            )),
            _ => Ok(false),
        };
    }
    let of_key = || caller.key()?.limits.snapshot_ack;
    let ack = body.ack.or_else(of_key).unwrap_or(app.config.snapshot_ack);
    Ok(ack == SnapshotAck::Captured)
}

/// Returns whether `name` is a valid snapshot name: `[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}`, like
/// templates with tags, but not in the form of an id.
fn is_name(name: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || "._:/-".contains(c);
    name.len() <= MAX_SNAPSHOT_NAME
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(good)
        && !is_reserved(name)
}

/// `POST /sandboxes/{id}/snapshots`: creates a snapshot of a running or paused sandbox. With `ack:
/// captured`, responds as soon as the memory is captured.
pub(super) async fn take(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Optional(body): Optional<SnapshotSandbox>,
) -> Result<Response, ApiError> {
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    let content = SnapshotContent::with_memory(body.memory);
    app.check_content(record.engine(), content)?;
    if let Some(name) = &body.name
        && !is_name(name)
    {
        return Err(ApiError::invalid(format!(
            "`name` must start with a letter or digit, consist of letters, digits and `._:/-`, have at most \
             {MAX_SNAPSHOT_NAME} characters, and must not look like an id"
        )));
    }
    let only_captured = is_only_captured(&app, &caller, &body)?;
    let durable = body.durable == Some(true);
    if durable {
        // Fail before taking the snapshot if the host uses no store.
        app.sandboxes.snapshots().expect_store()?;
    }
    let mut taken = if only_captured && content.is_full() {
        // The files are written in the background.
        app.sandboxes.capture(record.id(), body.name).await?
    } else {
        let sandboxes = &app.sandboxes;
        sandboxes
            .snapshot_with(record.id(), body.name, content)
            .await?
    };
    if durable {
        taken = app.sandboxes.snapshots().wait_stored(taken.id()).await?;
    }
    Ok((
        StatusCode::CREATED,
        Json(app.snapshot_info(&caller, &taken)),
    )
        .into_response())
}

/// Returns the snapshots that were taken of a sandbox. While the sandbox exists, also returns the
/// snapshots from which it descends. The caller must check which of them are visible.
fn of_sandbox(app: &App, caller: &Caller, id: &str) -> Result<Vec<manager::Snapshot>, ApiError> {
    let snapshots = app.sandboxes.snapshots();
    match app.sandbox(caller, id, Liveness::IncludingBroken) {
        Ok(sandbox) => Ok(snapshots.list(Some(sandbox.id()))?),
        // A read-only caller knows only a prefix of the id.
        Err(_) if caller.is_read_only() => {
            let of_it = |s: &manager::Snapshot| caller.shown_id(s.sandbox()) == caller.shown_id(id);
            Ok(snapshots.in_order(
                ListedSnapshots::All,
                &ListOrder::default(),
                usize::MAX,
                of_it,
            ))
        }
        Err(_) => Ok(snapshots.taken_of(id)),
    }
}

/// `GET /snapshots`: lists requested snapshots, newest first, in pages. For the host's owner,
/// `all=true` includes internal snapshots.
pub(super) async fn list(
    State(app): State<App>,
    caller: Caller,
    query: Query,
) -> Result<Response, ApiError> {
    let page = Page::from_query(&query)?;
    // For other callers, the parameter has no effect.
    let include_all = query.flag("all")? && caller.is_owner();
    // The id makes positions unique: several snapshots may be created in one millisecond.
    let position = |s: &manager::Snapshot| (s.created_ms(), s.id().to_owned());
    let name = query.get("name");
    let is_match = |s: &manager::Snapshot| {
        (include_all || (s.is_requested() && app.shows(&caller, s)))
            && name.is_none_or(|name| s.name() == Some(name))
            && page.reaches(&position(s))
    };
    let snapshots = app.sandboxes.snapshots();
    // Only the last case reads page by page. The others collect all matching snapshots, from which
    // `cut` selects the page.
    let found = match (query.get("sandboxID"), name) {
        (Some(id), _) => {
            let mut found = of_sandbox(&app, &caller, id)?;
            found.retain(is_match);
            found
        }
        (None, Some(name)) => {
            let mut found = snapshots.like(name);
            found.retain(is_match);
            found
        }
        (None, None) => {
            let listed = match (include_all, caller.owner_scope()) {
                (true, _) => ListedSnapshots::All,
                (false, Some(owner)) => ListedSnapshots::RequestedBy(owner),
                (false, None) => ListedSnapshots::Requested,
            };
            snapshots.in_order(listed, &page.order(), page.fetch_limit(), is_match)
        }
    };
    let (found, next) = page.cut(found, position);
    let shown = found.iter().map(|s| app.snapshot_info(&caller, s));
    let shown: Vec<Snapshot> = shown.collect();
    Ok(with_next(Json(shown).into_response(), next))
}

/// `GET /snapshots/{id}`.
pub(super) async fn one(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Snapshot>, ApiError> {
    let found = app.snapshot_or_stored(&caller, &id).await?;
    Ok(Json(app.snapshot_info(&caller, &found)))
}
