//! [`SealedRecords`]: records that are encrypted before they reach the store, and that detect if
//! the store returns to an older state, for example after a restore from a backup.

use super::{MAX_RECORD_BYTES, RecordError, RecordKey, Records, Version, Versioned, Written};
use bytes::Bytes;
use jiffy_store::{StoreError, Tenant};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Maximum number of records whose counters are remembered.
const MAX_REMEMBERED: usize = 65_536;

/// Records whose content is encrypted and authenticated together with the key of the record. Each
/// write increments a counter in the content, so that an older copy is rejected.
#[derive(Debug)]
pub struct SealedRecords {
    records: Arc<dyn Records>,
    keys: Arc<Tenant>,
    /// Highest counter that this process has seen of each record.
    seen: Mutex<HashMap<RecordKey, u64>>,
    /// The back end did not answer the last request.
    has_failed: AtomicBool,
}

/// Record that was read or written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Decrypted content.
    pub content: Vec<u8>,
    /// Number of writes of the record, which is encrypted with the content.
    counter: u64,
    version: Version,
}

impl Record {
    /// Returns the number of writes of the record.
    pub fn counter(&self) -> u64 {
        self.counter
    }

    /// Returns a short text that identifies this version of the record on all hosts.
    pub fn version_id(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(self.counter.to_le_bytes());
        hash.update(self.version.text());
        hash.finalize().into()
    }
}

/// Conditional write that was prepared and may be sent several times. At most one of the attempts
/// changes the record.
#[derive(Debug, Clone)]
pub struct PendingWrite {
    key: RecordKey,
    value: Bytes,
    content: Vec<u8>,
    /// Counter of the record after the write.
    counter: u64,
    /// Version that the write replaces. `None` if the record must not exist.
    expected: Option<Version>,
}

/// Result of a conditional write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The record has the new content.
    Done(Record),
    /// Another writer was first. Contains the current record; `None` if it does not exist.
    Lost(Option<Record>),
}

impl SealedRecords {
    /// Encrypts `records` with the keys of `tenant`.
    pub fn new(records: Arc<dyn Records>, tenant: Arc<Tenant>) -> Self {
        Self {
            records,
            keys: tenant,
            seen: Mutex::default(),
            has_failed: AtomicBool::new(false),
        }
    }

    /// Returns whether the back end answered the last request. True before the first request.
    pub fn is_reachable(&self) -> bool {
        !self.has_failed.load(Ordering::Relaxed)
    }

    /// Notes whether the back end has answered a request.
    fn note<T>(&self, result: Result<T, RecordError>) -> Result<T, RecordError> {
        let has_failed = matches!(
            result,
            Err(RecordError::Unavailable { .. } | RecordError::Unknown { .. })
        );
        self.has_failed.store(has_failed, Ordering::Relaxed);
        result
    }

    /// Returns the encrypted records.
    pub fn records(&self) -> &Arc<dyn Records> {
        &self.records
    }

    /// Reads a record. `None` if it does not exist.
    pub async fn get(&self, key: &RecordKey) -> Result<Option<Record>, RecordError> {
        let known = self.known(key);
        let read = self.note(self.records.get(key).await)?;
        self.open(key, read, known)
    }

    /// Prepares the creation of a record.
    pub fn create(&self, key: &RecordKey, content: Vec<u8>) -> Result<PendingWrite, RecordError> {
        self.prepare(key, content, 1, None)
    }

    /// Prepares the replacement of `current`, as it was read or written.
    pub fn replace(
        &self,
        key: &RecordKey,
        content: Vec<u8>,
        current: &Record,
    ) -> Result<PendingWrite, RecordError> {
        let counter = current.counter.checked_add(1);
        let counter = counter.ok_or_else(|| damaged(key, "its counter is exhausted"))?;
        self.prepare(key, content, counter, Some(current.version.clone()))
    }

    /// Encrypts the content of a record together with a counter, which reveals a store that
    /// returned to an older state.
    fn prepare(
        &self,
        key: &RecordKey,
        content: Vec<u8>,
        counter: u64,
        expected: Option<Version>,
    ) -> Result<PendingWrite, RecordError> {
        let plain = [&counter.to_le_bytes()[..], &content].concat();
        let sealed = self.keys.seal_record(key.as_str(), &plain);
        let value = Bytes::from(sealed.map_err(|e| damaged(key, e))?);
        super::check_size(key, &value)?;
        Ok(PendingWrite {
            key: key.clone(),
            value,
            content,
            counter,
            expected,
        })
    }

    /// Sends a write. After [`RecordError::Unknown`] the caller must send the same write again
    /// until its outcome is known: the record may already have the new content.
    pub async fn send(&self, write: &PendingWrite) -> Result<Outcome, RecordError> {
        let key = &write.key;
        let known = self.known(key);
        let written = match &write.expected {
            Some(version) => self.records.replace(key, write.value.clone(), version),
            None => self.records.create(key, write.value.clone()),
        };
        match self.note(written.await)? {
            Written::Done(version) => {
                self.remember(key, write.counter);
                Ok(Outcome::Done(Record {
                    content: write.content.clone(),
                    counter: write.counter,
                    version,
                }))
            }
            Written::Lost(current) => self.open(key, current, known).map(Outcome::Lost),
        }
    }

    /// Returns the highest counter of a record that this process has seen. A request that starts
    /// now must not return an older version. A request that has started before may do so, because
    /// the record may have been written in the meantime.
    fn known(&self, key: &RecordKey) -> u64 {
        self.seen.lock().get(key).copied().unwrap_or(0)
    }

    /// Decrypts a record. Rejects it if it is older than the version `known`, which this process
    /// had seen before it read the record.
    fn open(
        &self,
        key: &RecordKey,
        read: Option<Versioned>,
        known: u64,
    ) -> Result<Option<Record>, RecordError> {
        let Some(read) = read else {
            if known > 0 {
                return Err(regressed(key, 0, known));
            }
            return Ok(None);
        };
        if read.value.len() > MAX_RECORD_BYTES {
            return Err(damaged(key, "it is too long"));
        }
        let plain = self.keys.open_record(key.as_str(), &read.value);
        let plain = plain.map_err(|e| match e {
            StoreError::Damaged { reason, .. } => damaged(key, reason),
            e => damaged(key, e),
        })?;
        let (counter, content) = plain
            .split_first_chunk()
            .ok_or_else(|| damaged(key, "it is truncated"))?;
        let counter = u64::from_le_bytes(*counter);
        if counter < known {
            return Err(regressed(key, counter, known));
        }
        self.remember(key, counter);
        Ok(Some(Record {
            content: content.to_vec(),
            counter,
            version: read.version,
        }))
    }

    /// Remembers the highest counter of a record, to detect a store that returns an older version.
    fn remember(&self, key: &RecordKey, counter: u64) {
        let mut seen = self.seen.lock();
        // A fleet has many heads (records of the owners of sandboxes). They contain revisions of
        // their own, so this map need not remember all of them.
        if seen.len() < MAX_REMEMBERED || seen.contains_key(key) {
            let known = seen.entry(key.clone()).or_default();
            *known = counter.max(*known);
        }
    }

    /// Forgets which version of a record this process has seen: an operator has restored the
    /// records from a backup.
    pub fn forget(&self, key: &RecordKey) {
        self.seen.lock().remove(key);
    }

    /// Forgets which versions this process has seen: an operator has restored the records from a
    /// backup.
    pub fn forget_all(&self) {
        self.seen.lock().clear();
    }

    /// Removes a record in a final state.
    pub async fn purge(&self, key: &RecordKey) -> Result<(), RecordError> {
        self.records.purge(key).await?;
        self.seen.lock().remove(key);
        Ok(())
    }
}

fn damaged(key: &RecordKey, reason: impl ToString) -> RecordError {
    RecordError::Damaged {
        record: key.clone(),
        reason: reason.to_string(),
    }
}

fn regressed(key: &RecordKey, counter: u64, known: u64) -> RecordError {
    RecordError::Regressed {
        record: key.clone(),
        reason: format!("it was written {counter} times, but {known} writes were seen"),
    }
}
