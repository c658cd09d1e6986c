//! `POST /files/compose`: joins files that were uploaded in pieces.

use super::error::RestError;
use super::file_query::FileQuery;
use crate::body::{ReplyBody, json};
use crate::filesystem::operation;
use crate::rpc::request::{self, collect};
use crate::state::Agent;
use crate::sys;
use hyper::body::Incoming;
use hyper::{Request, Response};
use serde::Deserialize;
use std::fs::File;
use std::io;

#[derive(Debug, Deserialize)]
struct ComposeRequest {
    source_paths: Vec<String>,
    destination: String,
}

/// Appends the sources in order to a new file, which then replaces the destination; removes the
/// sources.
pub async fn answer(
    agent: &Agent,
    request: Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let user = FileQuery::of(request.uri()).admit(agent, request.headers(), "write")?;
    let body = collect(request.into_body(), 1024 * 1024).await?;
    let compose: ComposeRequest = request::parse(&body)?;
    let destination = user.resolve(&compose.destination, None);
    let failed = |what: &std::path::Path, e: &io::Error| {
        RestError::io(&format!("cannot compose '{}'", what.display()), e)
    };
    if compose.source_paths.is_empty() {
        return Err(RestError::bad("there is nothing to compose"));
    }
    if let Some(parent) = destination.parent() {
        operation::make_dirs(parent, &user).map_err(|e| failed(parent, &e))?;
    }
    let mut partial = destination.clone().into_os_string();
    partial.push(".jiffy-partial");
    let partial = std::path::PathBuf::from(partial);
    let sources: Vec<_> = compose
        .source_paths
        .iter()
        .map(|s| user.resolve(s, None))
        .collect();
    let joined = join(&sources, &partial).and_then(|()| {
        match sys::chown(&partial, user.uid, user.gid) {
            Err(e) if e.raw_os_error() != Some(libc::EPERM) => return Err((partial.clone(), e)),
            _ => {}
        }
        std::fs::rename(&partial, &destination).map_err(|e| (destination.clone(), e))
    });
    if let Err((what, e)) = joined {
        let _ = std::fs::remove_file(&partial);
        return Err(failed(&what, &e));
    }
    for source in sources.iter().filter(|s| **s != destination) {
        // A source that cannot be removed does no harm.
        let _ = std::fs::remove_file(source);
    }
    Ok(json(&serde_json::json!({
        "path": destination.to_string_lossy(),
        "name": destination.file_name().map(|n| n.to_string_lossy()),
        "type": "file",
    })))
}

fn join(
    sources: &[std::path::PathBuf],
    to: &std::path::Path,
) -> Result<(), (std::path::PathBuf, io::Error)> {
    let mut out = File::create(to).map_err(|e| (to.to_path_buf(), e))?;
    for source in sources {
        let at = |e| (source.clone(), e);
        let mut input = File::open(source).map_err(at)?;
        io::copy(&mut input, &mut out).map_err(at)?;
    }
    Ok(())
}
