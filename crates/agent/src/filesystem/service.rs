//! Handlers of the RPC service `filesystem.Filesystem`. Each runs its calls on the file system in a
//! worker.

use super::listing::Listing;
use super::message::{
    EntryInfo, ListRequest, MoveRequest, PathRequest, WatchRequest, WatcherRequest,
};
use super::request_path::RequestPath;
use super::watch::DirectoryWatch;
use super::watcher::WatchStream;
use super::{entry, operation};
use crate::body::{ReplyBody, json, json_body};
use crate::rpc::request::{self, CallInfo};
use crate::rpc::{RpcCode, RpcError};
use crate::state::Agent;
use crate::users::{User, Users};
use crate::workers::{CallClass, ChunkSource, Progress, WorkerBody};
use hyper::Response;
use hyper::body::Incoming;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Handles a unary method.
pub async fn unary(
    agent: &Agent,
    method: &str,
    call: CallInfo,
    body: &mut Incoming,
) -> Result<Response<ReplyBody>, RpcError> {
    match method {
        "Stat" => {
            let path = request::unary::<PathRequest>(body).await?.path();
            let found = on_existing(agent, &call, "stat", path, |_, path, _| stat(&path)).await?;
            Ok(json(&json!({ "entry": found })))
        }
        "ListDir" => list(agent, &call, request::unary(body).await?).await,
        "MakeDir" => {
            let path = request::unary::<PathRequest>(body).await?.path();
            let work = move |progress: &Progress, user: User, path: RequestPath| {
                let path = path.resolve(&user);
                progress.enter(&path)?;
                make_dir(&path, &user)
            };
            let entry = on_path(agent, &call, "create", path, work).await?;
            Ok(json(&json!({ "entry": entry })))
        }
        "Remove" => {
            let path = request::unary::<PathRequest>(body).await?.path();
            on_existing(agent, &call, "remove", path, |progress, path, _| {
                operation::remove(&path, progress)
                    .map_err(|e| RpcError::io(&format!("cannot remove '{}'", path.display()), &e))
            })
            .await?;
            Ok(json(&json!({})))
        }
        "Move" => {
            let request: MoveRequest = request::unary(body).await?;
            let source = RequestPath::new(request.source, request.source_bytes);
            let target = RequestPath::new(request.destination, request.destination_bytes);
            let moved = on_existing(agent, &call, "move", source, move |progress, from, user| {
                let to = target.resolve(&user);
                progress.enter(&to)?;
                rename(&from, &to, &user)
            })
            .await?;
            Ok(json(&json!({ "entry": moved })))
        }
        "CreateWatcher" => {
            let watch = watch(agent, &call, request::unary(body).await?).await?;
            let id = agent.watchers.create(&agent.workers, watch)?;
            Ok(json(&json!({ "watcherId": id })))
        }
        "GetWatcherEvents" => {
            let request: WatcherRequest = request::unary(body).await?;
            let events = agent.watchers.take(&request.watcher_id).await?;
            Ok(json(&json!({ "events": events })))
        }
        // "RemoveWatcher": the server rejects other methods.
        _ => {
            let request: WatcherRequest = request::unary(body).await?;
            agent.watchers.remove(&request.watcher_id)?;
            Ok(json(&json!({})))
        }
    }
}

/// Handles `WatchDir`.
pub async fn watch_dir(
    agent: &Agent,
    call: CallInfo,
    body: &mut Incoming,
) -> Result<ReplyBody, RpcError> {
    let request: WatchRequest = request::single(body).await?;
    let watch = watch(agent, &call, request).await?;
    let stream = WatchStream::new(&agent.workers, watch, call.keepalive, call.timeout)
        .map_err(|e| RpcError::io("cannot watch", &e))?;
    Ok(ReplyBody::Stream(Box::new(stream)))
}

/// Runs `work` on a path in a worker, with the user of the call.
async fn on_path<T: Send + 'static>(
    agent: &Agent,
    call: &CallInfo,
    action: &str,
    path: RequestPath,
    work: impl FnOnce(&Progress, User, RequestPath) -> Result<T, RpcError> + Send + 'static,
) -> Result<T, RpcError> {
    let lookup = agent.lookup(call.user.as_deref());
    let what = format!("cannot {action} '{}'", path.display());
    let work = move |progress: &Progress| work(progress, lookup.find()?, path);
    agent.workers.attempt(CallClass::Files, what, work).await
}

/// Runs `work` as [`on_path`] does, on the resolved path of an existing file.
async fn on_existing<T: Send + 'static>(
    agent: &Agent,
    call: &CallInfo,
    action: &str,
    path: RequestPath,
    work: impl FnOnce(&Progress, PathBuf, User) -> Result<T, RpcError> + Send + 'static,
) -> Result<T, RpcError> {
    let work = move |progress: &Progress, user: User, path: RequestPath| {
        let path = path.resolve_existing(&user, progress)?;
        work(progress, path, user)
    };
    on_path(agent, call, action, path, work).await
}

/// Handles `ListDir`. A short listing is sent in one piece, a longer one in slices.
async fn list(
    agent: &Agent,
    call: &CallInfo,
    request: ListRequest,
) -> Result<Response<ReplyBody>, RpcError> {
    let depth = request.depth;
    let path = RequestPath::new(request.path, request.path_bytes);
    let what = format!("cannot list '{}'", path.display());
    let work = move |progress: &Progress, path: PathBuf, _| {
        // The first piece is encoded in the same call of a worker, because most listings are short.
        let mut listing = Listing::new(&path, depth, progress)?;
        let first = listing
            .next_chunk(progress)
            .map_err(|e| RpcError::io("cannot encode a listing", &e))?;
        Ok((first.unwrap_or_default(), listing))
    };
    let (first, listing) = on_existing(agent, call, "list", path, work).await?;
    Ok(json_body(if listing.is_ended() {
        ReplyBody::whole(first)
    } else {
        let body = WorkerBody::new(&agent.workers, what, Some(first), listing, None);
        ReplyBody::Stream(Box::new(body))
    }))
}

/// Starts to watch a directory.
async fn watch(
    agent: &Agent,
    call: &CallInfo,
    request: WatchRequest,
) -> Result<DirectoryWatch, RpcError> {
    let (recursive, include_entry) = (request.recursive, request.include_entry);
    let path = RequestPath::new(request.path, request.path_bytes);
    on_existing(agent, call, "watch", path, move |progress, path, _| {
        let what = format!("cannot watch '{}'", path.display());
        let found = std::fs::metadata(&path).map_err(|e| RpcError::io(&what, &e))?;
        if !found.is_dir() {
            return Err(RpcError::new(
                RpcCode::InvalidArgument,
                format!("'{}' is not a directory", path.display()),
            ));
        }
        DirectoryWatch::new(&path, recursive, include_entry, progress)
    })
    .await
}

/// Describes the entry at `path`.
fn stat(path: &Path) -> Result<EntryInfo, RpcError> {
    entry::describe(path, &Users::load())
        .map_err(|e| RpcError::io(&format!("cannot stat '{}'", path.display()), &e))
}

/// Creates a directory with its parents.
fn make_dir(path: &Path, user: &User) -> Result<EntryInfo, RpcError> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(RpcError::new(
            RpcCode::AlreadyExists,
            format!("directory '{}' exists", path.display()),
        )),
        Ok(_) => Err(RpcError::new(
            RpcCode::InvalidArgument,
            format!("'{}' exists and is not a directory", path.display()),
        )),
        Err(_) => {
            operation::make_dirs(path, user)
                .map_err(|e| RpcError::io(&format!("cannot create '{}'", path.display()), &e))?;
            stat(path)
        }
    }
}

/// Moves a file or directory.
fn rename(source: &Path, destination: &Path, user: &User) -> Result<EntryInfo, RpcError> {
    let failed = |e: &std::io::Error| {
        RpcError::io(
            &format!(
                "cannot move '{}' to '{}'",
                source.display(),
                destination.display()
            ),
            e,
        )
    };
    std::fs::symlink_metadata(source).map_err(|e| failed(&e))?;
    // As in E2B's envd, a move creates the parent directories of its destination.
    if let Some(parent) = destination.parent() {
        operation::make_dirs(parent, user).map_err(|e| failed(&e))?;
    }
    std::fs::rename(source, destination).map_err(|e| failed(&e))?;
    stat(destination)
}
