//! URL of a store.

use crate::directory_store::{DirectoryCheck, DirectoryStore};
use crate::{Backend, BackendSettings, StoreError, s3};
use object_store::path::Path;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

/// URL of a store: `s3://BUCKET/PREFIX` or `file:///PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreUrl {
    /// Bucket of an S3 server. Server, region and credentials are taken from the usual variables
    /// (`AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
    /// `AWS_SESSION_TOKEN`, `AWS_ALLOW_HTTP`).
    S3 {
        /// Bucket.
        bucket: String,
        /// Prefix of all keys. May be empty.
        prefix: String,
    },
    /// Directory.
    Directory(PathBuf),
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::S3 { bucket, prefix } => write!(f, "s3://{bucket}/{prefix}"),
            Self::Directory(path) => write!(f, "file://{}", path.display()),
        }
    }
}

impl FromStr for StoreUrl {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let invalid = |reason: &str| StoreError::Url {
            url: text.to_owned(),
            reason: reason.to_owned(),
        };
        let url = url::Url::parse(text).map_err(|e| invalid(&e.to_string()))?;
        if url.query().is_some() || url.fragment().is_some() || !url.username().is_empty() {
            return Err(invalid("it must not have a user, query or fragment"));
        }
        match url.scheme() {
            "s3" => {
                let bucket = url.host_str().filter(|name| !name.is_empty());
                let prefix = url.path().trim_matches('/').to_owned();
                Path::parse(&prefix).map_err(|e| invalid(&e.to_string()))?;
                Ok(Self::S3 {
                    bucket: bucket
                        .ok_or_else(|| invalid("the bucket is missing"))?
                        .to_owned(),
                    prefix,
                })
            }
            "file" => match url.to_file_path() {
                // The root directory is rejected: it has no parent.
                Ok(path) if path.parent().is_some() => Ok(Self::Directory(path)),
                _ => Err(invalid("the path is not a directory")),
            },
            _ => Err(invalid("the scheme is neither s3 nor file")),
        }
    }
}

impl StoreUrl {
    /// Opens the store and creates the directory of a new one. Sends no request.
    pub fn open(&self, settings: BackendSettings) -> Result<Backend, StoreError> {
        if let Self::Directory(path) = self {
            DirectoryStore::create(path).map_err(StoreError::io(path))?;
        }
        self.open_existing(settings)
    }

    /// Opens a store that was used before. Does not create a missing directory, because its file
    /// system may be unmounted. Sends no request.
    pub fn open_existing(&self, settings: BackendSettings) -> Result<Backend, StoreError> {
        self.open_checked(settings, None)
    }

    /// Like [`Self::open_existing`]. `check` additionally checks that the directory of a store
    /// exists. A store in S3 ignores `check`.
    pub fn open_checked(
        &self,
        settings: BackendSettings,
        check: Option<DirectoryCheck>,
    ) -> Result<Backend, StoreError> {
        let invalid = |url: String, e: &dyn std::fmt::Display| StoreError::Url {
            url,
            reason: e.to_string(),
        };
        match self {
            Self::Directory(path) => {
                let store = DirectoryStore::new(path.clone(), check);
                Ok(Backend::new(Arc::new(store), Path::default(), settings))
            }
            Self::S3 { bucket, prefix } => {
                let url = format!("s3://{bucket}/{prefix}");
                let prefix = Path::parse(prefix).map_err(|e| invalid(url.clone(), &e))?;
                let store = s3::open(bucket).map_err(|e| invalid(url, &e))?;
                Ok(Backend::new(store, prefix, settings))
            }
        }
    }
}
