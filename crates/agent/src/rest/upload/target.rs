//! [`Upload`]: the target file of an upload. Workers write it in batches, while the agent receives
//! the next batch.

use crate::filesystem::request_path::RequestPath;
use crate::filesystem::{metadata, operation};
use crate::rest::error::RestError;
use crate::sys;
use crate::users::{User, UserLookup};
use crate::workers::{CallClass, CallError, Progress, Workers};
use bytes::{Bytes, BytesMut};
use flate2::write::MultiGzDecoder;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tokio::task::JoinHandle;

/// Number of bytes that are collected for one call of a worker. A file with fewer bytes is written
/// by a single call.
const BATCH_BYTES: usize = 256 * 1024;

/// Encoding of the uploaded bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// No encoding.
    Identity,
    /// gzip.
    Gzip,
}

/// File in the response.
#[derive(Debug, Serialize)]
pub struct WrittenFile {
    path: String,
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
}

/// A file that workers write in batches.
pub struct Upload {
    workers: Workers,
    /// Operation and its object, for errors.
    what: String,
    /// Received bytes that no worker has taken.
    batch: BytesMut,
    state: UploadState,
}

/// State of an upload.
enum UploadState {
    /// No batch was written yet. The file may not exist.
    New {
        lookup: UserLookup,
        path: RequestPath,
        encoding: Encoding,
    },
    /// A worker is writing a batch.
    Writing(JoinHandle<Result<UploadFile, RestError>>),
    /// A batch failed.
    Failed,
}

impl Upload {
    /// Creates an upload to `path` on behalf of a user.
    pub fn new(
        workers: &Workers,
        lookup: &UserLookup,
        path: RequestPath,
        encoding: Encoding,
    ) -> Self {
        Self {
            workers: workers.clone(),
            what: format!("cannot write '{}'", path.display()),
            batch: BytesMut::new(),
            state: UploadState::New {
                lookup: lookup.clone(),
                path,
                encoding,
            },
        }
    }

    /// Adds bytes. If the current batch is full, waits until the previous batch is written, and
    /// starts to write the current batch.
    pub async fn write(&mut self, piece: Bytes) -> Result<(), RestError> {
        self.batch.extend_from_slice(&piece);
        if self.batch.len() < BATCH_BYTES {
            return Ok(());
        }
        let batch = std::mem::take(&mut self.batch);
        let file = self.file().await?;
        let workers = self.workers.clone();
        let what = self.what.clone();
        let work = move |progress: &Progress| {
            let mut file = file(progress)?;
            file.write_all(&batch)?;
            Ok(file)
        };
        // The next batch is received while the worker writes this one.
        self.state = UploadState::Writing(tokio::task::spawn_local(async move {
            workers.attempt(CallClass::Files, what, work).await
        }));
        Ok(())
    }

    /// Writes the remaining bytes. The file is complete afterwards.
    pub async fn finish(
        mut self,
        metadata: &BTreeMap<String, String>,
    ) -> Result<WrittenFile, RestError> {
        let batch = std::mem::take(&mut self.batch);
        let file = self.file().await?;
        let metadata = metadata.clone();
        let work = move |progress: &Progress| {
            let mut file = file(progress)?;
            file.write_all(&batch)?;
            file.finish(metadata)
        };
        let workers = &self.workers;
        workers.attempt(CallClass::Files, self.what, work).await
    }

    /// Waits until the previous batch is written. Returns a function that a worker must call. The
    /// function returns the open file. If no batch was written yet, it creates the file.
    async fn file(
        &mut self,
    ) -> Result<impl FnOnce(&Progress) -> Result<UploadFile, RestError> + Send + 'static, RestError>
    {
        /// File for the next batch.
        enum Source {
            Open(UploadFile),
            New(UserLookup, RequestPath, Encoding),
        }
        // If this function fails or is cancelled, the upload remains failed.
        let source = match std::mem::replace(&mut self.state, UploadState::Failed) {
            UploadState::New {
                lookup,
                path,
                encoding,
            } => Source::New(lookup, path, encoding),
            UploadState::Writing(task) => {
                let file = task.await.map_err(|_| CallError::Failed {
                    what: self.what.clone(),
                })?;
                Source::Open(file?)
            }
            UploadState::Failed => {
                let what = self.what.clone();
                return Err(CallError::Failed { what }.into());
            }
        };
        Ok(move |progress: &Progress| match source {
            Source::Open(file) => Ok(file),
            Source::New(lookup, path, encoding) => {
                let user = lookup.find()?;
                let path = path.resolve(&user);
                // Records the path of this call. Fails if too many calls on the file system of the
                // path are stuck.
                progress.enter(&path)?;
                UploadFile::create(path, &user, encoding)
            }
        })
    }
}

/// Open file of an upload.
struct UploadFile {
    path: PathBuf,
    sink: FileSink,
}

/// Destination of the bytes: the file, or a decoder before it.
enum FileSink {
    Plain(File),
    Gzip(Box<MultiGzDecoder<File>>),
}

impl UploadFile {
    /// Creates or truncates a file for a user. Creates missing parent directories.
    fn create(path: PathBuf, user: &User, encoding: Encoding) -> Result<Self, RestError> {
        let failed =
            |e: &io::Error| RestError::io(&format!("cannot write '{}'", path.display()), e);
        // The error of an open would be less specific.
        if path.is_dir() {
            return Err(RestError::bad(format!(
                "'{}' is a directory",
                path.display()
            )));
        }
        if let Some(parent) = path.parent() {
            operation::make_dirs(parent, user).map_err(|e| failed(&e))?;
        }
        let mut options = File::options();
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o666);
        let options = options.write(true).create(true).truncate(true);
        let file = sys::open_regular(&path, options).map_err(|e| match e.raw_os_error() {
            // EINVAL comes from `open_regular`. ENXIO comes from the kernel, for a socket or for a
            // named pipe without a reader.
            Some(libc::EINVAL | libc::ENXIO) => {
                RestError::bad(format!("'{}' is not a regular file", path.display()))
            }
            _ => failed(&e),
        })?;
        // An existing file keeps its mode, but belongs to the user of the upload afterwards.
        let found = file.metadata().map_err(|e| failed(&e))?;
        let owned = (found.uid(), found.gid()) == (user.uid, user.gid);
        if !owned {
            sys::set_owner(&file, user.uid, user.gid).map_err(|e| failed(&e))?;
        }
        let sink = match encoding {
            Encoding::Identity => FileSink::Plain(file),
            Encoding::Gzip => FileSink::Gzip(Box::new(MultiGzDecoder::new(file))),
        };
        Ok(Self { path, sink })
    }

    /// Returns the error of a failed write.
    fn failed(&self, e: &io::Error) -> RestError {
        RestError::io(&format!("cannot write '{}'", self.path.display()), e)
    }

    /// Writes bytes in the encoding of the upload.
    fn write_all(&mut self, bytes: &[u8]) -> Result<(), RestError> {
        match &mut self.sink {
            FileSink::Plain(file) => file.write_all(bytes).map_err(|e| self.failed(&e)),
            FileSink::Gzip(decoder) => decoder.write_all(bytes).map_err(gzip_error),
        }
    }

    /// Completes the file, and replaces its metadata.
    fn finish(mut self, metadata: BTreeMap<String, String>) -> Result<WrittenFile, RestError> {
        // Detects a truncated stream: the decoder fails if the end of the gzip data is missing.
        if let FileSink::Gzip(decoder) = &mut self.sink {
            decoder.try_finish().map_err(gzip_error)?;
        }
        metadata::replace(&self.path, &metadata).map_err(|e| self.failed(&e))?;
        Ok(describe(&self.path, metadata))
    }
}

/// Returns the error of a decoder. Its input or its output may be the cause.
pub fn gzip_error(e: io::Error) -> RestError {
    match e.kind() {
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
            RestError::bad(format!("malformed gzip: {e}"))
        }
        _ => RestError::io("cannot write", &e),
    }
}

/// Returns the description of a written file for the response.
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
