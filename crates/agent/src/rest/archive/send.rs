//! `GET /archive`: files and directories as a tar archive.

use super::{ArchiveQuery, MAX_QUEUED_CHUNKS, archive_permit, resolve};
use crate::body::{BodySource, ReplyBody};
use crate::rest::error::RestError;
use crate::state::Agent;
use bytes::{Bytes, BytesMut};
use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::{Request, Response};
use jiffy_archive::{ArchiveError, PackOptions, Packer};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::task::{Context, Poll};
use tokio::sync::mpsc;

const CHUNK: usize = 64 * 1024;
/// Most paths of one request.
const MAX_PATHS: usize = 1000;

/// Sends the files at the query's paths.
pub async fn answer(
    agent: &Agent,
    request: &Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let query = ArchiveQuery::of(request.uri());
    let user = query.user(agent)?;
    if query.paths.is_empty() {
        return Err(RestError::bad("the query names no path"));
    }
    if query.paths.len() > MAX_PATHS {
        return Err(RestError::bad(format!("more than {MAX_PATHS} paths")));
    }
    let mut trees = Vec::new();
    for path in query.paths.iter().map(|path| resolve(&user, path)) {
        let found = std::fs::metadata(&path)
            .map_err(|e| RestError::io(&format!("cannot read '{}'", path.display()), &e))?;
        let name = name_of(&path).map_err(|e| RestError::io("cannot tell its name", &e))?;
        // `file/` and `file/.` are no files.
        if name == b"." && !found.is_dir() {
            return Err(RestError::bad(format!(
                "'{}' is not a directory",
                path.display()
            )));
        }
        trees.push((path, name));
    }
    stream(agent, PackOptions::TREE, move |packer| {
        trees
            .iter()
            .try_for_each(|(path, name)| packer.add(path, name))
    })
    .await
}

/// Name of a tree in its archive: the last part of the path, or `.` if that has no name (`/`,
/// `dir/.`).
fn name_of(path: &Path) -> io::Result<Vec<u8>> {
    let bytes = path.as_os_str().as_bytes();
    let path = match bytes {
        _ if bytes.ends_with(b"/.") => return Ok(b".".to_vec()),
        _ if bytes.ends_with(b"..") => std::fs::canonicalize(path)?,
        _ => PathBuf::from(path),
    };
    Ok(path
        .file_name()
        .map_or_else(|| b".".to_vec(), |name| name.as_bytes().to_vec()))
}

/// Sends the archive that `fill` writes. When it fails midway the connection breaks, so that a
/// client never takes a part for the whole; the reason is on the console.
pub async fn stream(
    agent: &Agent,
    contents: PackOptions,
    fill: impl FnOnce(&mut Packer<ArchiveWriter>) -> Result<(), ArchiveError> + Send + 'static,
) -> Result<Response<ReplyBody>, RestError> {
    let room = archive_permit(agent).await?;
    let (sender, receiver) = mpsc::channel(MAX_QUEUED_CHUNKS);
    tokio::task::spawn_blocking(move || {
        let mut packer = Packer::new(ArchiveWriter::new(sender.clone()), contents);
        let outcome = fill(&mut packer).and_then(|()| packer.finish().map(drop));
        match outcome {
            // The reader is gone.
            Ok(()) | Err(ArchiveError::Send(_)) => {}
            Err(e) => {
                eprintln!("jiffy-agent: an archive broke off: {e}");
                let _ = sender.blocking_send(Err(io::Error::other(e)));
            }
        }
        drop(room);
    });
    let mut response = Response::new(ReplyBody::Stream(Box::new(ArchiveStream(receiver))));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/x-tar"),
    );
    Ok(response)
}

/// The thread's end: written bytes go to the connection in chunks.
pub struct ArchiveWriter {
    sender: mpsc::Sender<io::Result<Bytes>>,
    piece: BytesMut,
}

impl ArchiveWriter {
    fn new(sender: mpsc::Sender<io::Result<Bytes>>) -> Self {
        Self {
            sender,
            piece: BytesMut::new(),
        }
    }
}

impl Write for ArchiveWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.piece.capacity() == 0 {
            self.piece.reserve(CHUNK);
        }
        let n = bytes.len().min(CHUNK - self.piece.len());
        self.piece.extend_from_slice(&bytes[..n]);
        if self.piece.len() == CHUNK {
            self.flush()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        let piece = std::mem::take(&mut self.piece).freeze();
        let sent = self.sender.blocking_send(Ok(piece));
        sent.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// The connection's end.
struct ArchiveStream(mpsc::Receiver<io::Result<Bytes>>);

impl BodySource for ArchiveStream {
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        self.0.poll_recv(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_has_the_name_at_the_end_of_its_path() {
        let name = |path: &str| String::from_utf8(name_of(Path::new(path)).unwrap()).unwrap();
        assert_eq!(name("/a/b"), "b");
        assert_eq!(name("/a/b/"), "b");
        assert_eq!(name("/a/b/."), ".");
        assert_eq!(name("/"), ".");
        assert_eq!(name("/usr/bin/.."), "usr");
    }
}
