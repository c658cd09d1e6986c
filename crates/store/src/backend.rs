//! [`Backend`]: requests to the object store, with retries, hedging (a second attempt in parallel
//! to a slow one), limits and counters.

mod conditional;
mod listing;

use crate::StoreError;
use crate::request_error::{classify, generic, is_passing};
use crate::stall_clock::StallClock;
use crate::traffic::{Bandwidth, Counters, Traffic, add};
use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    Error, GetOptions, GetRange, GetResult, GetResultPayload, ObjectStore, ObjectStoreExt, PutMode,
    PutPayload, PutResult,
};
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::Instant;

pub use conditional::{ObjectVersion, Versioned, Written};
pub use listing::Listed;

/// Minimum rate of an upload. Slower uploads are aborted.
const MIN_UPLOAD_BYTES_PER_SECOND: u64 = 64 << 10;
/// Minimum rate of a download that takes longer than the deadline. Slower downloads are aborted.
const MIN_DOWNLOAD_BYTES_PER_SECOND: u64 = 512;
/// Maximum size in bytes of an object. A listing that reports a larger object is wrong.
const MAX_OBJECT_BYTES: u64 = 1 << 40;
/// Maximum number of bytes reserved for a response before its body arrives.
const RESERVED_ANSWER_BYTES: u64 = 16 << 20;
/// Minimum delay before the second attempt of a request. The delay doubles with each attempt.
const FIRST_BACKOFF: Duration = Duration::from_millis(50);
/// Maximum delay between two attempts.
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// Limits of the requests to a store.
#[derive(Debug, Clone)]
pub struct BackendSettings {
    /// Maximum number of concurrent requests.
    pub concurrency: usize,
    /// Maximum number of attempts per request.
    pub attempts: u32,
    /// Maximum time for which one attempt may receive no byte. A write has more time, according to
    /// its size.
    pub request_timeout: Duration,
    /// Maximum time for which a request may receive no byte, counted over all of its attempts. A
    /// write has more time, according to its size.
    pub deadline: Duration,
    /// Time without a received byte after which a range is requested a second time. The first
    /// response is used.
    pub hedge_after: Option<Duration>,
    /// Maximum number of objects in a listing.
    pub max_listed: usize,
    /// Maximum rate of uploads. `None` if unlimited.
    pub upload_bytes_per_second: Option<u64>,
    /// Maximum rate of downloads. `None` if unlimited.
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
            max_listed: 1_000_000,
            upload_bytes_per_second: None,
            download_bytes_per_second: None,
        }
    }
}

impl BackendSettings {
    /// Returns the limits of requests for small records that decide who may act: locks and records
    /// of ownership. A late response is worthless for them.
    pub fn control() -> Self {
        Self {
            concurrency: 64,
            attempts: 4,
            request_timeout: Duration::from_secs(2),
            deadline: Duration::from_secs(6),
            hedge_after: None,
            upload_bytes_per_second: None,
            download_bytes_per_second: None,
            ..Self::default()
        }
    }
}

/// ETag and version id of an object, as the store returns them.
type Tags = (Option<String>, Option<String>);

/// Client of a store that applies [`BackendSettings`] to its requests.
#[derive(Debug)]
pub struct Backend {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    settings: BackendSettings,
    permits: Semaphore,
    /// Held during a replacement in a store without conditional replace (see `put_once`).
    replacing: Mutex<()>,
    /// Limit of uploads. `None` if they are unlimited.
    upload: Option<Bandwidth>,
    /// Limit of downloads. `None` if they are unlimited.
    download: Option<Bandwidth>,
    counters: Arc<Counters>,
}

impl Backend {
    /// Sends requests to `store`, whose own retries should be off. Keys begin with `prefix`.
    pub fn new(store: Arc<dyn ObjectStore>, prefix: Path, settings: BackendSettings) -> Self {
        Self {
            store,
            prefix,
            permits: Semaphore::new(settings.concurrency.max(1)),
            replacing: Mutex::default(),
            upload: settings.upload_bytes_per_second.map(Bandwidth::new),
            download: settings.download_bytes_per_second.map(Bandwidth::new),
            counters: Arc::default(),
            settings,
        }
    }

    /// Returns a client of the same store with limits of its own, so that its requests do not wait
    /// for requests of this client. The traffic of both is counted together.
    #[must_use]
    pub fn with_settings(&self, settings: BackendSettings) -> Self {
        Self {
            counters: self.counters.clone(),
            ..Self::new(self.store.clone(), self.prefix.clone(), settings)
        }
    }

    /// Returns the number of requests and bytes so far.
    pub fn traffic(&self) -> Traffic {
        self.counters.read()
    }

    fn path(&self, key: &str) -> Path {
        let parts = self.prefix.parts().map(|part| part.as_ref().to_owned());
        Path::from_iter(parts.chain(key.split('/').map(str::to_owned)))
    }

    /// Returns the stall clock of a request that writes `bytes` bytes.
    fn clock(&self, bytes: u64) -> StallClock {
        let more = Duration::from_secs(bytes / MIN_UPLOAD_BYTES_PER_SECOND);
        StallClock::new(
            self.settings.request_timeout + more,
            self.settings.deadline + more,
        )
    }

    /// Sends a request until it succeeds, fails permanently or stalls.
    async fn attempt<T, F, R>(
        &self,
        key: &str,
        clock: &StallClock,
        mut request: F,
    ) -> Result<T, StoreError>
    where
        F: FnMut() -> R,
        R: Future<Output = Result<T, Error>>,
    {
        let mut number = 1;
        // Error to return if the request stalls. Replaced by the latest error that the store itself
        // returned.
        let mut last = StoreError::Timeout {
            object: key.to_owned(),
            limit: clock.limit(),
        };
        loop {
            let since = Instant::now();
            let permit = self.permits.acquire().await;
            // Do not count the time in the queue as a stall of the store.
            clock.begin_attempt(since.elapsed());
            let (failure, silent) = tokio::select! {
                biased;
                answer = request() => match answer {
                    Ok(value) => return Ok(value),
                    Err(e) => (e, false),
                },
                () = clock.stalled() => return Err(last),
                () = clock.attempt_stalled() => (generic("no response in time"), true),
            };
            // Release the permit before the backoff, so that other requests can run.
            drop(permit);
            let error = classify(key, number, &failure);
            let again = error.is_unavailable() && is_passing(&failure);
            if !again || number >= self.settings.attempts {
                return Err(error);
            }
            tracing::debug!(key, error = %failure, "retrying a request to the store");
            add(&self.counters.retries, 1);
            // A timeout of an attempt does not replace the store's own error.
            if !silent {
                last = error;
            }
            tokio::select! {
                () = clock.stalled() => return Err(last),
                () = tokio::time::sleep(backoff(number)) => {}
            }
            number += 1;
        }
    }

    /// Reads the body of a response. Each received piece counts as progress.
    async fn body(
        &self,
        answer: GetResult,
        expected: u64,
        clock: &StallClock,
    ) -> Result<Bytes, Error> {
        let length = answer.range.end.saturating_sub(answer.range.start);
        if length > expected {
            return Err(generic("the response is longer than requested"));
        }
        let bytes = match answer.payload {
            // Read the file in one piece: as a stream, it arrives in pieces of a few KiB.
            GetResultPayload::File(..) => {
                let bytes = answer.bytes().await?;
                add(&self.counters.bytes_read, bytes.len() as u64);
                bytes
            }
            GetResultPayload::Stream(mut pieces) => {
                let reserved = length.min(RESERVED_ANSWER_BYTES);
                let mut bytes = BytesMut::with_capacity(usize::try_from(reserved).unwrap_or(0));
                while let Some(piece) = pieces.try_next().await? {
                    clock.tick(time_of(piece.len() as u64, MIN_DOWNLOAD_BYTES_PER_SECOND));
                    add(&self.counters.bytes_read, piece.len() as u64);
                    // Never buffer more than the announced length.
                    if (bytes.len() + piece.len()) as u64 > length {
                        return Err(generic("the response is longer than its stated length"));
                    }
                    bytes.extend_from_slice(&piece);
                }
                bytes.freeze()
            }
        };
        if bytes.len() as u64 == length {
            Ok(bytes)
        } else {
            Err(generic("the response is truncated"))
        }
    }

    /// Reads an object of at most `limit` bytes.
    pub async fn get(&self, key: &str, limit: u64) -> Result<Bytes, StoreError> {
        self.read(key, limit).await.map(|(bytes, _)| bytes)
    }

    /// Reads an object of at most `limit` bytes, with its ETag and version.
    async fn read(&self, key: &str, limit: u64) -> Result<(Bytes, Tags), StoreError> {
        let path = self.path(key);
        let clock = &self.clock(0);
        let read = self.attempt(key, clock, || async {
            add(&self.counters.gets, 1);
            let answer = self.store.get_opts(&path, GetOptions::default()).await?;
            let size = answer.meta.size;
            if size > limit {
                // The inner error is final: only outer errors are retried.
                return Ok(Err(size));
            }
            let tags = (answer.meta.e_tag.clone(), answer.meta.version.clone());
            let since = Instant::now();
            self.throttle(size).await;
            // Waiting for the bandwidth limit is not a stall of the store.
            clock.excuse(since.elapsed());
            let bytes = self.body(answer, size, clock).await?;
            Ok(Ok((bytes, tags)))
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

    /// Reads a range of an object. Fails if the response is shorter.
    async fn read_range(
        &self,
        path: &Path,
        range: &Range<u64>,
        clock: &StallClock,
    ) -> Result<Bytes, Error> {
        add(&self.counters.gets, 1);
        let options = GetOptions {
            range: Some(GetRange::Bounded(range.clone())),
            ..GetOptions::default()
        };
        let answer = self.store.get_opts(path, options).await?;
        let expected = range.end.saturating_sub(range.start);
        let bytes = self.body(answer, expected, clock).await?;
        if bytes.len() as u64 == expected {
            Ok(bytes)
        } else {
            Err(generic("the response is truncated"))
        }
    }

    /// Reads a range of bytes of an object. A request without progress is hedged with a second one.
    pub async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, StoreError> {
        self.throttle(range.end.saturating_sub(range.start)).await;
        self.get_urgent(key, range).await
    }

    /// Like [`Self::get_range`], but ignores the bandwidth limit.
    pub async fn get_urgent(&self, key: &str, range: Range<u64>) -> Result<Bytes, StoreError> {
        let path = self.path(key);
        let hedge_after = self.settings.hedge_after;
        let clock = &self.clock(0);
        self.attempt(key, clock, || async {
            let first = self.read_range(&path, &range, clock);
            let Some(after) = hedge_after else {
                return first.await;
            };
            tokio::pin!(first);
            tokio::select! {
                biased;
                answer = &mut first => return answer,
                () = clock.quiet_for(after) => {}
            }
            add(&self.counters.hedges, 1);
            let second = self.read_range(&path, &range, clock);
            tokio::pin!(second);
            // The first successful response is used, and the other request is dropped.
            match futures_util::future::select(first, second).await {
                futures_util::future::Either::Left((Ok(bytes), _))
                | futures_util::future::Either::Right((Ok(bytes), _)) => Ok(bytes),
                futures_util::future::Either::Left((Err(_), second)) => second.await,
                futures_util::future::Either::Right((Err(_), first)) => first.await,
            }
        })
        .await
    }

    /// Writes an object, and repeats the write after temporary errors.
    async fn write(&self, key: &str, bytes: Bytes, mode: PutMode) -> Result<PutResult, StoreError> {
        if let Some(upload) = &self.upload {
            upload.take(bytes.len() as u64).await;
        }
        let path = self.path(key);
        let clock = self.clock(bytes.len() as u64);
        self.attempt(key, &clock, || async {
            add(&self.counters.puts, 1);
            add(&self.counters.bytes_written, bytes.len() as u64);
            let payload = PutPayload::from_bytes(bytes.clone());
            self.put_once(&path, payload, mode.clone()).await
        })
        .await
    }

    /// Writes an object, replacing an existing one.
    pub async fn put(&self, key: &str, bytes: Bytes) -> Result<(), StoreError> {
        self.write(key, bytes, PutMode::Overwrite).await.map(drop)
    }

    /// Creates an object. Returns false if it already exists, which may also mean that an earlier
    /// attempt succeeded but its response was lost.
    pub async fn create(&self, key: &str, bytes: Bytes) -> Result<bool, StoreError> {
        match self.write(key, bytes, PutMode::Create).await {
            Ok(_) => Ok(true),
            Err(StoreError::Conflict { .. }) => match self.head(key).await? {
                Some(_) => Ok(false),
                // A concurrent write conflicted with this one and failed.
                None => Err(StoreError::Conflict {
                    object: key.to_owned(),
                }),
            },
            Err(e) => Err(e),
        }
    }

    /// Returns size and time of an object, or `None` if it does not exist.
    pub async fn head(&self, key: &str) -> Result<Option<Listed>, StoreError> {
        let path = self.path(key);
        let clock = self.clock(0);
        let head = self.attempt(key, &clock, || async {
            add(&self.counters.heads, 1);
            self.store.head(&path).await
        });
        match head.await {
            Ok(meta) => Ok(Some(Listed {
                key: key.to_owned(),
                bytes: meta.size.min(MAX_OBJECT_BYTES),
                modified_ms: meta.last_modified.timestamp_millis(),
            })),
            Err(StoreError::Missing { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Removes an object. Succeeds if the object does not exist.
    pub async fn delete(&self, key: &str) -> Result<(), StoreError> {
        let path = self.path(key);
        let clock = self.clock(0);
        let removed = self.attempt(key, &clock, || async {
            add(&self.counters.deletes, 1);
            self.store.delete(&path).await
        });
        match removed.await {
            Err(StoreError::Missing { .. }) => Ok(()),
            other => other,
        }
    }

    /// Runs `work` for each of `items`, several concurrently, and stops at the first error.
    pub(crate) async fn each<I, F, R>(&self, items: I, work: F) -> Result<(), StoreError>
    where
        I: IntoIterator,
        F: FnMut(I::Item) -> R,
        R: Future<Output = Result<(), StoreError>>,
    {
        // Collect the futures first: the compiler cannot prove that a lazy stream here is `Send`.
        let requests: Vec<R> = items.into_iter().map(work).collect();
        futures_util::stream::iter(requests)
            .buffer_unordered(self.settings.concurrency.max(1))
            .try_collect()
            .await
    }
}

/// Returns the delay after a failed attempt. It doubles with each attempt, up to [`MAX_BACKOFF`].
fn backoff(attempt: u32) -> Duration {
    let base = FIRST_BACKOFF
        .saturating_mul(1 << attempt.min(10))
        .min(MAX_BACKOFF);
    let random = crate::data_keys::random::<1>().map_or(128, |[byte]| byte);
    // The delay is random, between half and all of the base, so that requests that failed together
    // are not repeated together.
    base / 2 + base * u32::from(random) / 512
}

/// Returns the time that `units` take at a rate of `per_second`.
fn time_of(units: u64, per_second: u64) -> Duration {
    Duration::from_micros(units.saturating_mul(1_000_000) / per_second)
}
