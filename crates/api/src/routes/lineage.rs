//! `GET /lineage`: the sandboxes and snapshots that are connected with an object.

use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::lookup::Liveness;
use crate::query::Query;
use crate::wire;
use axum::Json;
use axum::extract::State;
use jiffy_api_types::Lineage;
use jiffy_sandbox_manager::{LineageObject, UnfoldedSeries};
use std::collections::HashSet;

/// Maximum number of snapshots in the parameter `unfold`.
pub(crate) const MAX_UNFOLDED: usize = 100;
/// Value of the parameter `unfold` for all series.
const ALL: &str = "all";

/// Returns the lineage of the sandbox or snapshot in the query. Only objects that are visible to
/// the caller are part of it.
pub(super) async fn lineage(
    State(app): State<App>,
    caller: Caller,
    query: Query,
) -> Result<Json<Lineage>, ApiError> {
    let start = match (query.get("sandboxID"), query.get("snapshotID")) {
        (Some(id), None) => sandbox(&app, &caller, id)?,
        (None, Some(id)) => {
            let snapshot = app.snapshot_of_lineage(&caller, id)?;
            LineageObject::Snapshot(snapshot.id().to_owned())
        }
        _ => {
            return Err(ApiError::invalid(
                "specify either `sandboxID` or `snapshotID`",
            ));
        }
    };
    let unfolded = unfolded(&query)?;
    // A large lineage takes some time.
    let walk = tokio::task::spawn_blocking(move || {
        let lineage = app
            .sandboxes
            .lineage(start, &unfolded, |owner| caller.sees(owner));
        wire::lineage::lineage(&caller, lineage)
    });
    let lineage = walk.await;
    lineage
        .map(Json)
        .map_err(|e| ApiError::internal(e.to_string()))
}

/// Reads the series of snapshots that are not shortened to one node.
fn unfolded(query: &Query) -> Result<UnfoldedSeries, ApiError> {
    let Some(text) = query.get("unfold") else {
        return Ok(UnfoldedSeries::None);
    };
    if text == ALL {
        return Ok(UnfoldedSeries::All);
    }
    let ids: HashSet<String> = text.split(',').map(str::to_owned).collect();
    if ids.len() > MAX_UNFOLDED {
        return Err(ApiError::invalid(format!(
            "`unfold` must be `{ALL}` or at most {MAX_UNFOLDED} ids of snapshots"
        )));
    }
    Ok(UnfoldedSeries::Containing(ids))
}

/// Finds a sandbox. A sandbox whose record was removed is found by its snapshots.
fn sandbox(app: &App, caller: &Caller, id: &str) -> Result<LineageObject, ApiError> {
    match app.sandbox(caller, id, Liveness::IncludingBroken) {
        Ok(record) => Ok(LineageObject::Sandbox(record.id().to_owned())),
        Err(error) => {
            let taken = app.sandboxes.snapshots().taken_of(id);
            if !caller.is_read_only() && taken.iter().any(|s| app.shows(caller, s)) {
                Ok(LineageObject::Sandbox(id.to_owned()))
            } else {
                Err(error)
            }
        }
    }
}
