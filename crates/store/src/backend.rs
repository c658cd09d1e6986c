//! Requests to a store: made again, hedged, limited and counted.

use crate::StoreError;
use crate::traffic::{Bandwidth, Counters, Traffic, add};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{Error, GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode, PutPayload};
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

const FIRST_BACKOFF: Duration = Duration::from_millis(50);
/// Longest reason of a failure that is shown.
const MAX_REASON_CHARS: usize = 300;
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// Limits of the requests to a store.
#[derive(Debug, Clone)]
pub struct BackendSettings {
    /// Requests at once.
    pub concurrency: usize,
    /// Attempts at a request.
    pub attempts: u32,
    /// Time of one attempt.
    pub request_timeout: Duration,
    /// Time of all attempts at a request.
    pub deadline: Duration,
    /// Time after which a range is asked for a second time; the first answer counts.
    pub hedge_after: Option<Duration>,
    /// Bytes written per second.
    pub upload_bytes_per_second: Option<u64>,
    /// Bytes read per second.
    pub download_bytes_per_second: Option<u64>,
}

impl Default for BackendSettings {
    fn default() -> Self {
        Self {
            concurrency: 32,
            attempts: 6,
            request_timeout: Duration::from_secs(30),
            deadline: Duration::from_secs(90),
            hedge_after: Some(Duration::from_secs(1)),
            upload_bytes_per_second: None,
            download_bytes_per_second: None,
        }
    }
}

/// Object as a listing shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Key without the store's prefix.
    pub key: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Time of the last change by the store's clock, milliseconds since 1970.
    pub modified_ms: i64,
}

/// Store as requests reach it.
#[derive(Debug)]
pub struct Backend {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    settings: BackendSettings,
    permits: Semaphore,
    upload: Option<Bandwidth>,
    download: Option<Bandwidth>,
    counters: Counters,
}

impl Backend {
    /// Sends requests to `store`, whose own retries should be off. Keys begin with `prefix`.
    pub fn new(store: Arc<dyn ObjectStore>, prefix: Path, settings: BackendSettings) -> Self {
        Self {
            store,
            prefix,
            permits: Semaphore::new(settings.concurrency.max(1)),
            upload: settings.upload_bytes_per_second.map(Bandwidth::new),
            download: settings.download_bytes_per_second.map(Bandwidth::new),
            counters: Counters::default(),
            settings,
        }
    }

    /// Requests and bytes so far.
    pub fn traffic(&self) -> Traffic {
        self.counters.read()
    }

    fn path(&self, key: &str) -> Path {
        let parts = self.prefix.parts().map(|part| part.as_ref().to_owned());
        Path::from_iter(parts.chain(key.split('/').map(str::to_owned)))
    }

    /// Makes a request until it succeeds, fails for good, or time is up.
    async fn attempt<T, F, R>(&self, key: &str, mut request: F) -> Result<T, StoreError>
    where
        F: FnMut() -> R,
        R: Future<Output = Result<T, Error>>,
    {
        let limit = self.settings.deadline;
        let attempts = async {
            let mut number = 1;
            loop {
                let permit = self.permits.acquire().await;
                let answer = tokio::time::timeout(self.settings.request_timeout, request()).await;
                drop(permit);
                let failure = match answer {
                    Ok(Ok(value)) => return Ok(value),
                    Ok(Err(e)) => e,
                    Err(_) => generic("it did not answer in time"),
                };
                let error = classify(key, number, &failure);
                let again = matches!(error, StoreError::Unavailable { .. }) && is_passing(&failure);
                if !again || number >= self.settings.attempts {
                    return Err(error);
                }
                tracing::debug!("asking the store again for {key}: {failure}");
                add(&self.counters.retries, 1);
                tokio::time::sleep(backoff(number)).await;
                number += 1;
            }
        };
        tokio::time::timeout(limit, attempts)
            .await
            .unwrap_or_else(|_| {
                Err(StoreError::Timeout {
                    object: key.to_owned(),
                    limit,
                })
            })
    }

    /// Reads an object of at most `limit` bytes.
    pub async fn get(&self, key: &str, limit: u64) -> Result<Bytes, StoreError> {
        let path = self.path(key);
        let read = self.attempt(key, || async {
            add(&self.counters.gets, 1);
            let answer = self.store.get_opts(&path, GetOptions::default()).await?;
            let size = answer.meta.size;
            if size > limit {
                return Ok(Err(size));
            }
            self.throttle(size).await;
            let bytes = answer.bytes().await?;
            add(&self.counters.bytes_read, bytes.len() as u64);
            match bytes.len() as u64 == size {
                true => Ok(Ok(bytes)),
                false => Err(generic("the answer was cut short")),
            }
        });
        read.await?.map_err(|bytes| StoreError::TooLarge {
            object: key.to_owned(),
            bytes,
            limit,
        })
    }

    async fn throttle(&self, bytes: u64) {
        if let Some(download) = &self.download {
            download.take(bytes).await;
        }
    }

    async fn read_range(&self, path: &Path, range: &Range<u64>) -> Result<Bytes, Error> {
        add(&self.counters.gets, 1);
        let options = GetOptions {
            range: Some(GetRange::Bounded(range.clone())),
            ..GetOptions::default()
        };
        let bytes = self.store.get_opts(path, options).await?.bytes().await?;
        add(&self.counters.bytes_read, bytes.len() as u64);
        match bytes.len() as u64 == range.end - range.start {
            true => Ok(bytes),
            false => Err(generic("the answer was cut short")),
        }
    }

    /// Reads a range of bytes of an object. A slow request is made a second time.
    pub async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, StoreError> {
        self.throttle(range.end.saturating_sub(range.start)).await;
        self.get_urgent(key, range).await
    }

    /// As [`Self::get_range`], whatever the bandwidth's limit is.
    pub async fn get_urgent(&self, key: &str, range: Range<u64>) -> Result<Bytes, StoreError> {
        let path = self.path(key);
        let hedge_after = self.settings.hedge_after;
        self.attempt(key, || async {
            let first = self.read_range(&path, &range);
            let Some(after) = hedge_after else {
                return first.await;
            };
            tokio::pin!(first);
            if let Ok(answer) = tokio::time::timeout(after, &mut first).await {
                return answer;
            }
            add(&self.counters.hedges, 1);
            let second = self.read_range(&path, &range);
            tokio::pin!(second);
            match futures_util::future::select(first, second).await {
                futures_util::future::Either::Left((Ok(bytes), _))
                | futures_util::future::Either::Right((Ok(bytes), _)) => Ok(bytes),
                futures_util::future::Either::Left((Err(_), second)) => second.await,
                futures_util::future::Either::Right((Err(_), first)) => first.await,
            }
        })
        .await
    }

    async fn write(&self, key: &str, bytes: Bytes, mode: PutMode) -> Result<(), StoreError> {
        if let Some(upload) = &self.upload {
            upload.take(bytes.len() as u64).await;
        }
        let path = self.path(key);
        self.attempt(key, || async {
            add(&self.counters.puts, 1);
            add(&self.counters.bytes_written, bytes.len() as u64);
            let payload = PutPayload::from_bytes(bytes.clone());
            self.store
                .put_opts(&path, payload, mode.clone().into())
                .await
        })
        .await
        .map(drop)
    }

    /// Writes an object, whether it exists or not.
    pub async fn put(&self, key: &str, bytes: Bytes) -> Result<(), StoreError> {
        self.write(key, bytes, PutMode::Overwrite).await
    }

    /// Writes an object unless it exists; returns false if it does. An object may be found to exist
    /// because an earlier attempt wrote it whose answer was lost.
    pub async fn create(&self, key: &str, bytes: Bytes) -> Result<bool, StoreError> {
        match self.write(key, bytes, PutMode::Create).await {
            Ok(()) => Ok(true),
            Err(StoreError::Conflict { .. }) => match self.head(key).await? {
                Some(_) => Ok(false),
                // Another write was under way, and failed.
                None => Err(StoreError::Conflict {
                    object: key.to_owned(),
                }),
            },
            Err(e) => Err(e),
        }
    }

    /// Size and time of an object, if it exists.
    pub async fn head(&self, key: &str) -> Result<Option<Listed>, StoreError> {
        let path = self.path(key);
        let asked = self.attempt(key, || async {
            add(&self.counters.heads, 1);
            self.store.head(&path).await
        });
        match asked.await {
            Ok(meta) => Ok(Some(Listed {
                key: key.to_owned(),
                bytes: meta.size,
                modified_ms: meta.last_modified.timestamp_millis(),
            })),
            Err(StoreError::Missing { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Lists all objects below `prefix`.
    pub async fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        let path = self.path(prefix);
        let skipped = match self.prefix.as_ref().len() {
            0 => 0,
            length => length + 1,
        };
        self.attempt(prefix, || async {
            add(&self.counters.lists, 1);
            let listed = self.store.list(Some(&path)).map_ok(|meta| Listed {
                key: meta
                    .location
                    .as_ref()
                    .get(skipped..)
                    .unwrap_or("")
                    .to_owned(),
                bytes: meta.size,
                modified_ms: meta.last_modified.timestamp_millis(),
            });
            listed.try_collect().await
        })
        .await
    }

    /// Removes an object; one that is missing is no error.
    pub async fn delete(&self, key: &str) -> Result<(), StoreError> {
        let path = self.path(key);
        let removed = self.attempt(key, || async {
            add(&self.counters.deletes, 1);
            self.store.delete(&path).await
        });
        match removed.await {
            Err(StoreError::Missing { .. }) => Ok(()),
            other => other,
        }
    }

    /// Carries out `work` for each of `items`, several at once; stops at the first failure.
    pub(crate) async fn each<I, F, R>(&self, items: I, work: F) -> Result<(), StoreError>
    where
        I: IntoIterator,
        F: FnMut(I::Item) -> R,
        R: Future<Output = Result<(), StoreError>>,
    {
        // Collected, or what contains this could not be proved to be `Send`.
        let requests: Vec<R> = items.into_iter().map(work).collect();
        futures_util::stream::iter(requests)
            .buffer_unordered(self.settings.concurrency.max(1))
            .try_collect()
            .await
    }
}

fn backoff(attempt: u32) -> Duration {
    let base = FIRST_BACKOFF
        .saturating_mul(1 << attempt.min(10))
        .min(MAX_BACKOFF);
    let random = crate::data_keys::random::<1>().map_or(128, |[byte]| byte);
    // Between half of it and all of it.
    base / 2 + base * u32::from(random) / 512
}

fn generic(reason: &'static str) -> Error {
    Error::Generic {
        store: "store",
        source: reason.into(),
    }
}

/// Status in the message of a request: listings have no other.
fn status(e: &Error) -> Option<u16> {
    let text = e.to_string();
    let (_, rest) = text.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

/// Returns true if the same request may succeed later.
fn is_passing(e: &Error) -> bool {
    !matches!(status(e), Some(400..=407 | 409..=428 | 430..=499))
}

/// Message of a failure: what an S3 server says in XML, or the beginning of all of it.
fn reason(e: &(impl std::fmt::Display + ?Sized)) -> String {
    let text = e.to_string();
    let inner = |tag: &str| {
        let (_, rest) = text.split_once(&format!("<{tag}>"))?;
        Some(rest.split_once('<')?.0)
    };
    let told = match (inner("Code"), inner("Message")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        _ => text.clone(),
    };
    told.chars().take(MAX_REASON_CHARS).collect()
}

fn classify(key: &str, attempts: u32, e: &Error) -> StoreError {
    let object = key.to_owned();
    match e {
        Error::NotFound { .. } => StoreError::Missing { object },
        Error::AlreadyExists { .. } | Error::Precondition { .. } => StoreError::Conflict { object },
        Error::PermissionDenied { source, .. } | Error::Unauthenticated { source, .. } => {
            StoreError::Denied {
                object,
                reason: reason(source),
            }
        }
        e if matches!(status(e), Some(401 | 403)) => StoreError::Denied {
            object,
            reason: reason(e),
        },
        e => StoreError::Unavailable {
            object,
            attempts,
            reason: reason(e),
        },
    }
}
