//! Calls on snapshots of volumes in the store of the host. A caller of any scope sees its own
//! snapshots only.

use super::volumes::{DEFAULT_PAGE, refused};
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::owned_objects::blocking;
use crate::page::Page;
use crate::query::Query;
use crate::wire::volume::shown_snapshot;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use jiffy_api_types::VolumeSnapshot;
use jiffy_volumes::{StoredVolumes, VolumeError};
use std::sync::Arc;

/// `POST /volumes/{volumeID}/snapshots`: stores a snapshot of a volume.
pub(super) async fn create(
    State(app): State<App>,
    caller: Caller,
    Path(which): Path<String>,
) -> Result<(StatusCode, Json<VolumeSnapshot>), ApiError> {
    let stored = app.stored_volumes()?;
    let owner = caller.owner_id().unwrap_or_default();
    let created = stored.create(&owner, &which).await.map_err(refused)?;
    Ok((StatusCode::CREATED, Json(shown_snapshot(&created))))
}

/// `GET /volumesnapshots`: lists the snapshots of the caller's volumes by id.
pub(super) async fn list(
    State(app): State<App>,
    caller: Caller,
    query: Query,
) -> Result<Response, ApiError> {
    let page = Page::by_name(&query, DEFAULT_PAGE)?;
    let after = page.after_name().map(str::to_owned);
    let (stored, fetch) = (app.stored_volumes()?.clone(), page.fetch_limit());
    let owner = caller.owner_id().unwrap_or_default();
    let list = move || stored.list(&owner, after.as_deref(), fetch);
    let found = blocking(refused, list).await?;
    Ok(page.response_by_name(found, |snapshot| &snapshot.id, |one| shown_snapshot(&one)))
}

/// `DELETE /volumesnapshots/{volumeSnapshotID}`: removes a snapshot.
pub(super) async fn remove(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    let stored = app.stored_volumes()?;
    let owner = caller.owner_id().unwrap_or_default();
    stored.remove(&owner, &id).await.map_err(refused)?;
    Ok(StatusCode::NO_CONTENT)
}

impl App {
    /// Returns the snapshots of volumes in the store of this host.
    pub(super) fn stored_volumes(&self) -> Result<&Arc<StoredVolumes>, ApiError> {
        self.volumes()?;
        self.stored_volumes.as_ref().ok_or_else(|| {
            ApiError::unsupported_option(
                "snapshots of volumes need a store: start the daemon with `jiffy serve --store`",
            )
        })
    }

    /// Returns a snapshot of a volume of the caller that this host has taken.
    pub(crate) fn volume_snapshot(
        &self,
        caller: &Caller,
        id: &str,
    ) -> Result<jiffy_volumes::VolumeSnapshot, ApiError> {
        let owner = caller.owner_id().unwrap_or_default();
        self.stored_volumes()?.get(&owner, id).map_err(refused)
    }

    /// Removes the snapshots of volumes of a revoked key whose resources are removed.
    pub(crate) async fn remove_volume_snapshots_of(&self, key: &str) -> Result<(), ApiError> {
        match &self.stored_volumes {
            Some(stored) => stored.remove_all(key).await.map_err(refused),
            None => Ok(()),
        }
    }
}

/// Returns the error of a store, or of an image in it.
pub(super) fn store_error(error: VolumeError) -> ApiError {
    let message = error.to_string();
    match error {
        VolumeError::Store(e) if e.retry_after().is_some() => {
            let wait = e.retry_after().unwrap_or_default();
            ApiError::store_unavailable(message).after(wait.as_secs().max(1))
        }
        VolumeError::Store(e) if e.is_damage() => damaged(),
        VolumeError::Image(e) if !matches!(e, jiffy_volumes::ImageError::Io(_)) => damaged(),
        _ => ApiError::internal(message),
    }
}

/// The message omits the damaged object and its location on this host.
fn damaged() -> ApiError {
    let message = "the snapshot of the volume is damaged in the store: store another one";
    ApiError::conflict("snapshot_damaged", message).permanent()
}
