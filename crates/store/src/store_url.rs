//! Address of a store.

use crate::directory_store::DirectoryStore;
use crate::{Backend, BackendSettings, StoreError};
use object_store::aws::AmazonS3Builder;
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStore, RetryConfig};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Address of a store: `s3://BUCKET/PREFIX` or `file:///PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreUrl {
    /// Bucket of an S3 server. Server, region and credentials come from the usual variables
    /// (`AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
    /// `AWS_SESSION_TOKEN`, `AWS_ALLOW_HTTP`).
    S3 {
        /// Bucket.
        bucket: String,
        /// Prefix of all keys; may be empty.
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
        let refused = |reason: &str| StoreError::Url {
            url: text.to_owned(),
            reason: reason.to_owned(),
        };
        let url = url::Url::parse(text).map_err(|e| refused(&e.to_string()))?;
        if url.query().is_some() || url.fragment().is_some() || !url.username().is_empty() {
            return Err(refused("it has more than a place"));
        }
        match url.scheme() {
            "s3" => {
                let bucket = url.host_str().filter(|name| !name.is_empty());
                let prefix = url.path().trim_matches('/').to_owned();
                Path::parse(&prefix).map_err(|e| refused(&e.to_string()))?;
                Ok(Self::S3 {
                    bucket: bucket
                        .ok_or_else(|| refused("it names no bucket"))?
                        .to_owned(),
                    prefix,
                })
            }
            "file" => match url.to_file_path() {
                Ok(path) if path.parent().is_some() => Ok(Self::Directory(path)),
                _ => Err(refused("it names no directory")),
            },
            _ => Err(refused("its scheme is neither s3 nor file")),
        }
    }
}

impl StoreUrl {
    /// Opens the store, and makes its directory if it is new. Makes no request.
    pub fn open(&self, settings: BackendSettings) -> Result<Backend, StoreError> {
        if let Self::Directory(path) = self {
            DirectoryStore::create(path).map_err(StoreError::io(path))?;
        }
        self.open_existing(settings)
    }

    /// Opens a store that was used before: a directory that is missing now is not made, as its file
    /// system may not be mounted. Makes no request.
    pub fn open_existing(&self, settings: BackendSettings) -> Result<Backend, StoreError> {
        let refused = |url: String, e: &dyn std::fmt::Display| StoreError::Url {
            url,
            reason: e.to_string(),
        };
        match self {
            Self::Directory(path) => {
                let store = DirectoryStore::new(path.clone());
                Ok(Backend::new(Arc::new(store), Path::default(), settings))
            }
            Self::S3 { bucket, prefix } => {
                let url = format!("s3://{bucket}/{prefix}");
                let prefix = Path::parse(prefix).map_err(|e| refused(url.clone(), &e))?;
                let store = s3(bucket).map_err(|e| refused(url, &e))?;
                Ok(Backend::new(store, prefix, settings))
            }
        }
    }
}

fn s3(bucket: &str) -> Result<Arc<dyn ObjectStore>, object_store::Error> {
    // An error means that another provider is installed, which serves as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = ClientOptions::new()
        .with_connect_timeout(CONNECT_TIMEOUT)
        // The backend has its own: a slow answer may take its time while bytes arrive.
        .with_timeout_disabled();
    // Options go first: what the environment says of them (AWS_ALLOW_HTTP) holds.
    let mut builder = AmazonS3Builder::new().with_client_options(client);
    for (name, value) in std::env::vars() {
        let key = name
            .strip_prefix("AWS_")
            .and_then(|_| name.to_ascii_lowercase().parse().ok());
        if let Some(key) = key {
            builder = builder.with_config(key, value);
        }
    }
    // The backend makes requests again itself: it counts them, and knows the deadline.
    let retry = RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    };
    let store = builder.with_bucket_name(bucket).with_retry(retry).build()?;
    Ok(Arc::new(store))
}
