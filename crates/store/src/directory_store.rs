//! Store in a directory, whose file system may not be mounted now.
//!
//! A directory that is gone would look like a store without objects, and a write would make it anew
//! below the mount point. So each store has a folder from its first day on, and where that is
//! missing nothing is read as absent, and nothing is written.

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

/// Folder that each store has: the first object of a store is a tenant's record.
const TENANTS_FOLDER: &str = "tenants";
/// File that is locked for a conditional replace. Listings leave out names of this form.
const REPLACE_LOCK: &str = "replace#1";

/// The directory of a store is not there.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: {source}; mount the file system of file://{}, or make that folder if the store is to begin anew",
    store.join(TENANTS_FOLDER).display(), store.display()
)]
pub(crate) struct DirectoryMissing {
    store: PathBuf,
    source: io::Error,
}

/// Further check that the directory of a store is there, of a process that sees it under a mount of
/// its own. Set after the store was opened.
pub type DirectoryCheck = Arc<OnceLock<Box<dyn Fn() -> io::Result<()> + Send + Sync>>>;

struct Directory {
    path: PathBuf,
    further_check: Option<DirectoryCheck>,
    /// Opened when the directory is first there.
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

    /// Fails if the directory is not there. Blocks.
    fn check(&self) -> Result<&LocalFileSystem> {
        self.check_further()?;
        let folder = std::fs::metadata(self.path.join(TENANTS_FOLDER));
        let found = folder.and_then(|folder| match folder.is_dir() {
            true => Ok(()),
            false => Err(io::ErrorKind::NotADirectory.into()),
        });
        found.map_err(|e| self.missing(e))?;
        self.open()
    }

    /// Makes the further check, which takes microseconds.
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
    /// Replaces a file if its version still is `expected`. File systems have no such operation: all
    /// hosts make it under one lock. Holding the lock is bounded by one write of a small file.
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
        // Opened rather than looked up: a network file system then asks its server.
        let found = files.get_opts(key, GetOptions::default()).await?;
        if found.meta.e_tag != expected.e_tag {
            return Err(Error::Precondition {
                path: key.to_string(),
                source: "another host replaced it".into(),
            });
        }
        how.mode = PutMode::Overwrite;
        files.put_opts(key, data, how).await
    }
}

/// Takes the lock at `path`, which ends when the file is closed. Blocks.
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
    /// The store in `path`. Makes nothing, and looks at nothing.
    pub fn new(path: PathBuf, further_check: Option<DirectoryCheck>) -> Self {
        Self(Arc::new(Directory {
            path,
            further_check,
            files: OnceLock::new(),
        }))
    }

    /// Makes the directory of a new store at `path`, unless there is one.
    pub fn create(path: &Path) -> io::Result<()> {
        std::fs::create_dir_all(path.join(TENANTS_FOLDER))
    }

    /// Files of the directory, which is there.
    async fn files(self) -> Result<Arc<Directory>> {
        let directory = self.0.clone();
        let checking = tokio::task::spawn_blocking(move || directory.check().map(drop));
        checking.await.map_err(|e| Error::Generic {
            store: "directory",
            source: e.into(),
        })??;
        Ok(self.0)
    }

    /// A missing object is one only if the directory is there.
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
        // One that went away meanwhile looks as if it had less.
        let after = self.clone().files();
        let after = once(async move { after.await.map(|_| None) });
        let listed = listed.try_flatten().map_ok(Some).chain(after);
        listed
            .try_filter_map(|found| async move { Ok(found) })
            .boxed()
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
