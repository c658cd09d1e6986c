//! `POST /files/compose`: joins files that were uploaded in parts.
//!
//! A client uploads a large file in parts at the same time, and then requests this call.

use super::error::RestError;
use super::file_query::FileQuery;
use crate::body::{ReplyBody, json};
use crate::filesystem::operation;
use crate::rpc::request::{self, collect};
use crate::state::Agent;
use crate::sys;
use crate::users::User;
use crate::workers::{CallClass, Progress};
use hyper::body::Incoming;
use hyper::{Request, Response};
use serde::Deserialize;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Number of bytes that are copied in one step.
const COPY_BYTES: u64 = 4 << 20;

/// Request to concatenate files.
#[derive(Debug, Deserialize)]
struct ComposeRequest {
    source_paths: Vec<String>,
    destination: String,
}

/// Appends the sources in order to a new file, which then replaces the destination. Removes the
/// sources.
pub async fn answer(
    agent: &Agent,
    request: Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let lookup = FileQuery::of(request.uri()).admit(agent, request.headers(), "write")?;
    let body = collect(request.into_body(), 1024 * 1024).await?;
    let compose: ComposeRequest = request::parse(&body)?;
    if compose.source_paths.is_empty() {
        return Err(RestError::bad("the request has no sources"));
    }
    let what = format!("cannot compose '{}'", compose.destination);
    let work = move |progress: &Progress| work(&compose, &lookup.find()?, progress);
    let written = agent.workers.attempt(CallClass::Files, what, work).await?;
    Ok(json(&written))
}

/// Joins the uploaded parts to a file, and removes the parts. Runs on a worker thread.
fn work(
    compose: &ComposeRequest,
    user: &User,
    progress: &Progress,
) -> Result<serde_json::Value, RestError> {
    let destination = user.resolve(&compose.destination, None);
    progress.enter(&destination)?;
    let failed = |what: &Path, e: &io::Error| {
        RestError::io(&format!("cannot compose '{}'", what.display()), e)
    };
    if let Some(parent) = destination.parent() {
        operation::make_dirs(parent, user).map_err(|e| failed(parent, &e))?;
    }
    // The partial file is in the directory of the destination, so that the rename is atomic. Its
    // name is random, so that requests with the same destination do not share the file.
    let id = sys::random_id().map_err(|e| failed(&destination, &e))?;
    let partial = destination.with_file_name(format!(".jiffy-partial-{id}"));
    let sources: Vec<_> = compose
        .source_paths
        .iter()
        .map(|s| user.resolve(s, None))
        .collect();
    let joined = join(&sources, &partial, user, progress).and_then(|composed| {
        let renamed = std::fs::rename(&partial, &destination);
        renamed.map_err(|e| (destination.clone(), e))?;
        Ok(composed)
    });
    let composed = match joined {
        Ok(composed) => composed,
        Err((what, e)) => {
            // The sources are unchanged, so that the client can repeat the request.
            let _ = std::fs::remove_file(&partial);
            return Err(failed(&what, &e));
        }
    };
    for source in &sources {
        // A source may be the destination under any path, and has then been replaced.
        let is_composed = |found: Metadata| (found.dev(), found.ino()) == composed;
        if std::fs::symlink_metadata(source).is_ok_and(|found| !is_composed(found)) {
            // Ignore the error: the composed file is complete.
            let _ = std::fs::remove_file(source);
        }
    }
    Ok(serde_json::json!({
        "path": destination.to_string_lossy(),
        "name": destination.file_name().map(|n| n.to_string_lossy()),
        "type": "file",
    }))
}

/// Writes the sources to the new file `to`, which belongs to the user. Returns its device and
/// inode.
fn join(
    sources: &[PathBuf],
    to: &Path,
    user: &User,
    progress: &Progress,
) -> Result<(u64, u64), (PathBuf, io::Error)> {
    let at = |e| (to.to_path_buf(), e);
    let mut out = File::create_new(to).map_err(at)?;
    for source in sources {
        let at = |e| (source.clone(), e);
        let mut input = sys::open_regular(source, File::options().read(true)).map_err(at)?;
        // Copies in steps, each of which counts as progress.
        while io::copy(&mut (&mut input).take(COPY_BYTES), &mut out).map_err(at)? > 0 {
            progress.advance();
        }
    }
    sys::set_owner(&out, user.uid, user.gid).map_err(at)?;
    let found = out.metadata().map_err(at)?;
    Ok((found.dev(), found.ino()))
}
