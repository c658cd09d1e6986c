//! `GET /files`.

use super::error::RestError;
use super::file_query::FileQuery;
use super::range::{self, ByteRange};
use crate::body::{BodySource, ReplyBody};
use crate::state::Agent;
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::task::{Context, Poll};

const CHUNK: usize = 64 * 1024;

/// Sends a file, or part of it.
pub fn answer(
    agent: &Agent,
    request: &Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let query = FileQuery::of(request.uri());
    let user = query.admit(agent, request.headers(), "read")?;
    let asked = query.path.as_deref().unwrap_or_default();
    let path = user.resolve(asked, None);
    // Opening a named pipe would wait for its other end.
    let mut file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(&path)
        .map_err(|e| RestError::io(&format!("cannot open '{}'", path.display()), &e))?;
    let found = file
        .metadata()
        .map_err(|e| RestError::io(&format!("cannot stat '{}'", path.display()), &e))?;
    if !found.is_file() {
        return Err(RestError::bad(format!(
            "'{}' is not a regular file",
            path.display()
        )));
    }
    let text = |name| request.headers().get(name).and_then(|v| v.to_str().ok());
    // Files under /proc say 0 and have content all the same: those end where they end.
    let sized = found.len() > 0;
    let range = if sized {
        range::parse(text(header::RANGE), found.len())
    } else {
        ByteRange::Whole
    };
    let mut response = Response::new(ReplyBody::empty());
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
            file.seek(SeekFrom::Start(first))
                .map_err(|e| RestError::io("cannot seek", &e))?;
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            length
        }
    };
    // Most clients list gzip by habit, beside others; one that asks for it alone means it.
    let zip = text(header::ACCEPT_ENCODING).is_some_and(|v| v.trim() == "gzip")
        && range == ByteRange::Whole
        && sized;
    if zip {
        response
            .headers_mut()
            .insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    *response.body_mut() = if request.method() == Method::HEAD || length == 0 && is_empty(&mut file)
    {
        ReplyBody::empty()
    } else if zip {
        ReplyBody::Stream(Box::new(GzippedFile {
            file,
            encoder: Some(GzEncoder::new(Vec::new(), Compression::fast())),
        }))
    } else {
        ReplyBody::Stream(Box::new(PlainFile {
            file,
            left: sized.then_some(length),
        }))
    };
    Ok(response)
}

/// Returns true if a file of size 0 really has no bytes.
fn is_empty(file: &mut File) -> bool {
    let mut byte = [0];
    let empty = matches!(file.read(&mut byte), Ok(0) | Err(_));
    empty || file.rewind().is_err()
}

struct PlainFile {
    file: File,
    left: Option<u64>,
}

impl BodySource for PlainFile {
    fn poll_piece(&mut self, _: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        let want = self
            .left
            .map_or(CHUNK, |left| left.min(CHUNK as u64) as usize);
        if want == 0 {
            return Poll::Ready(None);
        }
        // Not zeroed first.
        let mut chunk = Vec::with_capacity(want);
        let mut piece = Read::take(&self.file, want as u64);
        Poll::Ready(match piece.read_to_end(&mut chunk) {
            // Shorter than announced: the connection must break, or the client would wait for the
            // rest.
            Ok(0) if self.left.is_some() => Some(Err(io::ErrorKind::UnexpectedEof.into())),
            Ok(0) => None,
            Ok(n) => {
                if let Some(left) = &mut self.left {
                    *left -= n as u64;
                }
                Some(Ok(chunk.into()))
            }
            Err(e) => Some(Err(e)),
        })
    }

    fn remaining(&self) -> Option<u64> {
        self.left
    }
}

struct GzippedFile {
    file: File,
    encoder: Option<GzEncoder<Vec<u8>>>,
}

impl GzippedFile {
    fn next(&mut self) -> io::Result<Option<Bytes>> {
        let mut chunk = vec![0; CHUNK];
        while let Some(encoder) = &mut self.encoder {
            let n = self.file.read(&mut chunk)?;
            if n == 0 {
                let rest = self.encoder.take().map(GzEncoder::finish).transpose()?;
                return Ok(rest.map(Bytes::from));
            }
            encoder.write_all(&chunk[..n])?;
            if encoder.get_ref().len() >= CHUNK / 4 {
                return Ok(Some(Bytes::from(std::mem::take(encoder.get_mut()))));
            }
        }
        Ok(None)
    }
}

impl BodySource for GzippedFile {
    fn poll_piece(&mut self, _: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        Poll::Ready(self.next().transpose())
    }
}
