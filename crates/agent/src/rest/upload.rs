//! `POST /files`: one file as it is, or several as multipart.

use super::error::RestError;
use super::file_query::FileQuery;
use crate::body::{ReplyBody, json};
use crate::filesystem::{metadata, operation};
use crate::rpc::request;
use crate::state::Agent;
use crate::sys;
use crate::users::User;
use flate2::write::MultiGzDecoder;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{Request, Response, header};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Most files of one request.
const MAX_FILES: usize = 10_000;

#[derive(Debug, Serialize)]
struct WrittenFile {
    path: String,
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
}

/// Writes the files of a request.
pub async fn answer(
    agent: &Agent,
    request: Request<&mut Incoming>,
) -> Result<Response<ReplyBody>, RestError> {
    let query = FileQuery::of(request.uri());
    let user = query.admit(agent, request.headers(), "write")?;
    let metadata = metadata::from_headers(request.headers()).map_err(RestError::bad)?;
    let text = |name| request.headers().get(name).and_then(|v| v.to_str().ok());
    let gzip = match text(header::CONTENT_ENCODING).map(str::trim) {
        None | Some("" | "identity") => false,
        Some("gzip") => true,
        Some(other) => {
            return Err(RestError::bad(format!(
                "content encoding '{other}' is not supported, use gzip"
            )));
        }
    };
    let kind = text(header::CONTENT_TYPE).unwrap_or_default().to_owned();
    let context = ReceivedUpload {
        user,
        path: query.path,
        metadata,
        gzip,
    };
    let written = if kind.starts_with("multipart/form-data") {
        let boundary = multer::parse_boundary(&kind)
            .map_err(|e| RestError::bad(format!("malformed multipart: {e}")))?;
        if gzip {
            context
                .zipped_multipart(request.into_body(), boundary)
                .await?
        } else {
            context
                .multipart(multer::Multipart::new(
                    request.into_body().into_data_stream(),
                    boundary,
                ))
                .await?
        }
    } else {
        context.plain(request.into_body()).await?
    };
    Ok(json(&written))
}

struct ReceivedUpload {
    user: User,
    path: Option<String>,
    metadata: BTreeMap<String, String>,
    gzip: bool,
}

impl ReceivedUpload {
    async fn plain(&self, body: &mut Incoming) -> Result<Vec<WrittenFile>, RestError> {
        let Some(path) = &self.path else {
            return Err(RestError::bad("the query names no path"));
        };
        let mut target = UploadFile::create(self.user.resolve(path, None), &self.user)?;
        if self.gzip {
            let mut decoder = MultiGzDecoder::new(&mut target);
            while let Some(piece) = request::next(body).await? {
                decoder.write_all(&piece).map_err(gzip_error)?;
            }
            decoder.try_finish().map_err(gzip_error)?;
        } else {
            while let Some(piece) = request::next(body).await? {
                target.write_all(&piece).map_err(|e| target.failed(&e))?;
            }
        }
        Ok(vec![target.finish(&self.metadata)?])
    }

    async fn multipart(
        &self,
        mut parts: multer::Multipart<'_>,
    ) -> Result<Vec<WrittenFile>, RestError> {
        let malformed = |e: multer::Error| RestError::bad(format!("malformed multipart: {e}"));
        let mut written: Vec<WrittenFile> = Vec::new();
        while let Some(mut part) = parts.next_field().await.map_err(malformed)? {
            if part.name() != Some("file") {
                continue;
            }
            if written.len() == MAX_FILES {
                return Err(RestError::bad(format!("more than {MAX_FILES} files")));
            }
            let path = match (&self.path, part.file_name()) {
                (Some(_), _) if !written.is_empty() => {
                    return Err(RestError::bad(
                        "a path in the query goes with one file only",
                    ));
                }
                (Some(path), _) => path.clone(),
                (None, Some(name)) if !name.is_empty() => name.to_owned(),
                _ => {
                    return Err(RestError::bad(
                        "neither the query nor the part names a path",
                    ));
                }
            };
            let mut target = UploadFile::create(self.user.resolve(&path, None), &self.user)?;
            while let Some(piece) = part.chunk().await.map_err(malformed)? {
                target.write_all(&piece).map_err(|e| target.failed(&e))?;
            }
            let done = target.finish(&self.metadata)?;
            written.push(done);
        }
        if written.is_empty() {
            return Err(RestError::bad("the request has no part named 'file'"));
        }
        Ok(written)
    }

    /// A compressed multipart body is rare: its decoded form waits in a file without a name.
    async fn zipped_multipart(
        &self,
        body: &mut Incoming,
        boundary: String,
    ) -> Result<Vec<WrittenFile>, RestError> {
        let unnamed = || -> io::Result<File> {
            File::options()
                .read(true)
                .write(true)
                .custom_flags(libc::O_TMPFILE)
                .open(std::env::temp_dir())
        };
        let failed = |e: io::Error| RestError::io("cannot keep the upload", &e);
        let mut spool = unnamed().map_err(failed)?;
        let mut decoder = MultiGzDecoder::new(&mut spool);
        while let Some(piece) = request::next(body).await? {
            decoder.write_all(&piece).map_err(gzip_error)?;
        }
        decoder.try_finish().map_err(gzip_error)?;
        drop(decoder);
        io::Seek::rewind(&mut spool).map_err(failed)?;
        let reader = crate::body::blocking_stream(spool);
        self.multipart(multer::Multipart::new(reader, boundary))
            .await
    }
}

fn gzip_error(e: io::Error) -> RestError {
    match e.kind() {
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
            RestError::bad(format!("malformed gzip: {e}"))
        }
        _ => RestError::io("cannot write", &e),
    }
}

/// A file that is being written.
struct UploadFile {
    path: PathBuf,
    file: File,
}

impl UploadFile {
    /// Creates or truncates a file for a user, with the directories above it.
    fn create(path: PathBuf, user: &User) -> Result<Self, RestError> {
        let failed =
            |e: &io::Error| RestError::io(&format!("cannot write '{}'", path.display()), e);
        if path.is_dir() {
            return Err(RestError::bad(format!(
                "'{}' is a directory",
                path.display()
            )));
        }
        if let Some(parent) = path.parent() {
            operation::make_dirs(parent, user).map_err(|e| failed(&e))?;
        }
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o666)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path)
            .map_err(|e| failed(&e))?;
        let found = file.metadata().map_err(|e| failed(&e))?;
        if !found.is_file() {
            return Err(RestError::bad(format!(
                "'{}' is not a regular file",
                path.display()
            )));
        }
        let target = Self { path, file };
        let owned = (found.uid(), found.gid()) == (user.uid, user.gid);
        // Without privilege the file is ours already.
        if !owned
            && let Err(e) = sys::chown(&target.path, user.uid, user.gid)
            && e.raw_os_error() != Some(libc::EPERM)
        {
            return Err(target.failed(&e));
        }
        Ok(target)
    }

    fn failed(&self, e: &io::Error) -> RestError {
        RestError::io(&format!("cannot write '{}'", self.path.display()), e)
    }

    fn finish(self, metadata: &BTreeMap<String, String>) -> Result<WrittenFile, RestError> {
        metadata::replace(&self.path, metadata).map_err(|e| self.failed(&e))?;
        Ok(describe(&self.path, metadata.clone()))
    }
}

impl Write for UploadFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn describe(path: &Path, metadata: BTreeMap<String, String>) -> WrittenFile {
    WrittenFile {
        path: path.to_string_lossy().into_owned(),
        name: path
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default(),
        kind: "file",
        metadata,
    }
}
