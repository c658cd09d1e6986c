//! `PUT /archive`: unpacks a tar archive.

use super::{ArchiveQuery, MAX_QUEUED_CHUNKS, archive_permit, resolve};
use crate::body::{ReplyBody, json};
use crate::filesystem::operation;
use crate::rest::error::RestError;
use crate::rpc::request;
use crate::state::Agent;
use crate::users::Users;
use bytes::{Buf, Bytes};
use flate2::read::MultiGzDecoder;
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode, header};
use jiffy_archive::{ArchiveError, UnpackOptions, UnpackOwner, UnpackStats, unpack};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use tokio::sync::mpsc;

/// Unpacks the request's archive beneath the query's path.
pub async fn answer(
    agent: &Agent,
    request: Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let query = ArchiveQuery::of(request.uri());
    let user = query.user(agent)?;
    let [path] = &query.paths[..] else {
        return Err(RestError::bad("the query must name one path"));
    };
    let path = resolve(&user, path);
    let rules = UnpackOptions {
        owner: match &query.owner {
            Some(text) if text == "@" => UnpackOwner::Fixed(user.uid, user.gid),
            Some(text) => owner(text)?,
            None => UnpackOwner::Archive,
        },
        mode: query.mode.as_deref().map(mode).transpose()?,
        confined: false,
        rename: None,
        max_bytes: None,
    };
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
    let failed = |e: &io::Error| RestError::io(&format!("cannot open '{}'", path.display()), e);
    operation::make_dirs(&path, &user).map_err(|e| failed(&e))?;
    let root = File::open(&path).map_err(|e| failed(&e))?;
    let room = archive_permit(agent).await?;

    let (sender, receiver) = mpsc::channel(MAX_QUEUED_CHUNKS);
    let work = tokio::task::spawn_blocking(move || {
        let _room = room;
        let pieces = ArchiveReader::new(receiver);
        match gzip {
            true => unpack(MultiGzDecoder::new(pieces), root.as_fd(), &rules),
            false => unpack(pieces, root.as_fd(), &rules),
        }
    });
    let sent = forward(request.into_body(), sender).await;
    let outcome = work.await.map_err(|e| {
        RestError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("cannot unpack: {e}"),
        )
    })?;
    sent?;
    let UnpackStats { entries, bytes } = outcome.map_err(|e| refusal(&e))?;
    Ok(json(
        &serde_json::json!({ "entries": entries, "bytes": bytes }),
    ))
}

/// Hands the body to the thread, which may have had enough of it.
async fn forward(
    body: &mut Incoming,
    sender: mpsc::Sender<Option<Bytes>>,
) -> Result<(), RestError> {
    while let Some(piece) = request::next(body).await? {
        if sender.send(Some(piece)).await.is_err() {
            return Ok(());
        }
    }
    // The thread may be done without it.
    let _ = sender.send(None).await;
    Ok(())
}

fn refusal(error: &ArchiveError) -> RestError {
    match error {
        ArchiveError::File { source, .. } => {
            let status = RestError::io("", source).status;
            RestError::new(status, error.to_string())
        }
        _ => RestError::bad(error.to_string()),
    }
}

/// `user`, `user:group`, by name or number. A number alone is the group's, too, as Docker has it.
fn owner(text: &str) -> Result<UnpackOwner, RestError> {
    if let Ok(id) = text.parse::<u32>() {
        return Ok(UnpackOwner::Fixed(id, id));
    }
    let user = Users::load().find(text);
    let user = user.ok_or_else(|| RestError::bad(format!("unknown owner '{text}'")))?;
    Ok(UnpackOwner::Fixed(user.uid, user.gid))
}

fn mode(text: &str) -> Result<u32, RestError> {
    let mode = u32::from_str_radix(text, 8).ok();
    mode.filter(|mode| *mode <= 0o7777)
        .ok_or_else(|| RestError::bad(format!("mode '{text}' is no number of octal digits")))
}

/// The thread's end of the body. One that breaks off is no end of an archive.
struct ArchiveReader {
    receiver: mpsc::Receiver<Option<Bytes>>,
    piece: Bytes,
    ended: bool,
}

impl ArchiveReader {
    fn new(receiver: mpsc::Receiver<Option<Bytes>>) -> Self {
        Self {
            receiver,
            piece: Bytes::new(),
            ended: false,
        }
    }
}

impl Read for ArchiveReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && !self.ended {
            match self.receiver.blocking_recv() {
                Some(Some(piece)) => self.piece = piece,
                Some(None) => self.ended = true,
                None => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
        let n = buffer.len().min(self.piece.len());
        self.piece.copy_to_slice(&mut buffer[..n]);
        Ok(n)
    }
}
