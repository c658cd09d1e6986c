//! Calls on volumes. A caller of any scope sees its own volumes only.
//!
//! A *permit* counts towards a limit until it is dropped.

use super::volume_snapshots::store_error;
use crate::app::App;
use crate::body::Required;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::fleet::HomedVolume;
use crate::owned_objects::{blocking, for_owner};
use crate::page::Page;
use crate::query::Query;
use crate::wire::volume::shown;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use jiffy_api_types::{EventType, NewVolume, NewVolumeMount, VolumeAndToken};
use jiffy_fleet_core::MemberId;
use jiffy_sandbox_manager::{MountedVolume, QuotaPermit};
use jiffy_volumes::{DEFAULT_FILES, HostVolumes, MAX_BYTES, MIN_BYTES, VolumeError};
use std::sync::Arc;

/// Maximum number of volumes of a sandbox.
const MAX_MOUNTS: usize = 16;
/// Maximum length of the path of a mount in bytes.
const MAX_MOUNT_PATH: usize = 1024;
/// Directories in which no volume can be mounted.
const KERNEL_PATHS: [&str; 4] = ["/dev", "/proc", "/sys", "/run"];
/// Default number of volumes per page. Clients of E2B request one page only.
pub(crate) const DEFAULT_PAGE: usize = 100;
/// Maximum number of sandboxes that the error about a mounted volume names.
const MAX_SHOWN_SANDBOXES: usize = 8;
/// Maximum number of characters of a path in an error.
const MAX_SHOWN_CHARS: usize = 128;

/// `GET /volumes`: lists the volumes of the caller by name.
pub(super) async fn list(
    State(app): State<App>,
    caller: Caller,
    query: Query,
) -> Result<Response, ApiError> {
    let page = Page::by_name(&query, DEFAULT_PAGE)?;
    let (after, fetch) = (page.after_name().map(str::to_owned), page.fetch_limit());
    app.volumes()?;
    if let Some(fleet) = &app.fleet {
        let mut found = fleet.volumes_of(&caller.owner_id().unwrap_or_default());
        found.retain(|one| after.as_ref().is_none_or(|after| one.volume.name > *after));
        found.truncate(fetch);
        let shown = |one: HomedVolume| shown(&one.volume, Some(one.home));
        return Ok(page.response_by_name(found, |one| &one.volume.name, shown));
    }
    let list =
        move |host: &HostVolumes, owner: &str| host.volumes().list(owner, after.as_deref(), fetch);
    let found = app.on_volumes(&caller, list).await?;
    Ok(page.response_by_name(found, |volume| &volume.name, |one| shown(&one, None)))
}

/// `GET /volumes/{volumeID}`: returns a volume with its token.
pub(super) async fn one(
    State(app): State<App>,
    caller: Caller,
    Path(which): Path<String>,
) -> Result<Json<VolumeAndToken>, ApiError> {
    // A read-only caller must not receive the token, which permits changes.
    if caller.is_read_only() {
        return Err(ApiError::read_only());
    }
    let home = app.own_member();
    let get = move |host: &HostVolumes, owner: &str| {
        let found = host.volumes().get(owner, &which)?;
        let token = host.volumes().token(&found)?;
        Ok(VolumeAndToken {
            volume: shown(&found, home),
            token,
        })
    };
    Ok(Json(app.on_volumes(&caller, get).await?))
}

/// `POST /volumes`: creates an empty volume, or one from a snapshot.
pub(super) async fn create(
    State(app): State<App>,
    caller: Caller,
    Required(body): Required<NewVolume>,
) -> Result<(StatusCode, Json<VolumeAndToken>), ApiError> {
    // Fail first if this host has no volumes, before a quota is checked.
    let volumes = app.volumes()?.clone();
    if app.fleet.is_none() && body.host.is_some() {
        return Err(ApiError::unsupported_option(
            "`host` is not supported: this host is in no fleet",
        ));
    }
    let owner = caller.owner_id().unwrap_or_default();
    let mut size = body.size_mb.map(|mib| mib.saturating_mul(1 << 20));
    let mut files = body.max_files;
    if let Some(id) = &body.volume_snapshot_id {
        // All members of a fleet have the same store.
        let found = app.stored_volumes()?.sizes(&owner, id, app.fleet.is_some());
        let found = found.await.map_err(refused)?;
        // The sizes of the volume of which the snapshot was taken.
        size = size.or(Some(found.size));
        files = files.or(Some(found.files));
        found.check(size.unwrap_or_default()).map_err(refused)?;
    }
    // The permit counts until the volume counts as used.
    let (bytes, _permit) = match size {
        // Such a size is rejected below, with the permitted sizes.
        Some(bytes) if !(MIN_BYTES..=MAX_BYTES).contains(&bytes) => {
            (bytes, QuotaPermit::unlimited())
        }
        size => app.quota.reserve_volume(&caller, size).await?,
    };
    let new = jiffy_volumes::NewVolume {
        name: body.name.unwrap_or_default(),
        bytes,
        files: files.unwrap_or(DEFAULT_FILES),
    };
    let new = volumes.prepare(&owner, &new).map_err(refused)?;
    // In a fleet, the name is reserved before the files are created.
    let row = match &app.fleet {
        Some(fleet) => fleet.add_volume(&new).await?,
        None => None,
    };
    let volume = new.clone();
    let done = match &body.volume_snapshot_id {
        Some(id) => {
            let restored = app.stored_volumes()?.restore(id, &new).await;
            restored.map_err(refused)
        }
        None => blocking(refused, move || volumes.create(&volume)).await,
    };
    if let Err(error) = done {
        if let Some(row) = row {
            row.discard().await;
        }
        return Err(error);
    }
    created(&app, &caller, new).await
}

/// Returns the answer to the creation of a volume, and reports the creation.
async fn created(
    app: &App,
    caller: &Caller,
    new: jiffy_volumes::Volume,
) -> Result<(StatusCode, Json<VolumeAndToken>), ApiError> {
    let home = app.own_member();
    let answer = move |host: &HostVolumes, _: &str| {
        let token = host.volumes().token(&new)?;
        Ok(VolumeAndToken {
            volume: shown(&new, home),
            token,
        })
    };
    let answer = app.on_volumes(caller, answer).await?;
    let owner = caller.owner_id();
    app.report_object(EventType::VolumeCreated, owner, &answer.volume.name);
    Ok((StatusCode::CREATED, Json(answer)))
}

/// `DELETE /volumes/{volumeID}`: removes a volume with its files.
pub(super) async fn remove(
    State(app): State<App>,
    caller: Caller,
    Path(which): Path<String>,
) -> Result<StatusCode, ApiError> {
    let sandboxes = app.sandboxes.clone();
    let name = which.clone();
    let remove = move |host: &HostVolumes, owner: &str| {
        let found = host.volumes().get(owner, &name)?;
        let users = sandboxes.sandboxes_with_volume(&found.id);
        if !users.is_empty() {
            let (count, shown) = (
                users.len(),
                users
                    .into_iter()
                    .take(MAX_SHOWN_SANDBOXES)
                    .collect::<Vec<_>>(),
            );
            return Err(VolumeError::Mounted {
                name: found.name,
                count,
                sandboxes: shown.join(", "),
            });
        }
        host.remove(&found)?;
        Ok(found)
    };
    let removed = match app.on_volumes(&caller, remove).await {
        Ok(removed) => removed,
        Err(error) if error.status == StatusCode::NOT_FOUND => {
            // An earlier call has removed the files, but could not release the name.
            let owner = caller.owner_id().unwrap_or_default();
            let row = app
                .fleet
                .as_ref()
                .and_then(|fleet| fleet.own_volume(&owner, &which));
            row.ok_or(error)?
        }
        Err(error) => return Err(error),
    };
    app.report_object(EventType::VolumeDeleted, caller.owner_id(), &removed.name);
    if let Some(fleet) = &app.fleet {
        fleet.remove_volumes(vec![removed.id]).await?;
    }
    Ok(StatusCode::NO_CONTENT)
}

impl App {
    /// Returns the volumes of this host.
    pub(crate) fn volumes(&self) -> Result<&Arc<HostVolumes>, ApiError> {
        let volumes = self.volumes.as_ref();
        volumes.ok_or_else(|| ApiError::unsupported_option("this host has no volumes"))
    }

    /// Returns the number of this host in its fleet. `None` without a fleet.
    fn own_member(&self) -> Option<MemberId> {
        self.fleet.as_ref().map(|fleet| fleet.node().id())
    }

    /// Calls `work` with the volumes of this host and the owner of the caller's volumes.
    async fn on_volumes<T: Send + 'static>(
        &self,
        caller: &Caller,
        work: impl FnOnce(&HostVolumes, &str) -> Result<T, VolumeError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let volumes = self.volumes()?.clone();
        for_owner(caller, refused, move |owner| work(&volumes, owner)).await
    }

    /// Resolves the volumes of a new sandbox.
    pub(super) async fn volumes_of_new(
        &self,
        caller: &Caller,
        mounts: Option<Vec<NewVolumeMount>>,
    ) -> Result<Vec<MountedVolume>, ApiError> {
        let mut mounts = mounts.unwrap_or_default();
        if mounts.is_empty() {
            return Ok(Vec::new());
        }
        if mounts.len() > MAX_MOUNTS {
            let message = format!("`volumeMounts` has more than {MAX_MOUNTS} entries");
            return Err(ApiError::invalid(message));
        }
        for (index, mount) in mounts.iter().enumerate() {
            check_mount_path(&mount.path)?;
            let mut earlier = mounts.iter().take(index);
            if earlier.any(|other| overlaps(&other.path, &mount.path)) {
                return Err(ApiError::invalid(
                    "`volumeMounts`: a path must not be equal to or below another path",
                ));
            }
        }
        if let Some(fleet) = &self.fleet {
            let owner = caller.owner_id().unwrap_or_default();
            for mount in &mut mounts {
                // Names are unique in the whole fleet.
                if let Some(id) = fleet.volume_here(&owner, &mount.name)? {
                    mount.name = id;
                }
            }
        }
        let resolve = move |host: &HostVolumes, owner: &str| {
            let resolved = mounts.into_iter().map(|mount| {
                let found = host.volumes().get(owner, &mount.name)?;
                Ok(MountedVolume {
                    volume: found.id,
                    name: found.name,
                    path: mount.path,
                    read_only: mount.read_only.unwrap_or_default(),
                })
            });
            resolved.collect()
        };
        self.on_volumes(caller, resolve).await
    }

    /// Removes the volumes of a revoked key whose resources are removed.
    pub(crate) async fn remove_volumes_of(&self, key: &str) -> Result<(), ApiError> {
        let (Some(volumes), owner) = (self.volumes.clone(), key.to_owned()) else {
            return Ok(());
        };
        let remove = move || {
            // No limit: the maximum of a signed integer of the database.
            let all = volumes.volumes().list(&owner, None, usize::MAX >> 1)?;
            for volume in &all {
                volumes.remove(volume)?;
            }
            Ok(all)
        };
        let removed = blocking(refused, remove).await?;
        for volume in &removed {
            self.report_object(EventType::VolumeDeleted, Some(key.to_owned()), &volume.name);
        }
        match &self.fleet {
            Some(fleet) => {
                let ids = removed.into_iter().map(|volume| volume.id);
                fleet.remove_volumes(ids.collect()).await
            }
            None => Ok(()),
        }
    }
}

/// Returns whether one of two paths is equal to or below the other.
fn overlaps(a: &str, b: &str) -> bool {
    let below = |path: &str, of: &str| {
        let rest = path.strip_prefix(of);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    below(a, b) || below(b, a)
}

/// Checks the path of a mount. The root and the file systems of the kernel cannot be covered. Each
/// part of the path has at most 255 bytes, as in Linux.
fn check_mount_path(path: &str) -> Result<(), ApiError> {
    let parts = path.strip_prefix('/').map(|rest| rest.split('/'));
    let is_valid = parts.is_some_and(|mut parts| {
        parts.all(|part| !matches!(part, "" | "." | "..") && part.len() <= 255)
    });
    let is_plain = path.len() <= MAX_MOUNT_PATH && !path.contains(|c: char| c.is_control());
    if is_valid && is_plain && !KERNEL_PATHS.iter().any(|of| overlaps(path, of)) {
        return Ok(());
    }
    let shown: String = path.chars().take(MAX_SHOWN_CHARS).collect();
    Err(ApiError::invalid(format!(
        "`volumeMounts`: the path `{}` is not allowed: use an absolute path without `..`, not in \
         /dev, /proc, /sys or /run",
        shown.escape_debug()
    )))
}

/// Converts an error of a volume to a response.
pub(super) fn refused(error: VolumeError) -> ApiError {
    let message = error.to_string();
    match error {
        VolumeError::Name(_) | VolumeError::Size | VolumeError::Small(_) => {
            ApiError::invalid(message)
        }
        VolumeError::Exists(_) => ApiError::conflict("name_taken", message),
        VolumeError::Full | VolumeError::Total | VolumeError::FullOfSnapshots => {
            ApiError::conflict("max_volumes", message)
        }
        VolumeError::Mounted { .. } => ApiError::conflict("volume_mounted", message),
        VolumeError::Unknown(_) => ApiError::not_found("volume_not_found", message),
        VolumeError::UnknownSnapshot(_) => ApiError::not_found("snapshot_not_found", message),
        error => store_error(error),
    }
}
