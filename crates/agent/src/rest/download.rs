//! `GET /files`: sends a file, or a range of its bytes.

use super::error::RestError;
use super::file_query::FileQuery;
use super::range::{self, ByteRange};
use crate::body::ReplyBody;
use crate::filesystem::request_path::RequestPath;
use crate::state::Agent;
use crate::workers::{CallClass, ChunkSource, Progress, WorkerBody};
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Size of the first chunk in bytes. A single call of a worker reads a file that fits in it.
const FIRST_CHUNK_BYTES: usize = 64 * 1024;
/// Maximum size of later chunks.
const CHUNK_BYTES: usize = 256 * 1024;

/// Parts of the request that determine the response.
struct DownloadRequest {
    /// Header `Range`.
    range: Option<String>,
    /// Set if the client accepts only gzip.
    wants_gzip: bool,
    /// Set for HEAD: the response has no body.
    head_only: bool,
}

/// An opened file and the beginning of its response.
struct Download {
    response: Response<Vec<u8>>,
    /// Source of further chunks, and the length of the whole body if known.
    rest: Option<(FileSource, Option<u64>)>,
}

/// Sends a file or a range of it.
pub async fn answer(
    agent: &Agent,
    request: &Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let query = FileQuery::of(request.uri());
    let lookup = query.admit(agent, request.headers(), "read")?;
    let path = query.path().unwrap_or(RequestPath::Text(String::new()));
    let text = |name| request.headers().get(name).and_then(|v| v.to_str().ok());
    let request = DownloadRequest {
        range: text(header::RANGE).map(str::to_owned),
        // Most HTTP libraries list gzip among other encodings by default. A client that lists only
        // gzip requires it.
        wants_gzip: text(header::ACCEPT_ENCODING).is_some_and(|v| v.trim() == "gzip"),
        head_only: request.method() == Method::HEAD,
    };
    let what = format!("cannot read '{}'", path.display());
    let work = move |progress: &Progress| {
        let path = path.resolve_existing(&lookup.find()?, progress)?;
        open(&path, &request, progress)
    };
    let call = agent.workers.attempt(CallClass::Files, what.clone(), work);
    let Download { response, rest } = call.await?;
    let (head, first) = response.into_parts();
    let body = match rest {
        None if first.is_empty() => ReplyBody::empty(),
        None => ReplyBody::whole(first),
        Some((source, length)) => {
            let first = Some(Bytes::from(first)).filter(|first| !first.is_empty());
            let body = WorkerBody::new(&agent.workers, what, first, source, length);
            ReplyBody::Stream(Box::new(body))
        }
    };
    Ok(Response::from_parts(head, body))
}

/// Opens the file, and reads its first chunk unless the response is compressed.
fn open(
    path: &Path,
    request: &DownloadRequest,
    progress: &Progress,
) -> Result<Download, RestError> {
    // `O_NONBLOCK`, because opening a named pipe would wait for its other end.
    let mut file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(|e| RestError::io(&format!("cannot open '{}'", path.display()), &e))?;
    let failed = |e: &io::Error| RestError::io(&format!("cannot read '{}'", path.display()), e);
    let found = file
        .metadata()
        .map_err(|e| RestError::io(&format!("cannot stat '{}'", path.display()), &e))?;
    if !found.is_file() {
        return Err(RestError::bad(format!(
            "'{}' is not a regular file",
            path.display()
        )));
    }
    // Files in /proc report the size 0 but have content. Their end is detected by reading.
    let sized = found.len() > 0;
    let range = if sized {
        range::parse(request.range.as_deref(), found.len())
    } else {
        ByteRange::Whole
    };
    let mut response = Response::new(Vec::new());
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    let length = match range {
        ByteRange::Unsatisfiable => {
            return Err(RestError::new(
                StatusCode::RANGE_NOT_SATISFIABLE,
                format!("'{}' has {} bytes", path.display(), found.len()),
            ));
        }
        ByteRange::Whole => found.len(),
        ByteRange::Part(first, length) => {
            let shown = format!("bytes {first}-{}/{}", first + length - 1, found.len());
            if let Ok(value) = HeaderValue::from_str(&shown) {
                headers.insert(header::CONTENT_RANGE, value);
            }
            file.seek(SeekFrom::Start(first)).map_err(|e| failed(&e))?;
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            length
        }
    };
    let zip = request.wants_gzip && range == ByteRange::Whole && sized;
    if zip {
        response
            .headers_mut()
            .insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    if request.head_only {
        return Ok(Download {
            response,
            rest: None,
        });
    }
    if zip {
        let encoder = Some(GzEncoder::new(Vec::new(), Compression::fast()));
        let rest = Some((FileSource::Gzip { file, encoder }, None));
        return Ok(Download { response, rest });
    }
    let limit = if sized {
        usize::try_from(length).map_or(FIRST_CHUNK_BYTES, |l| l.min(FIRST_CHUNK_BYTES))
    } else {
        FIRST_CHUNK_BYTES
    };
    let first = response.body_mut();
    first.reserve(limit);
    // Some files in /proc can be opened but not read. They count as empty.
    match (&file).take(limit as u64).read_to_end(first) {
        Err(e) if sized => return Err(failed(&e)),
        _ => progress.advance(),
    }
    let is_complete = if sized {
        first.len() as u64 == length
    } else {
        first.len() < limit
    };
    let rest = (!is_complete).then(|| (FileSource::Plain(file), sized.then_some(length)));
    Ok(Download { response, rest })
}

/// Content of a file.
enum FileSource {
    Plain(File),
    Gzip {
        file: File,
        encoder: Option<GzEncoder<Vec<u8>>>,
    },
}

impl ChunkSource for FileSource {
    fn next_chunk(&mut self, progress: &Progress) -> io::Result<Option<Bytes>> {
        let (file, encoder) = match self {
            Self::Plain(file) => return next_piece(file, CHUNK_BYTES),
            Self::Gzip { file, encoder } => (file, encoder),
        };
        while let Some(open) = encoder {
            match next_piece(file, FIRST_CHUNK_BYTES)? {
                None => {
                    let rest = encoder.take().map(GzEncoder::finish).transpose()?;
                    return Ok(rest.map(Bytes::from));
                }
                Some(piece) => open.write_all(&piece)?,
            }
            progress.advance();
            // Small pieces of compressed output are collected, since each piece is a call of a
            // worker.
            if open.get_ref().len() >= FIRST_CHUNK_BYTES / 4 {
                return Ok(Some(Bytes::from(std::mem::take(open.get_mut()))));
            }
        }
        Ok(None)
    }
}

/// Content of a file without compression. Uploads read their spooled files through this source.
pub struct PlainFile(pub File);

impl ChunkSource for PlainFile {
    fn next_chunk(&mut self, _: &Progress) -> io::Result<Option<Bytes>> {
        next_piece(&mut self.0, CHUNK_BYTES)
    }
}

/// Reads at most `limit` bytes. Returns `None` at the end of the file.
fn next_piece(file: &mut File, limit: usize) -> io::Result<Option<Bytes>> {
    // The buffer is not zeroed.
    let mut chunk = Vec::with_capacity(limit);
    let n = Read::take(file, limit as u64).read_to_end(&mut chunk)?;
    Ok((n > 0).then(|| chunk.into()))
}
