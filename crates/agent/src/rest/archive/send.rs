//! `GET /archive`: files and directories as a tar archive.

use super::{ArchiveQuery, MAX_QUEUED_CHUNKS, resolve};
use crate::body::{BodySource, ReplyBody};
use crate::rest::error::RestError;
use crate::state::Agent;
use crate::workers::{CallClass, Progress};
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

/// Size of the chunks in which an archive is sent, in bytes.
const CHUNK: usize = 64 * 1024;
/// Maximum number of paths of one request.
const MAX_PATHS: usize = 1000;
/// Operation, for errors.
const WHAT: &str = "cannot send an archive";

/// Sends the files at the paths in the query.
pub async fn answer(
    agent: &Agent,
    request: &Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let query = ArchiveQuery::of(request.uri());
    let lookup = query.lookup(agent);
    if query.paths.is_empty() {
        return Err(RestError::bad("the query has no path"));
    }
    if query.paths.len() > MAX_PATHS {
        return Err(RestError::bad(format!("more than {MAX_PATHS} paths")));
    }
    // All paths are checked before the response begins, so that a missing file has an error status.
    let find = move |progress: &Progress| {
        let user = lookup.find()?;
        let paths = query.paths.iter().map(|path| resolve(&user, path));
        paths.map(|path| tree(path, progress)).collect()
    };
    let what = "cannot read files for an archive";
    let trees: Vec<_> = agent
        .workers
        .attempt::<_, RestError>(CallClass::Files, what, find)
        .await?;
    stream(agent, PackOptions::TREE, move |packer| {
        trees
            .iter()
            .try_for_each(|(path, name)| packer.add(path, name))
    })
}

/// Returns the path of a file tree and its name in the archive.
fn tree(path: PathBuf, progress: &Progress) -> Result<(PathBuf, Vec<u8>), RestError> {
    progress.enter(&path)?;
    let found = std::fs::metadata(&path)
        .map_err(|e| RestError::io(&format!("cannot read '{}'", path.display()), &e))?;
    let name = name_of(&path)
        .map_err(|e| RestError::io(&format!("cannot resolve '{}'", path.display()), &e))?;
    // A path without a name, such as `dir/.`, must be a directory.
    if name == b"." && !found.is_dir() {
        return Err(RestError::bad(format!(
            "'{}' is not a directory",
            path.display()
        )));
    }
    Ok((path, name))
}

/// Returns the name of a file tree in its archive: the last component of the path, or `.` if it has
/// no name (`/`, `dir/.`).
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

/// Sends the archive that `fill` writes. If an error occurs, the connection is broken, so that a
/// client does not mistake a part for the whole archive. The reason is written to the console.
pub fn stream(
    agent: &Agent,
    contents: PackOptions,
    fill: impl FnOnce(&mut Packer<ArchiveWriter>) -> Result<(), ArchiveError> + Send + 'static,
) -> Result<Response<ReplyBody>, RestError> {
    let (sender, receiver) = mpsc::channel(MAX_QUEUED_CHUNKS);
    // The second sender reports a failure of the worker, which owns the first sender.
    let failures = sender.clone();
    let work = move |progress: &Progress| {
        let writer = ArchiveWriter::new(sender, progress.clone());
        let mut packer = Packer::new(writer, contents);
        fill(&mut packer).and_then(|()| packer.finish().map(drop))
    };
    let workers = agent.workers.clone();
    tokio::task::spawn_local(async move {
        let outcome = workers.run(CallClass::Archive, WHAT, work).await;
        let failure = match outcome {
            // The archive is complete, or the client has disconnected.
            Ok(Ok(()) | Err(ArchiveError::Send(_))) => return,
            Ok(Err(e)) => io::Error::other(e),
            Err(e) => e.into(),
        };
        eprintln!("jiffy-agent: {WHAT}: {failure}");
        // Ignore the error: the client has disconnected.
        let _ = failures.send(Err(failure)).await;
    });
    let mut response = Response::new(ReplyBody::Stream(Box::new(ArchiveStream(receiver))));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/x-tar"),
    );
    Ok(response)
}

/// Writing end of a stream. The bytes are sent to the connection in chunks.
pub struct ArchiveWriter {
    sender: mpsc::Sender<io::Result<Bytes>>,
    progress: Progress,
    /// Bytes of the next chunk.
    piece: BytesMut,
}

impl ArchiveWriter {
    fn new(sender: mpsc::Sender<io::Result<Bytes>>, progress: Progress) -> Self {
        Self {
            sender,
            progress,
            piece: BytesMut::new(),
        }
    }
}

impl Write for ArchiveWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.piece.capacity() == 0 {
            self.piece.reserve(CHUNK);
        }
        self.progress.advance();
        // `flush` empties a full piece, so there is always space for at least one byte.
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
        let send = || self.sender.blocking_send(Ok(piece));
        let sent = self.progress.wait_for_client(send);
        sent.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// Reading end of a stream.
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
