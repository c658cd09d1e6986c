//! Store in a directory on a file system that may be unmounted.
//!
//! If the file system is not mounted, the directory looks like an empty store, and a write would
//! create a new store below the mount point. Therefore each store has a marker folder from its
//! creation. If that folder is missing, reads do not report objects as absent and writes fail.
//!
//! A *tenant* is an owner of snapshots in the store, usually an API key. The objects of a tenant
//! are encrypted with its keys.

use async_trait::async_trait;
use futures_util::stream::{BoxStream, once};
use futures_util::{StreamExt, TryStreamExt};
use nix::fcntl::{Flock, FlockArg};
use object_store::local::LocalFileSystem;
use object_store::path::Path as Key;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
    UpdateVersion,
};
use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Marker folder of each store. It contains the records of tenants. A tenant's record is the first
/// object that is written to a store, so that every store in use has this folder.
const TENANTS_FOLDER: &str = "tenants";
/// File that is locked for a conditional replace. [`LocalFileSystem`] lists no files whose names
/// end with `#` and digits.
const REPLACE_LOCK: &str = "replace#1";

/// The directory of a store does not exist.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: {source}; mount the file system of file://{}, or create that folder to start an empty store",
    store.join(TENANTS_FOLDER).display(), store.display()
)]
pub(crate) struct DirectoryMissing {
    store: PathBuf,
    source: io::Error,
}

/// Additional check that the directory of a store exists, for a process in a separate mount
/// namespace. There the directory may remain visible after the host has unmounted the file system.
/// The cell is empty until the process has entered that namespace, because the process opens the
/// store before.
pub type DirectoryCheck = Arc<OnceLock<Box<dyn Fn() -> io::Result<()> + Send + Sync>>>;

/// Directory that contains a store. It may appear later, for example by a mount.
struct Directory {
    path: PathBuf,
    further_check: Option<DirectoryCheck>,
    /// Initialised when the directory exists for the first time.
    files: OnceLock<LocalFileSystem>,
}

/// Store in a directory.
#[derive(Debug, Clone)]
pub(crate) struct DirectoryStore(Arc<Directory>);

impl fmt::Display for DirectoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "file://{}", self.0.path.display())
    }
}

impl fmt::Debug for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Directory({})", self.path.display())
    }
}

impl Directory {
    fn open(&self) -> Result<&LocalFileSystem> {
        if let Some(files) = self.files.get() {
            return Ok(files);
        }
        let files = LocalFileSystem::new_with_prefix(&self.path)?.with_fsync(true);
        Ok(self.files.get_or_init(|| files))
    }

    /// Fails if the marker folder of the store does not exist, or if the additional check fails.
    /// Blocks.
    fn check(&self) -> Result<&LocalFileSystem> {
        self.check_further()?;
        let folder = std::fs::metadata(self.path.join(TENANTS_FOLDER));
        let existing = folder.and_then(|folder| {
            if folder.is_dir() {
                Ok(())
            } else {
                Err(io::ErrorKind::NotADirectory.into())
            }
        });
        existing.map_err(|e| self.missing(e))?;
        self.open()
    }

    /// Runs the additional check. Takes microseconds, so that asynchronous callers need no blocking
    /// thread.
    fn check_further(&self) -> Result<()> {
        let check = self.further_check.as_ref().and_then(|check| check.get());
        check.map_or(Ok(()), |check| check().map_err(|e| self.missing(e)))
    }

    fn missing(&self, source: io::Error) -> Error {
        Error::Generic {
            store: "directory",
            source: Box::new(DirectoryMissing {
                store: self.path.clone(),
                source,
            }),
        }
    }
}

impl Directory {
    /// Replaces a file if its version still is `expected`. File systems have no such operation, so
    /// all hosts take a file lock for it. The lock is held for at most one write of a small file.
    async fn replace(
        self: Arc<Self>,
        key: &Key,
        data: PutPayload,
        mut how: PutOptions,
        expected: UpdateVersion,
    ) -> Result<PutResult> {
        let path = self.path.join(REPLACE_LOCK);
        let locked = tokio::task::spawn_blocking(move || lock(&path)).await;
        let lock = locked.map_err(io::Error::other).and_then(|lock| lock);
        let _lock = lock.map_err(|e| Error::Generic {
            store: "directory",
            source: e.into(),
        })?;
        let files = self.open()?;
        // Open the file instead of reading its metadata, so that a network file system queries its
        // server.
        let current = files.get_opts(key, GetOptions::default()).await?;
        if current.meta.e_tag != expected.e_tag {
            return Err(Error::Precondition {
                path: key.to_string(),
                source: "another host replaced it".into(),
            });
        }
        how.mode = PutMode::Overwrite;
        files.put_opts(key, data, how).await
    }
}

/// Takes the lock at `path`, which is released when the file is closed. Blocks.
fn lock(path: &Path) -> io::Result<Flock<File>> {
    let mut options = File::options();
    let file = options
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| e.into())
}

impl DirectoryStore {
    /// Returns the store in `path` without accessing the directory.
    pub fn new(path: PathBuf, further_check: Option<DirectoryCheck>) -> Self {
        Self(Arc::new(Directory {
            path,
            further_check,
            files: OnceLock::new(),
        }))
    }

    /// Creates the directory of a new store at `path`, unless it exists.
    pub fn create(path: &Path) -> io::Result<()> {
        std::fs::create_dir_all(path.join(TENANTS_FOLDER))
    }

    /// Checks that the directory exists and returns it.
    async fn files(self) -> Result<Arc<Directory>> {
        let directory = self.0.clone();
        let checking = tokio::task::spawn_blocking(move || directory.check().map(drop));
        checking.await.map_err(|e| Error::Generic {
            store: "directory",
            source: e.into(),
        })??;
        Ok(self.0)
    }

    /// Accepts a "not found" error only if the directory exists.
    async fn checked<T>(self, answer: Result<T>) -> Result<T> {
        if matches!(answer, Err(Error::NotFound { .. })) {
            self.files().await?;
        }
        answer
    }
}

#[async_trait]
impl ObjectStore for DirectoryStore {
    async fn put_opts(&self, key: &Key, data: PutPayload, how: PutOptions) -> Result<PutResult> {
        let directory = self.clone().files().await?;
        match how.mode.clone() {
            PutMode::Update(expected) => directory.replace(key, data, how, expected).await,
            _ => directory.open()?.put_opts(key, data, how).await,
        }
    }

    async fn put_multipart_opts(
        &self,
        key: &Key,
        how: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let directory = self.clone().files().await?;
        directory.open()?.put_multipart_opts(key, how).await
    }

    async fn get_opts(&self, key: &Key, options: GetOptions) -> Result<GetResult> {
        self.0.check_further()?;
        let answer = match self.0.files.get() {
            Some(files) => files.get_opts(key, options).await,
            None => {
                let directory = self.clone().files().await?;
                directory.open()?.get_opts(key, options).await
            }
        };
        self.clone().checked(answer).await
    }

    fn delete_stream(
        &self,
        keys: BoxStream<'static, Result<Key>>,
    ) -> BoxStream<'static, Result<Key>> {
        let this = self.clone();
        let opened = self.clone().files();
        let removed = once(async move {
            let directory = opened.await?;
            Ok::<_, Error>(directory.open()?.delete_stream(keys))
        });
        removed
            .try_flatten()
            .then(move |removed| this.clone().checked(removed))
            .boxed()
    }

    fn list(&self, prefix: Option<&Key>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (prefix, opened) = (prefix.cloned(), self.clone().files());
        let listed = once(async move {
            let directory = opened.await?;
            Ok::<_, Error>(directory.open()?.list(prefix.as_ref()))
        });
        // Check again at the end: a listing is incomplete if the directory disappeared meanwhile.
        let after = self.clone().files();
        let after = once(async move { after.await.map(|_| None) });
        let listed = listed.try_flatten().map_ok(Some).chain(after);
        listed
            .try_filter_map(|found| async move { Ok(found) })
            .boxed()
    }

    /// Lists objects in ascending order, as S3 servers do. The directory is read completely.
    fn list_with_offset(
        &self,
        prefix: Option<&Key>,
        offset: &Key,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let (listed, offset) = (self.list(prefix), offset.clone());
        let sorted = once(async move {
            let mut objects: Vec<ObjectMeta> = listed.try_collect().await?;
            objects.retain(|object| object.location > offset);
            objects.sort_by(|a, b| a.location.cmp(&b.location));
            Ok::<_, Error>(futures_util::stream::iter(objects.into_iter().map(Ok)))
        });
        sorted.try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Key>) -> Result<ListResult> {
        let directory = self.clone().files().await?;
        directory.open()?.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Key, to: &Key, how: CopyOptions) -> Result<()> {
        let directory = self.clone().files().await?;
        directory.open()?.copy_opts(from, to, how).await
    }
}
