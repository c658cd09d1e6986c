//! Records in the memory of a process, with injected faults, for tests and simulations.

use super::{
    BackendVersion, MAX_PAGE_KEYS, Page, RecordError, RecordKey, Records, Version, Versioned,
    Written, check_size,
};
use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// Fault of the next requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The request is executed, but its response is lost.
    LoseAnswer,
    /// The request is not executed.
    Unavailable,
    /// The request is executed after this time, even if its sender has given up.
    Delay(Duration),
    /// Another client replaces all records before the request is executed.
    Precede,
}

/// Records, and faults that a test has requested.
#[derive(Debug, Default)]
struct State {
    /// Records with their versions.
    records: BTreeMap<RecordKey, (u64, Bytes)>,
    /// Number of writes, from which versions follow.
    writes: u64,
    /// Requests of all clients.
    requests: u64,
    /// Fault, and number of requests that it affects.
    fault: Option<(Fault, usize)>,
    /// Fault of all writes.
    write_fault: Option<Fault>,
    /// Content that another client writes to all records before the next write.
    content: Option<Bytes>,
}

/// Client of records in memory. Clones are clients of the same records.
#[derive(Debug, Clone)]
pub struct MemoryRecords {
    state: Arc<Mutex<State>>,
    /// Maximum duration of one attempt.
    attempt: Duration,
    /// Maximum duration of a call with all its attempts.
    call: Duration,
}

impl Default for MemoryRecords {
    fn default() -> Self {
        Self {
            state: Arc::default(),
            attempt: super::ATTEMPT_TIMEOUT,
            call: super::CALL_TIMEOUT,
        }
    }
}

impl MemoryRecords {
    /// Returns a client of the same records with other timeouts of an attempt and a call.
    #[must_use]
    pub fn with_timeouts(&self, attempt: Duration, call: Duration) -> Self {
        Self {
            state: self.state.clone(),
            attempt,
            call,
        }
    }

    /// Injects a fault into the next `requests` requests of all clients.
    pub fn inject(&self, fault: Fault, requests: usize) {
        self.state.lock().fault = Some((fault, requests));
    }

    /// Injects a fault into all writes of all clients.
    pub fn inject_writes(&self, fault: Fault) {
        self.state.lock().write_fault = Some(fault);
    }

    /// Lets another client replace all records by this content before the next write.
    pub fn inject_content(&self, content: Bytes) {
        self.state.lock().content = Some(content);
    }

    /// Returns the number of requests of all clients so far.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.state.lock().requests
    }

    /// Ends all faults.
    pub fn heal(&self) {
        let mut state = self.state.lock();
        (state.fault, state.write_fault) = (None, None);
    }

    /// Fault that a test has requested for the next request.
    fn next_fault(&self, is_write: bool) -> Option<Fault> {
        let mut state = self.state.lock();
        state.requests += 1;
        if is_write && state.write_fault.is_some() {
            return state.write_fault;
        }
        let (fault, requests) = state.fault?;
        state.fault = (requests > 1).then(|| (fault, requests - 1));
        Some(fault)
    }

    /// Sends one request. `None` if no response arrives.
    async fn send<T: Send + 'static>(
        &self,
        request: impl FnOnce(&mut State) -> T + Send + 'static,
        is_write: bool,
    ) -> Option<T> {
        match self.next_fault(is_write) {
            None => Some(request(&mut self.state.lock())),
            Some(Fault::Unavailable) => None,
            Some(Fault::LoseAnswer) => {
                request(&mut self.state.lock());
                None
            }
            Some(Fault::Precede) => {
                let mut state = self.state.lock();
                state.replace_all(None);
                Some(request(&mut state))
            }
            Some(Fault::Delay(time)) => {
                let state = self.state.clone();
                // The request arrives even if the call has ended before.
                let late = tokio::spawn(async move {
                    sleep(time).await;
                    request(&mut state.lock())
                });
                timeout(self.attempt, late).await.ok()?.ok()
            }
        }
    }

    /// Sends a request until a response arrives or the call's time is over.
    async fn call<T: Send + 'static>(
        &self,
        request: impl Fn(&mut State) -> T + Clone + Send + 'static,
        is_write: bool,
    ) -> Option<T> {
        let deadline = Instant::now() + self.call;
        while Instant::now() < deadline {
            if let Some(answer) = self.send(request.clone(), is_write).await {
                return Some(answer);
            }
            sleep_until(deadline.min(Instant::now() + self.attempt / 10)).await;
        }
        None
    }

    /// Writes a record if its version is `expected`.
    async fn write(
        &self,
        key: &RecordKey,
        value: Bytes,
        expected: Option<u64>,
    ) -> Result<Written, RecordError> {
        check_size(key, &value)?;
        let own = key.clone();
        let written = self.call(move |state| state.write_if(&own, &value, expected), true);
        written.await.ok_or_else(|| RecordError::Unknown {
            record: key.clone(),
            reason: "no response in time".to_owned(),
        })
    }
}

impl State {
    /// Replaces each record by `content`. With `None`, each record retains its content, and only
    /// its version changes.
    fn replace_all(&mut self, content: Option<&Bytes>) {
        for (version, value) in self.records.values_mut() {
            self.writes += 1;
            *version = self.writes;
            if let Some(content) = content {
                value.clone_from(content);
            }
        }
    }

    /// Writes a record if its version is the expected one, as a compare-and-swap. A repeated write
    /// succeeds.
    fn write_if(&mut self, key: &RecordKey, value: &Bytes, expected: Option<u64>) -> Written {
        if let Some(content) = self.content.take() {
            self.replace_all(Some(&content));
        }
        let current = self.records.get(key);
        match current {
            // An earlier attempt succeeded, but its response was lost.
            Some((version, bytes)) if bytes == value => return Written::Done(number(*version)),
            current if current.map(|(version, _)| *version) == expected => {}
            current => return Written::Lost(current.map(versioned)),
        }
        self.writes += 1;
        self.records
            .insert(key.clone(), (self.writes, value.clone()));
        Written::Done(number(self.writes))
    }
}

fn number(write: u64) -> Version {
    Version(BackendVersion::Write(write))
}

fn versioned((version, value): &(u64, Bytes)) -> Versioned {
    Versioned {
        value: value.clone(),
        version: number(*version),
    }
}

fn unavailable(key: &RecordKey) -> RecordError {
    RecordError::Unavailable {
        record: key.clone(),
        reason: "no response in time".to_owned(),
    }
}

#[async_trait]
impl Records for MemoryRecords {
    async fn get(&self, key: &RecordKey) -> Result<Option<Versioned>, RecordError> {
        let own = key.clone();
        let read = self.call(move |state| state.records.get(&own).map(versioned), false);
        read.await.ok_or_else(|| unavailable(key))
    }

    async fn create(&self, key: &RecordKey, value: Bytes) -> Result<Written, RecordError> {
        self.write(key, value, None).await
    }

    async fn replace(
        &self,
        key: &RecordKey,
        value: Bytes,
        version: &Version,
    ) -> Result<Written, RecordError> {
        let BackendVersion::Write(expected) = version.0 else {
            return Err(super::foreign_version(key));
        };
        self.write(key, value, Some(expected)).await
    }

    async fn list(
        &self,
        prefix: &RecordKey,
        after: Option<&RecordKey>,
        limit: usize,
    ) -> Result<Page, RecordError> {
        let limit = limit.min(MAX_PAGE_KEYS);
        let (folder, after) = (format!("{prefix}/"), after.cloned());
        let listed = self.call(
            move |state| {
                let start = after.clone().map_or(Bound::Unbounded, Bound::Excluded);
                let keys = state.records.range((start, Bound::Unbounded));
                let keys = keys.map(|(key, _)| key);
                let keys = keys.filter(|key| key.as_str().starts_with(&folder));
                keys.take(limit).cloned().collect::<Vec<_>>()
            },
            false,
        );
        let keys = listed.await.ok_or_else(|| unavailable(prefix))?;
        Ok(Page {
            more: keys.len() == limit,
            keys,
        })
    }

    async fn purge(&self, key: &RecordKey) -> Result<(), RecordError> {
        let own = key.clone();
        let removed = self.call(
            move |state| {
                state.records.remove(&own);
            },
            true,
        );
        removed.await.ok_or_else(|| unavailable(key))
    }
}
