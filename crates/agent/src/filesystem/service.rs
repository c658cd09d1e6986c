//! Methods of `filesystem.Filesystem`.

use super::message::{
    EntryInfo, ListRequest, MoveRequest, PathRequest, WatchRequest, WatcherRequest,
};
use super::watch::DirectoryWatch;
use super::watcher::WatchStream;
use super::{entry, operation};
use crate::body::ReplyBody;
use crate::rpc::request::{self, CallInfo};
use crate::rpc::{RpcCode, RpcError};
use crate::state::Agent;
use crate::users::{User, Users};
use hyper::body::Incoming;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Answers a unary method.
pub async fn unary(
    agent: &Agent,
    method: &str,
    call: CallInfo,
    body: &mut Incoming,
) -> Result<Value, RpcError> {
    let user = find_user(agent, &call)?;
    match method {
        "Stat" => {
            let request: PathRequest = request::unary(body).await?;
            Ok(json!({ "entry": stat(&user.resolve(&request.path, None))? }))
        }
        "ListDir" => {
            let request: ListRequest = request::unary(body).await?;
            let path = user.resolve(&request.path, None);
            let entries = if request.depth > 1 {
                run_blocking(move || operation::list(&path, request.depth)).await?
            } else {
                operation::list(&path, 1)
            }?;
            Ok(json!({ "entries": entries }))
        }
        "MakeDir" => {
            let request: PathRequest = request::unary(body).await?;
            let path = user.resolve(&request.path, None);
            Ok(json!({ "entry": make_dir(&path, &user)? }))
        }
        "Remove" => {
            let request: PathRequest = request::unary(body).await?;
            let path = user.resolve(&request.path, None);
            let what = format!("cannot remove '{}'", path.display());
            let result = if path.is_dir() {
                run_blocking(move || operation::remove(&path)).await?
            } else {
                operation::remove(&path)
            };
            result.map_err(|e| RpcError::io(&what, &e))?;
            Ok(json!({}))
        }
        "Move" => {
            let request: MoveRequest = request::unary(body).await?;
            Ok(json!({ "entry": rename(&request, &user)? }))
        }
        "CreateWatcher" => {
            let request: WatchRequest = request::unary(body).await?;
            let id = agent.watchers.create(watch(&request, &user)?)?;
            Ok(json!({ "watcherId": id }))
        }
        "GetWatcherEvents" => {
            let request: WatcherRequest = request::unary(body).await?;
            Ok(json!({ "events": agent.watchers.take(&request.watcher_id)? }))
        }
        _ => {
            let request: WatcherRequest = request::unary(body).await?;
            agent.watchers.remove(&request.watcher_id)?;
            Ok(json!({}))
        }
    }
}

/// `WatchDir`.
pub async fn watch_dir(
    agent: &Agent,
    call: CallInfo,
    body: &mut Incoming,
) -> Result<ReplyBody, RpcError> {
    let user = find_user(agent, &call)?;
    let request: WatchRequest = request::single(body).await?;
    let watch = watch(&request, &user)?;
    let stream = WatchStream::new(watch, call.keepalive, call.timeout)
        .map_err(|e| RpcError::io("cannot watch", &e))?;
    Ok(ReplyBody::Stream(Box::new(stream)))
}

fn find_user(agent: &Agent, call: &CallInfo) -> Result<User, RpcError> {
    Ok(agent.user(call.user.as_deref())?)
}

/// Runs work that may take long where it does not hold up everything else.
async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RpcError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| RpcError::new(RpcCode::Internal, e.to_string()))
}

fn stat(path: &Path) -> Result<EntryInfo, RpcError> {
    entry::describe(path, &Users::load())
        .map_err(|e| RpcError::io(&format!("cannot stat '{}'", path.display()), &e))
}

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

fn rename(request: &MoveRequest, user: &User) -> Result<EntryInfo, RpcError> {
    let source = user.resolve(&request.source, None);
    let destination = user.resolve(&request.destination, None);
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
    std::fs::symlink_metadata(&source).map_err(|e| failed(&e))?;
    if let Some(parent) = destination.parent() {
        operation::make_dirs(parent, user).map_err(|e| failed(&e))?;
    }
    std::fs::rename(&source, &destination).map_err(|e| failed(&e))?;
    stat(&destination)
}

fn watch(request: &WatchRequest, user: &User) -> Result<DirectoryWatch, RpcError> {
    let path: PathBuf = user.resolve(&request.path, None);
    let what = format!("cannot watch '{}'", path.display());
    if !std::fs::metadata(&path)
        .map_err(|e| RpcError::io(&what, &e))?
        .is_dir()
    {
        return Err(RpcError::new(
            RpcCode::InvalidArgument,
            format!("'{}' is not a directory", path.display()),
        ));
    }
    DirectoryWatch::new(&path, request.recursive, request.include_entry)
        .map_err(|e| RpcError::io(&what, &e))
}
