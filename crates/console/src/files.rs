//! Files of sandboxes. Each message of an agent is decoded, checked and encoded again: the root
//! user of a guest can replace its agent.
//!
//! An *exchange* is a request to a sandbox or function with its response or stream. A *permit*
//! counts towards a limit until it is dropped.

use crate::Console;
use crate::codes::Download;
use crate::guest_audit::CallNames;
use crate::refusal::Refusal;
use crate::session_store::Session;
use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_DISPOSITION, CONTENT_TYPE, HeaderValue};
use axum::response::Response;
use axum::{Extension, Json};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use jiffy_agent_client::{AgentClient, EntryInfo, EntryKind, FileReader};
use jiffy_api::{App, Caller, ExchangePermit, PortRefusal};
use jiffy_proto::agent::ENVD_PORT;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::io;
use std::time::Duration;
use tokio::time::timeout;

/// Maximum length of a path in bytes, as in Linux.
const MAX_PATH: usize = 4096;
/// Time limit for opening a connection to an agent, including a resume.
const OPEN_LIMIT: Duration = Duration::from_secs(30);
/// Time limit of calls that return no file.
const CALL_LIMIT: Duration = Duration::from_secs(60);
/// User that accesses files if the request names no user.
pub(crate) const DEFAULT_USER: &str = "root";

/// Agent of a sandbox, and the permit for the exchange.
pub(crate) struct Guest {
    pub id: String,
    pub client: AgentClient,
    pub permit: Option<ExchangePermit>,
}

/// Returns the agent of a sandbox that the caller may use.
pub(crate) fn open(app: &App, caller: &Caller, id: &str) -> Result<Guest, Refusal> {
    let access = app.guest_access(caller, id)?;
    let (ports, sandbox) = (access.ports, access.id.clone());
    // The port is a constant below 65536.
    let port = u16::try_from(ENVD_PORT).unwrap_or_default();
    let client = AgentClient::new(move || {
        let (ports, sandbox) = (ports.clone(), sandbox.clone());
        async move {
            let opened = timeout(OPEN_LIMIT, ports.open(&sandbox, port)).await;
            let late = |_| PortRefusal::Unavailable("timed out connecting to the agent".to_owned());
            opened
                .map_err(late)
                .and_then(|opened| opened)
                .map_err(|refusal| io::Error::other(refusal.to_string()))
        }
    });
    let client = match access.token {
        Some(token) => client.with_token(token),
        None => client,
    };
    Ok(Guest {
        id: access.id,
        client,
        permit: access.permit,
    })
}

/// Path in a sandbox, and the user that accesses it.
#[derive(Deserialize)]
pub(crate) struct FileQuery {
    path: String,
    user: Option<String>,
    /// For writes: modification time of the file that the user edited. The write fails if the file
    /// has another time. Empty if the file must not exist.
    unless_changed_since: Option<String>,
}

impl FileQuery {
    fn user(&self) -> &str {
        self.user.as_deref().unwrap_or(DEFAULT_USER)
    }
}

/// Returns the path if it is valid.
fn check_path(path: &str) -> Result<&str, Refusal> {
    if path.starts_with('/') && path.len() <= MAX_PATH && !path.contains('\0') {
        return Ok(path);
    }
    Err(Refusal::invalid(
        "`path` must be an absolute path of at most 4096 bytes",
    ))
}

/// Entry of a directory.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    name: String,
    path: String,
    /// `file`, `directory`, `symlink` (without a target) or `other`.
    kind: &'static str,
    size: u64,
    mode: u32,
    permissions: String,
    owner: String,
    group: String,
    modified: String,
    symlink_target: Option<String>,
    /// True if the name is not UTF-8. Such entries cannot be changed here.
    is_binary_name: bool,
}

impl From<EntryInfo> for Entry {
    fn from(info: EntryInfo) -> Self {
        let bounded = |text: String| text.chars().take(MAX_PATH).collect::<String>();
        Self {
            kind: match info.kind {
                EntryKind::File => "file",
                EntryKind::Directory => "directory",
                EntryKind::Symlink => "symlink",
                EntryKind::Other => "other",
            },
            name: bounded(info.name),
            path: bounded(info.path),
            size: info.size.parse().unwrap_or(0),
            mode: info.mode,
            permissions: bounded(info.permissions),
            owner: bounded(info.owner),
            group: bounded(info.group),
            modified: bounded(info.modified_time),
            is_binary_name: info.path_bytes.is_some(),
            symlink_target: info.symlink_target.map(bounded),
        }
    }
}

/// Limits the time of a call to an agent.
pub(crate) async fn limited<T>(
    call: impl Future<Output = Result<T, jiffy_agent_client::ClientError>>,
) -> Result<T, Refusal> {
    match timeout(CALL_LIMIT, call).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(Refusal::new(
            StatusCode::GATEWAY_TIMEOUT,
            "guest_error",
            "the agent in the sandbox did not answer in time",
        )),
    }
}

/// `GET /guest/{id}/entries`: lists a directory.
pub(crate) async fn list(
    State(console): State<Console>,
    Extension(caller): Extension<Caller>,
    Extension(names): Extension<CallNames>,
    Path(id): Path<String>,
    Query(query): Query<FileQuery>,
) -> Result<Json<serde_json::Value>, Refusal> {
    let path = check_path(&query.path)?;
    names.set_paths(&id, &[path]);
    let guest = open(&console.app, &caller, &id)?;
    let entries = limited(guest.client.list_dir(path, Some(query.user()), 1)).await?;
    let entries: Vec<Entry> = entries.into_iter().map(Entry::from).collect();
    Ok(Json(json!({ "entries": entries })))
}

/// `DELETE /guest/{id}/entries`: removes a file, or a directory with its content.
pub(crate) async fn remove(
    State(console): State<Console>,
    Extension(caller): Extension<Caller>,
    Extension(names): Extension<CallNames>,
    Path(id): Path<String>,
    Query(query): Query<FileQuery>,
) -> Result<StatusCode, Refusal> {
    let path = check_path(&query.path)?;
    names.set_paths(&id, &[path]);
    let guest = open(&console.app, &caller, &id)?;
    limited(guest.client.remove(path, Some(query.user()))).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Body of a call that creates a directory.
#[derive(Deserialize)]
pub(crate) struct NewDirectory {
    path: String,
    user: Option<String>,
}

/// `POST /guest/{id}/directories`: creates a directory and missing parents.
pub(crate) async fn make_directory(
    State(console): State<Console>,
    Extension(caller): Extension<Caller>,
    Extension(names): Extension<CallNames>,
    Path(id): Path<String>,
    Json(body): Json<NewDirectory>,
) -> Result<StatusCode, Refusal> {
    let path = check_path(&body.path)?;
    names.set_paths(&id, &[path]);
    let user = body.user.as_deref().unwrap_or(DEFAULT_USER);
    let guest = open(&console.app, &caller, &id)?;
    limited(guest.client.make_dir(path, Some(user))).await?;
    Ok(StatusCode::CREATED)
}

/// Body of a call that renames an entry.
#[derive(Deserialize)]
pub(crate) struct Rename {
    from: String,
    to: String,
    user: Option<String>,
}

/// `POST /guest/{id}/moves`: renames an entry, unless the new path exists.
pub(crate) async fn rename(
    State(console): State<Console>,
    Extension(caller): Extension<Caller>,
    Extension(names): Extension<CallNames>,
    Path(id): Path<String>,
    Json(body): Json<Rename>,
) -> Result<StatusCode, Refusal> {
    let (from, to) = (check_path(&body.from)?, check_path(&body.to)?);
    names.set_paths(&id, &[from, to]);
    let user = body.user.as_deref().unwrap_or(DEFAULT_USER);
    let guest = open(&console.app, &caller, &id)?;
    if limited(guest.client.stat(to, Some(user))).await.is_ok() {
        let message = format!("{to} exists: choose another name");
        return Err(Refusal::new(
            StatusCode::CONFLICT,
            "already_exists",
            message,
        ));
    }
    limited(guest.client.rename(from, to, Some(user))).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `GET /guest/{id}/file`: content of a file, for display in the page.
pub(crate) async fn read(
    State(console): State<Console>,
    Extension(caller): Extension<Caller>,
    Extension(names): Extension<CallNames>,
    Path(id): Path<String>,
    Query(query): Query<FileQuery>,
) -> Result<Response, Refusal> {
    let path = check_path(&query.path)?;
    names.set_paths(&id, &[path]);
    send(&console, &caller, &id, path, query.user()).await
}

/// `PUT /guest/{id}/file`: writes a file from the body as a stream.
pub(crate) async fn write(
    State(console): State<Console>,
    Extension(caller): Extension<Caller>,
    Extension(names): Extension<CallNames>,
    Path(id): Path<String>,
    Query(query): Query<FileQuery>,
    body: Body,
) -> Result<StatusCode, Refusal> {
    let path = check_path(&query.path)?;
    names.set_paths(&id, &[path]);
    let user = query.user();
    let guest = open(&console.app, &caller, &id)?;
    if let Some(expected) = &query.unless_changed_since {
        let found = limited(guest.client.stat(path, Some(user))).await.ok();
        let modified = found.map(|entry| entry.modified_time).unwrap_or_default();
        if modified != *expected {
            let message =
                format!("{path} was changed by another process: compare the versions first");
            return Err(Refusal::new(StatusCode::CONFLICT, "file_changed", message));
        }
    }
    let mut writer = guest.client.write_stream(path, Some(user));
    let mut pieces = body.into_data_stream();
    while let Some(piece) = pieces.next().await {
        // If the client disconnects, the file remains shorter than the upload.
        let piece = piece.map_err(|e| Refusal::invalid(format!("the upload was aborted: {e}")))?;
        if !piece.is_empty() {
            writer.write(piece).await?;
        }
    }
    writer.finish().await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Body of a call that requests a download.
#[derive(Deserialize)]
pub(crate) struct NewDownload {
    path: String,
}

/// `POST /guest/{id}/downloads`: returns a path that downloads a file once, within 60 s and in this
/// session. A navigation cannot carry the header of the page, and the browser cannot hold a large
/// file in memory.
pub(crate) async fn ticket(
    State(console): State<Console>,
    Extension(caller): Extension<Caller>,
    Extension(names): Extension<CallNames>,
    Extension(session): Extension<Session>,
    Path(id): Path<String>,
    Json(body): Json<NewDownload>,
) -> Result<Json<serde_json::Value>, Refusal> {
    let path = check_path(&body.path)?;
    names.set_paths(&id, &[path]);
    let guest = open(&console.app, &caller, &id)?;
    limited(guest.client.stat(path, Some(DEFAULT_USER))).await?;
    let ticket = console.codes.create_ticket(Download {
        session: session.id,
        sandbox: guest.id,
        path: path.to_owned(),
    })?;
    Ok(Json(json!({ "url": format!("/download/{ticket}") })))
}

/// `GET /download/{ticket}`: downloads a file.
pub(crate) async fn download(
    State(console): State<Console>,
    Extension(caller): Extension<Caller>,
    Extension(names): Extension<CallNames>,
    Extension(session): Extension<Session>,
    Path(ticket): Path<String>,
) -> Result<Response, Refusal> {
    let download = console.codes.take_ticket(&ticket);
    let download = download.filter(|download| download.session == session.id);
    let Some(download) = download else {
        let message = "the link was used or has expired: start the download again";
        return Err(Refusal::new(StatusCode::NOT_FOUND, "link_expired", message));
    };
    names.set_paths(&download.sandbox, &[&download.path]);
    send(
        &console,
        &caller,
        &download.sandbox,
        &download.path,
        DEFAULT_USER,
    )
    .await
}

/// Returns a file in a form that browsers do not execute.
async fn send(
    console: &Console,
    caller: &Caller,
    id: &str,
    path: &str,
    user: &str,
) -> Result<Response, Refusal> {
    let guest = open(&console.app, caller, id)?;
    let reader = limited(guest.client.read_stream(path, Some(user))).await?;
    let pieces = stream::try_unfold((reader, guest.permit), next_piece);
    let mut response = Response::new(Body::from_stream(pieces.into_stream()));
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    let name = path.rsplit('/').next().unwrap_or_default();
    let name = utf8_percent_encode(name, NON_ALPHANUMERIC);
    let disposition = format!("attachment; filename*=UTF-8''{name}");
    if let Ok(disposition) = HeaderValue::try_from(disposition) {
        headers.insert(CONTENT_DISPOSITION, disposition);
    }
    Ok(response)
}

/// File that is sent to the browser. The permit is held until the end of the file.
type Transfer = (FileReader, Option<ExchangePermit>);

async fn next_piece(mut transfer: Transfer) -> io::Result<Option<(Bytes, Transfer)>> {
    let piece = transfer.0.next().await.map_err(io::Error::other)?;
    Ok(piece.map(|piece| (piece, transfer)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_absolute_paths_of_linux_are_accepted() {
        assert!(check_path("/").is_ok() && check_path("/a/../b \u{202e}<x>").is_ok());
        let long = format!("/{}", "a".repeat(MAX_PATH));
        for path in ["", "a", "../etc", "/a\0b", &long] {
            assert!(check_path(path).is_err(), "{path}");
        }
    }
}
