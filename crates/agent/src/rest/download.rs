//! `GET /files`.

use super::error::RestError;
use super::range::{self, Range};
use super::target::Query;
use crate::body::{Reply, Source};
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
) -> Result<Response<Reply>, RestError> {
    let query = Query::of(request.uri());
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
        Range::Whole
    };
    let mut response = Response::new(Reply::empty());
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/octet-stream"),
    );
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    let length = match range {
        Range::Unsatisfiable => {
            return Err(RestError::new(
                StatusCode::RANGE_NOT_SATISFIABLE,
                format!("'{}' has {} bytes", path.display(), found.len()),
            ));
        }
        Range::Whole => found.len(),
        Range::Part(first, length) => {
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
        && range == Range::Whole
        && sized;
    if zip {
        response
            .headers_mut()
            .insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    *response.body_mut() = if request.method() == Method::HEAD || length == 0 && is_empty(&mut file)
    {
        Reply::empty()
    } else if zip {
        Reply::Stream(Box::new(Zipped {
            file,
            encoder: Some(GzEncoder::new(Vec::new(), Compression::fast())),
        }))
    } else {
        Reply::Stream(Box::new(Plain {
            file,
            left: sized.then_some(length),
        }))
    };
    Ok(response)
}

/// Whether a file that says it has no bytes really has none.
fn is_empty(file: &mut File) -> bool {
    let mut byte = [0];
    let empty = matches!(file.read(&mut byte), Ok(0) | Err(_));
    empty || file.rewind().is_err()
}

struct Plain {
    file: File,
    left: Option<u64>,
}

impl Source for Plain {
    fn poll_piece(&mut self, _: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        let want = self
            .left
            .map_or(CHUNK, |left| left.min(CHUNK as u64) as usize);
        if want == 0 {
            return Poll::Ready(None);
        }
        let mut chunk = vec![0; want];
        Poll::Ready(match self.file.read(&mut chunk) {
            // Shorter than announced: the connection must break, or the client would wait for the rest.
            Ok(0) if self.left.is_some() => Some(Err(io::ErrorKind::UnexpectedEof.into())),
            Ok(0) => None,
            Ok(n) => {
                chunk.truncate(n);
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

struct Zipped {
    file: File,
    encoder: Option<GzEncoder<Vec<u8>>>,
}

impl Zipped {
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

impl Source for Zipped {
    fn poll_piece(&mut self, _: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        Poll::Ready(self.next().transpose())
    }
}
