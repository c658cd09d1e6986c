//! Calls on the content of volumes, which the token of the volume or an API key authorises.

use super::volumes::refused;
use crate::app::App;
use crate::audit::AuditedCaller;
use crate::body::Required;
use crate::caller::{Caller, ClientAddress, check_key, key_of_request, unauthenticated};
use crate::error::ApiError;
use crate::keys::KeyStatus;
use crate::query::Query;
use crate::wire::volume::entry;
use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use jiffy_api_types::{VolumeEntry, VolumeEntryChange};
use jiffy_proto::internal::InternalOrigin;
use jiffy_volumes::{
    FileError, FileErrorKind, HostVolumes, NewAttributes, Volume, VolumeFiles, VolumePath,
};
use std::net::IpAddr;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Maximum depth of a listing.
pub(crate) const MAX_DEPTH: u64 = 100;
/// Maximum mode of an entry.
pub(crate) const MAX_MODE: u64 = 0o7777;
/// Parts of a body that are in flight between a connection and a volume.
const QUEUED_PARTS: usize = 4;
/// Start of the tokens of volumes.
pub(crate) const TOKEN_PREFIX: &str = "jiffy_volume_";

/// `GET /volumecontent/{volumeID}/path`: returns an entry.
pub(super) async fn stat(
    access: VolumeAccess,
    query: Query,
) -> Result<Json<VolumeEntry>, ApiError> {
    let path = path(&query)?;
    let found = access.work(move |mut files| files.stat(&path)).await?;
    Ok(Json(entry(&found)))
}

/// `PATCH /volumecontent/{volumeID}/path`: changes owner and permissions.
pub(super) async fn change(
    access: VolumeAccess,
    query: Query,
    Required(body): Required<VolumeEntryChange>,
) -> Result<Json<VolumeEntry>, ApiError> {
    let path = path(&query)?;
    if body.mode.is_some_and(|mode| u64::from(mode) > MAX_MODE) {
        return Err(ApiError::invalid(
            "`mode` must be at most 4095 (octal 7777)",
        ));
    }
    let new = NewAttributes {
        uid: body.uid,
        gid: body.gid,
        mode: body.mode,
    };
    let found = access.work(move |mut files| files.set(&path, new)).await?;
    Ok(Json(entry(&found)))
}

/// `DELETE /volumecontent/{volumeID}/path`: removes a file, or a directory with its entries.
pub(super) async fn remove(access: VolumeAccess, query: Query) -> Result<StatusCode, ApiError> {
    let path = path(&query)?;
    access.work(move |mut files| files.remove(&path)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `GET /volumecontent/{volumeID}/dir`: lists a directory.
pub(super) async fn list(
    access: VolumeAccess,
    query: Query,
) -> Result<Json<Vec<VolumeEntry>>, ApiError> {
    let depth = query.number("depth", 1..=MAX_DEPTH)?.unwrap_or(1);
    let depth = u32::try_from(depth).unwrap_or(1);
    let path = path(&query)?;
    let found = access
        .work(move |mut files| files.list(&path, depth))
        .await?;
    Ok(Json(found.iter().map(entry).collect()))
}

/// `POST /volumecontent/{volumeID}/dir`: creates a directory.
pub(super) async fn make_directory(
    access: VolumeAccess,
    query: Query,
) -> Result<(StatusCode, Json<VolumeEntry>), ApiError> {
    let (new, force) = (attributes(&query)?, force(&query)?);
    let path = path(&query)?;
    let make = move |mut files: VolumeFiles| files.make_directory(&path, new, force);
    let made = access.work(make).await?;
    Ok((StatusCode::CREATED, Json(entry(&made))))
}

/// `GET /volumecontent/{volumeID}/file`: returns the content of a file.
pub(super) async fn read(access: VolumeAccess, query: Query) -> Result<Response, ApiError> {
    let path = path(&query)?;
    let open = move |mut files: VolumeFiles| {
        let found = files.open(&path)?;
        Ok((files, path, found))
    };
    let (mut files, path, found) = access.work(open).await?;
    let (sender, receiver) = mpsc::channel::<Result<Bytes, FileError>>(QUEUED_PARTS);
    // The length is fixed at the start: a file that grows or shrinks ends the body there, or with
    // an error.
    let length = found.size;
    tokio::task::spawn_blocking(move || {
        let mut offset = 0;
        while offset < length {
            let part = files.read(&path, found.node, offset).map(|part| {
                let rest = usize::try_from(length - offset).unwrap_or(usize::MAX);
                Bytes::copy_from_slice(part.get(..rest).unwrap_or(part))
            });
            let size = part.as_ref().map_or(0, Bytes::len);
            // The receiver is dropped when the client disconnects.
            if sender.blocking_send(part).is_err() || size == 0 {
                return;
            }
            offset += size as u64;
        }
    });
    let parts = futures_util::stream::unfold(receiver, async |mut receiver| {
        Some((receiver.recv().await?, receiver))
    });
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, length.to_string()),
    ];
    Ok((headers, Body::from_stream(parts)).into_response())
}

/// `PUT /volumecontent/{volumeID}/file`: writes a file. Readers see the old or the new content.
pub(super) async fn write(
    access: VolumeAccess,
    query: Query,
    body: Body,
) -> Result<(StatusCode, Json<VolumeEntry>), ApiError> {
    let (new, force) = (attributes(&query)?, force(&query)?);
    let path = path(&query)?;
    let (sender, mut receiver) = mpsc::channel::<Bytes>(QUEUED_PARTS);
    let write = access.work(move |files| {
        let mut upload = files.upload(&path, new, force)?;
        while let Some(part) = receiver.blocking_recv() {
            // An empty part marks the end. Without it, the client has disconnected.
            if part.is_empty() {
                return upload.finish().map(Some);
            }
            upload.write(&part)?;
        }
        Ok(None)
    });
    let mut parts = body.into_data_stream();
    let send = async move {
        while let Some(part) = parts.next().await {
            let part =
                part.map_err(|e| ApiError::invalid(format!("the upload was interrupted: {e}")))?;
            // The writer has failed, and reports its own error.
            if !part.is_empty() && sender.send(part).await.is_err() {
                return Ok(());
            }
        }
        // An empty part marks the end. Ignore the error: the writer reports its own.
        let _ = sender.send(Bytes::new()).await;
        Ok::<(), ApiError>(())
    };
    let (written, sent) = tokio::join!(write, send);
    let written = written?;
    sent?;
    let written = written.ok_or_else(|| ApiError::invalid("the upload was interrupted"))?;
    Ok((StatusCode::CREATED, Json(entry(&written))))
}

/// Access to the files of one volume.
pub(super) struct VolumeAccess {
    host: Arc<HostVolumes>,
    /// The volume. An error is reported after errors of the body, as in all other calls.
    volume: Result<Volume, ApiError>,
}

impl VolumeAccess {
    /// Calls `work` with the files of the volume.
    async fn work<T: Send + 'static>(
        self,
        work: impl FnOnce(VolumeFiles) -> Result<T, FileError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (host, volume) = (self.host, self.volume?);
        let done = tokio::task::spawn_blocking(move || work(host.files(&volume)?));
        let done = done.await.map_err(|e| ApiError::internal(e.to_string()))?;
        done.map_err(|e| failed(&e))
    }
}

impl FromRequestParts<App> for VolumeAccess {
    type Rejection = ApiError;

    /// Returns access to the volume of the path, if the token of the volume or the key of its owner
    /// is presented.
    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let host = app.volumes()?.clone();
        let Path(which): Path<String> = Path::from_request_parts(parts, app)
            .await
            .map_err(|e| ApiError::invalid(e.body_text()))?;
        let key = key_of_request(&parts.headers);
        let address = parts.extensions.get::<ClientAddress>().map(|a| a.0);
        let audited = parts.extensions.get::<AuditedCaller>();
        if let Some(token) = key.filter(|token| token.starts_with(TOKEN_PREFIX)) {
            let access = by_token(app, host, which, token.to_owned(), address).await?;
            if let (Some(audited), Ok(volume)) = (audited, &access.volume) {
                let owner = Some(volume.owner.clone()).filter(|owner| !owner.is_empty());
                audited.set_token(owner);
            }
            return Ok(access);
        }
        let caller = match parts.extensions.get::<Caller>() {
            Some(caller) => caller.clone(),
            // Sandboxes and functions have no keys for volumes.
            None if parts.extensions.get::<InternalOrigin>().is_some() => {
                return Err(unauthenticated());
            }
            None => Caller::Key(check_key(app, key, address)?),
        };
        if let Some(audited) = audited {
            audited.set(&caller);
        }
        if caller.is_read_only() && parts.method != Method::GET {
            return Err(ApiError::read_only());
        }
        let owner = caller.owner_id().unwrap_or_default();
        let volumes = host.clone();
        let get = move || volumes.volumes().get(&owner, &which);
        let done = tokio::task::spawn_blocking(get).await;
        let volume = done
            .map_err(|e| ApiError::internal(e.to_string()))?
            .map_err(refused);
        Ok(Self { host, volume })
    }
}

/// Returns access to a volume if `token` is its token. Failures are counted like failed keys.
async fn by_token(
    app: &App,
    host: Arc<HostVolumes>,
    which: String,
    token: String,
    address: Option<IpAddr>,
) -> Result<VolumeAccess, ApiError> {
    if let Some(wait) = address.and_then(|ip| app.authentication_limit.wait(ip)) {
        let message = "too many failed authentications from this address: retry later";
        let seconds = wait.as_secs() + 1;
        return Err(ApiError::too_many("authentication_failures", message).after(seconds));
    }
    let authenticate = move || {
        let found = host.volumes().authenticate(&which, &token)?;
        Ok((host, found))
    };
    let done = tokio::task::spawn_blocking(authenticate).await;
    let done = done.map_err(|e| ApiError::internal(e.to_string()))?;
    let (host, found) = done.map_err(refused)?;
    // A token is valid as long as the key of its owner.
    let is_valid = |volume: &Volume| {
        let owner = Some(volume.owner.as_str()).filter(|owner| !owner.is_empty());
        app.keys.status(owner) == KeyStatus::InForce
    };
    let access = found.filter(is_valid).map(|volume| VolumeAccess {
        host,
        volume: Ok(volume),
    });
    access.ok_or_else(|| {
        if let Some(ip) = address {
            app.authentication_limit.count(ip);
        }
        ApiError::new(
            StatusCode::UNAUTHORIZED,
            "unauthenticated",
            "the token is not valid for this volume: `GET /volumes/{volumeID}` returns its token",
        )
    })
}

fn path(query: &Query) -> Result<VolumePath, ApiError> {
    let text = query.get("path");
    let text = text.ok_or_else(|| ApiError::invalid("the parameter `path` is missing"))?;
    VolumePath::parse(text).map_err(|e| failed(&e))
}

fn attributes(query: &Query) -> Result<NewAttributes, ApiError> {
    let number = |name, most| {
        let number = query.number(name, 0..=most)?;
        Ok::<_, ApiError>(number.and_then(|number| u32::try_from(number).ok()))
    };
    Ok(NewAttributes {
        // The number `u32::MAX` means no change for the kernel.
        uid: number("uid", u64::from(u32::MAX) - 1)?,
        gid: number("gid", u64::from(u32::MAX) - 1)?,
        mode: number("mode", MAX_MODE)?,
    })
}

fn force(query: &Query) -> Result<bool, ApiError> {
    // Clients in Python write booleans with a capital letter.
    let words = [
        ("true", true),
        ("True", true),
        ("1", true),
        ("false", false),
        ("False", false),
        ("0", false),
    ];
    Ok(query.word("force", &words)?.unwrap_or(false))
}

/// Converts an error of a volume's file system to a response.
fn failed(error: &FileError) -> ApiError {
    let message = error.to_string();
    match error.kind() {
        FileErrorKind::Invalid => ApiError::invalid(message),
        FileErrorKind::NotFound => {
            let message = format!("{message}: the path does not exist in the volume");
            ApiError::not_found("volume_path_not_found", message)
        }
        FileErrorKind::Exists => ApiError::conflict("volume_path_exists", message),
        FileErrorKind::Full => {
            ApiError::new(StatusCode::INSUFFICIENT_STORAGE, "volume_full", message)
        }
        FileErrorKind::Internal => ApiError::internal(message),
    }
}
