//! `POST /files`: one file as the whole body, or several files as multipart.

mod target;

use super::download::PlainFile;
use super::error::RestError;
use super::file_query::FileQuery;
use crate::body::{ReplyBody, json};
use crate::filesystem::metadata;
use crate::filesystem::request_path::RequestPath;
use crate::rpc::request;
use crate::state::Agent;
use crate::users::UserLookup;
use crate::workers::{CallClass, Progress, WorkerBody, Workers};
use flate2::write::MultiGzDecoder;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{Request, Response, header};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use target::{Encoding, Upload, WrittenFile};

/// Maximum number of files of one request.
const MAX_FILES: usize = 10_000;

/// Writes the files of a request.
pub async fn answer(
    agent: &Agent,
    request: Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let query = FileQuery::of(request.uri());
    let lookup = query.admit(agent, request.headers(), "write")?;
    let metadata = metadata::from_headers(request.headers()).map_err(RestError::bad)?;
    let text = |name| request.headers().get(name).and_then(|v| v.to_str().ok());
    let encoding = match text(header::CONTENT_ENCODING).map(str::trim) {
        None | Some("" | "identity") => Encoding::Identity,
        Some("gzip") => Encoding::Gzip,
        Some(other) => {
            return Err(RestError::bad(format!(
                "content encoding '{other}' is not supported, use gzip"
            )));
        }
    };
    let kind = text(header::CONTENT_TYPE).unwrap_or_default().to_owned();
    let context = ReceivedUpload {
        workers: agent.workers.clone(),
        lookup,
        path: query.path(),
        metadata,
    };
    let written = if kind.starts_with("multipart/form-data") {
        let boundary = multer::parse_boundary(&kind)
            .map_err(|e| RestError::bad(format!("malformed multipart: {e}")))?;
        let body = request.into_body();
        // Parts are found in decoded bytes, so a compressed body must be decoded first.
        match encoding {
            Encoding::Gzip => context.zipped_multipart(body, boundary).await?,
            Encoding::Identity => {
                let parts = multer::Multipart::new(body.into_data_stream(), boundary);
                context.multipart(parts).await?
            }
        }
    } else {
        context.plain(request.into_body(), encoding).await?
    };
    Ok(json(&written))
}

/// Parts of an upload request that do not depend on the format of its body.
struct ReceivedUpload {
    workers: Workers,
    lookup: UserLookup,
    path: Option<RequestPath>,
    metadata: BTreeMap<String, String>,
}

impl ReceivedUpload {
    /// Creates an upload to `path`.
    fn upload(&self, path: RequestPath, encoding: Encoding) -> Upload {
        Upload::new(&self.workers, &self.lookup, path, encoding)
    }

    /// Writes the body of a request to one file.
    async fn plain(
        &self,
        body: &mut Incoming,
        encoding: Encoding,
    ) -> Result<Vec<WrittenFile>, RestError> {
        let Some(path) = &self.path else {
            return Err(RestError::bad("the query has no path"));
        };
        let mut upload = self.upload(path.clone(), encoding);
        while let Some(piece) = request::next(body).await? {
            upload.write(piece).await?;
        }
        Ok(vec![upload.finish(&self.metadata).await?])
    }

    /// Writes each part named `file` of a multipart body to a file.
    async fn multipart(
        &self,
        mut parts: multer::Multipart<'_>,
    ) -> Result<Vec<WrittenFile>, RestError> {
        let malformed = |e: multer::Error| RestError::bad(format!("malformed multipart: {e}"));
        let mut written: Vec<WrittenFile> = Vec::new();
        while let Some(mut part) = parts.next_field().await.map_err(malformed)? {
            // Other parts are fields of a form, and are ignored.
            if part.name() != Some("file") {
                continue;
            }
            if written.len() == MAX_FILES {
                return Err(RestError::bad(format!("more than {MAX_FILES} files")));
            }
            let path = match &self.path {
                Some(_) if !written.is_empty() => {
                    return Err(RestError::bad(
                        "with several files, the query must not have a path",
                    ));
                }
                Some(path) => path.clone(),
                None => file_name(&part)
                    .ok_or_else(|| RestError::bad("neither the query nor the part has a path"))?,
            };
            let mut upload = self.upload(path, Encoding::Identity);
            while let Some(piece) = part.chunk().await.map_err(malformed)? {
                upload.write(piece).await?;
            }
            written.push(upload.finish(&self.metadata).await?);
        }
        if written.is_empty() {
            return Err(RestError::bad("the request has no part named 'file'"));
        }
        Ok(written)
    }

    /// Handles a compressed multipart body. Such a body is rare, so its decoded form is stored in
    /// an unnamed file first.
    async fn zipped_multipart(
        &self,
        body: &mut Incoming,
        boundary: String,
    ) -> Result<Vec<WrittenFile>, RestError> {
        const WHAT: &str = "cannot store the upload";
        let failed = |e: io::Error| RestError::io(WHAT, &e);
        let create = move |_: &Progress| {
            let file = File::options()
                .read(true)
                .write(true)
                // The kernel removes the file when it is closed, also if the request is
                // interrupted.
                .custom_flags(libc::O_TMPFILE)
                .open(std::env::temp_dir());
            file.map(MultiGzDecoder::new).map_err(failed)
        };
        let call = self.workers.attempt(CallClass::Files, WHAT, create);
        let mut decoder = call.await?;
        while let Some(piece) = request::next(body).await? {
            let decode = move |_: &Progress| {
                decoder.write_all(&piece).map_err(target::gzip_error)?;
                Ok::<_, RestError>(decoder)
            };
            let call = self.workers.attempt(CallClass::Files, WHAT, decode);
            decoder = call.await?;
        }
        let finish = move |_: &Progress| {
            let mut spool = decoder.finish().map_err(target::gzip_error)?;
            spool.rewind().map_err(failed)?;
            Ok::<_, RestError>(spool)
        };
        let call = self.workers.attempt(CallClass::Files, WHAT, finish);
        let source = PlainFile(call.await?);
        let body = WorkerBody::new(&self.workers, WHAT.to_owned(), None, source, None);
        self.multipart(multer::Multipart::new(body.into_stream(), boundary))
            .await
    }
}

/// Returns the file name of a part, which is a whole path.
///
/// Clients escape different characters. As in E2B's envd, a backslash escapes a following quotation
/// mark or backslash. Otherwise it is a character of the name.
fn file_name(part: &multer::Field<'_>) -> Option<RequestPath> {
    let disposition = part.headers().get(header::CONTENT_DISPOSITION)?;
    match quoted_parameter(disposition.as_bytes(), b"filename") {
        Some(name) => Some(RequestPath::from_bytes(name)),
        None => part.file_name().map(|n| RequestPath::Text(n.to_owned())),
    }
    .filter(|name| *name != RequestPath::Text(String::new()))
}

/// Returns the value of the parameter `name="value"` in a header.
fn quoted_parameter(header: &[u8], name: &[u8]) -> Option<Vec<u8>> {
    let mut rest = header;
    loop {
        // Splits at the next parameter. A quoted value may contain semicolons, and quotation marks
        // after a backslash.
        let (mut quoted, mut escaped) = (false, false);
        let end = rest.iter().position(|byte| {
            quoted ^= *byte == b'"' && !escaped;
            escaped = *byte == b'\\' && quoted && !escaped;
            *byte == b';' && !quoted
        });
        rest = rest.get(end? + 1..)?.trim_ascii_start();
        let Some(value) = rest.strip_prefix(name).map(<[u8]>::trim_ascii_start) else {
            continue;
        };
        let Some(value) = value.strip_prefix(b"=").map(<[u8]>::trim_ascii_start) else {
            continue;
        };
        return unquote(value.strip_prefix(b"\"")?);
    }
}

/// Returns the text up to the closing quotation mark.
fn unquote(mut text: &[u8]) -> Option<Vec<u8>> {
    let mut value = Vec::new();
    loop {
        match text {
            [b'"', ..] => return Some(value),
            [b'\\', escaped @ (b'"' | b'\\'), after @ ..] => {
                value.push(*escaped);
                text = after;
            }
            [byte, after @ ..] => {
                value.push(*byte);
                text = after;
            }
            [] => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_are_unescaped_like_envd_does() {
        let name = |header: &str| {
            quoted_parameter(header.as_bytes(), b"filename")
                .map(|name| String::from_utf8(name).unwrap())
        };
        for (header, expected) in [
            (
                r#"form-data; name="file"; filename="/a/b c""#,
                Some("/a/b c"),
            ),
            // Forms of `a\b`, as sent by httpx and by browsers.
            (r#"form-data; name="file"; filename="/a\\b""#, Some(r"/a\b")),
            (r#"form-data; name="file"; filename="/a\b""#, Some(r"/a\b")),
            (
                r#"form-data; name="file"; filename="a\"b;c""#,
                Some(r#"a"b;c"#),
            ),
            (r#"form-data; filename = "x"; name="file""#, Some("x")),
            (r#"form-data; name="; filename=x"; filename="y""#, Some("y")),
            (r#"form-data; name="a\"b"; filename="y""#, Some("y")),
            (r#"form-data; name="a\\"; filename="y""#, Some("y")),
            (r#"form-data; name="file"; filename=bare"#, None),
            (r#"form-data; name="file"; filename="open"#, None),
            ("form-data", None),
        ] {
            assert_eq!(name(header).as_deref(), expected, "{header}");
        }
    }
}
