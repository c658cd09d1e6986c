//! `PUT /archive`: unpacks a tar archive below a directory.

use super::{ArchiveQuery, MAX_QUEUED_CHUNKS, resolve};
use crate::body::{ReplyBody, json};
use crate::filesystem::operation;
use crate::rest::error::RestError;
use crate::rpc::request;
use crate::state::Agent;
use crate::users::{User, Users};
use crate::workers::{CallClass, Progress};
use bytes::{Buf, Bytes};
use flate2::read::MultiGzDecoder;
use hyper::body::Incoming;
use hyper::{Request, Response, header};
use jiffy_archive::{ArchiveError, UnpackOptions, UnpackOwner, UnpackStats, unpack};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::pin::pin;
use tokio::sync::mpsc;

/// Operation, for errors.
const WHAT: &str = "cannot unpack an archive";

/// Unpacks the archive in the request below the path in the query.
pub async fn answer(
    agent: &Agent,
    request: Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let query = ArchiveQuery::of(request.uri());
    if query.paths.len() != 1 {
        return Err(RestError::bad("the query must have exactly one path"));
    }
    let lookup = query.lookup(agent);
    let mode = query.mode.as_deref().map(mode).transpose()?;
    let encoding = request.headers().get(header::CONTENT_ENCODING);
    let gzip = match encoding.map_or(Ok(""), |v| v.to_str()).map(str::trim) {
        Ok("" | "identity") => false,
        Ok("gzip") => true,
        _ => {
            return Err(RestError::bad(
                "this content encoding is not supported, use gzip",
            ));
        }
    };
    let prepare = move |progress: &Progress| prepare(&query, &lookup.find()?, mode, progress);
    let call = agent.workers.attempt(CallClass::Files, WHAT, prepare);
    let (root, rules) = call.await?;

    // The bounded queue limits the client to the rate at which files are written.
    let (sender, receiver) = mpsc::channel(MAX_QUEUED_CHUNKS);
    let unpack = move |progress: &Progress| {
        let pieces = ArchiveReader::new(receiver, progress.clone());
        let unpacked = if gzip {
            unpack(MultiGzDecoder::new(pieces), root.as_fd(), &rules)
        } else {
            unpack(pieces, root.as_fd(), &rules)
        };
        unpacked.map_err(|e| unpack_error(&e))
    };
    let mut work = pin!(agent.workers.attempt(CallClass::Archive, WHAT, unpack));
    let forward = forward(request.into_body(), sender);
    let UnpackStats { entries, bytes, .. } = tokio::select! {
        // The worker may finish or fail before the end of the body.
        outcome = &mut work => outcome?,
        sent = forward => {
            // If the body is interrupted, `forward` and the worker both fail. The error of
            // `forward` is the cause, and is returned first.
            let outcome = work.await;
            sent?;
            outcome?
        }
    };
    Ok(json(
        &serde_json::json!({ "entries": entries, "bytes": bytes }),
    ))
}

/// Opens the target directory. Creates it if it does not exist.
fn prepare(
    query: &ArchiveQuery,
    user: &User,
    mode: Option<u32>,
    progress: &Progress,
) -> Result<(File, UnpackOptions), RestError> {
    let path = resolve(user, query.paths.first().map_or(&[][..], Vec::as_slice));
    progress.enter(&path)?;
    let options = UnpackOptions {
        // `@` is the user of the request.
        owner: match &query.owner {
            Some(text) if text == "@" => UnpackOwner::Fixed(user.uid, user.gid),
            Some(text) => owner(text)?,
            None => UnpackOwner::Archive,
        },
        mode,
        // Entries may be written anywhere in the sandbox, because the client may do the same.
        confined: false,
        rename: None,
        max_bytes: None,
        max_entries: None,
        layer: query.layer,
    };
    let failed = |e: &io::Error| RestError::io(&format!("cannot open '{}'", path.display()), e);
    operation::make_dirs(&path, user).map_err(|e| failed(&e))?;
    let root = File::open(&path).map_err(|e| failed(&e))?;
    Ok((root, options))
}

/// Sends the body to the worker, which may finish earlier.
async fn forward(
    body: &mut Incoming,
    sender: mpsc::Sender<Option<Bytes>>,
) -> Result<(), RestError> {
    while let Some(piece) = request::next(body).await? {
        if sender.send(Some(piece)).await.is_err() {
            return Ok(());
        }
    }
    // Ignore the error: the worker may have finished.
    let _ = sender.send(None).await;
    Ok(())
}

/// Converts an error: failures of files have the status of their cause, others are invalid
/// archives.
fn unpack_error(error: &ArchiveError) -> RestError {
    match error {
        ArchiveError::File { source, .. } => {
            let status = RestError::io("", source).status;
            RestError::new(status, error.to_string())
        }
        _ => RestError::bad(error.to_string()),
    }
}

/// Parses `user` or `user:group`, by name or number. A number without a group is also the number of
/// the group, as in Docker.
fn owner(text: &str) -> Result<UnpackOwner, RestError> {
    // The kernel reserves the largest number for "not set".
    if let Ok(id) = text.parse::<u32>()
        && id != u32::MAX
    {
        return Ok(UnpackOwner::Fixed(id, id));
    }
    let user = Users::load()
        .find(text)
        .ok_or_else(|| RestError::bad(format!("unknown owner '{text}'")))?;
    Ok(UnpackOwner::Fixed(user.uid, user.gid))
}

/// Parses permissions as an octal number.
fn mode(text: &str) -> Result<u32, RestError> {
    let mode = u32::from_str_radix(text, 8).ok();
    mode.filter(|mode| *mode <= 0o7777)
        .ok_or_else(|| RestError::bad(format!("mode '{text}' is not an octal number")))
}

/// The worker's end of the body. A body that is interrupted is an error, not the end of the
/// archive.
struct ArchiveReader {
    /// Pieces of the body, and `None` at its end. The channel closes without `None` if the body was
    /// interrupted.
    receiver: mpsc::Receiver<Option<Bytes>>,
    progress: Progress,
    /// Unread rest of the current piece.
    piece: Bytes,
    /// True after the end of the body.
    ended: bool,
}

impl ArchiveReader {
    fn new(receiver: mpsc::Receiver<Option<Bytes>>, progress: Progress) -> Self {
        Self {
            receiver,
            progress,
            piece: Bytes::new(),
            ended: false,
        }
    }
}

impl Read for ArchiveReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && !self.ended {
            let receive = || self.receiver.blocking_recv();
            match self.progress.wait_for_client(receive) {
                Some(Some(piece)) => self.piece = piece,
                Some(None) => self.ended = true,
                None => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
        self.progress.advance();
        let n = buffer.len().min(self.piece.len());
        self.piece.copy_to_slice(&mut buffer[..n]);
        Ok(n)
    }
}
