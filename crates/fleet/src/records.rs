//! Versioned records with conditional writes.
//!
//! A write may be executed although its response is lost. The content of each write must therefore
//! be unique, which [`SealedRecords`] ensures with a random nonce. A back end reads a record back
//! after a failed attempt: its own bytes mean success, and another version means that another
//! writer was first. An unchanged record proves nothing, because the attempt may still arrive, so
//! the back end repeats the same conditional write, of which at most one can succeed.
//!
//! The *head* of a sandbox is the record in the store that decides which host of a fleet may run
//! the sandbox.

mod error;
#[cfg(feature = "client")]
mod etcd;
#[cfg_attr(not(feature = "client"), allow(dead_code))] // Decoded by fuzz targets only.
mod etcd_answer;
mod key;
mod memory;
mod sealed;
mod store;

use async_trait::async_trait;
use bytes::Bytes;
use jiffy_store::ObjectVersion;
use std::fmt;
use std::time::Duration;

pub use error::RecordError;
#[cfg(feature = "client")]
pub use etcd::{EtcdRecords, EtcdSettings, EtcdUrl};
pub use etcd_answer::decode_answer;
pub use key::RecordKey;
pub use memory::{Fault, MemoryRecords};
pub use sealed::{Outcome, PendingWrite, Record, SealedRecords};
pub use store::StoreRecords;

/// Maximum size in bytes of a record.
pub const MAX_RECORD_BYTES: usize = 1 << 20;
/// Maximum duration of one attempt at a request.
pub(crate) const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum duration of a call, with all of its attempts.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(6);
/// Maximum number of keys in a page of a listing.
pub const MAX_PAGE_KEYS: usize = 1000;

/// Versioned records. All calls are linearizable per key, and end within 6 s.
///
/// Locks, and the tokens with which hosts join the fleet, are records too. A lock is released, and
/// a token is used, by a replacement of its record, because a removal is not conditional.
#[async_trait]
pub trait Records: fmt::Debug + Send + Sync {
    /// Reads a record. `None` if it does not exist.
    async fn get(&self, key: &RecordKey) -> Result<Option<Versioned>, RecordError>;

    /// Writes a record that must not exist.
    ///
    /// # Errors
    /// [`RecordError::Unknown`] if the record may have been written.
    async fn create(&self, key: &RecordKey, value: Bytes) -> Result<Written, RecordError>;

    /// Replaces a record whose version must still be `version`.
    ///
    /// # Errors
    /// [`RecordError::Unknown`] if the record may have been replaced.
    async fn replace(
        &self,
        key: &RecordKey,
        value: Bytes,
        version: &Version,
    ) -> Result<Written, RecordError>;

    /// Lists at most `limit` keys below `prefix`, in ascending order, after the key `after`.
    /// `limit` is at most [`MAX_PAGE_KEYS`].
    async fn list(
        &self,
        prefix: &RecordKey,
        after: Option<&RecordKey>,
        limit: usize,
    ) -> Result<Page, RecordError>;

    /// Removes a record in a final state, on which no decision depends: a used token, or
    /// the head of a sandbox that was killed long ago.
    async fn purge(&self, key: &RecordKey) -> Result<(), RecordError>;
}

/// Version of a record, as its back end assigned it. Versions have no order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version(pub(crate) BackendVersion);

impl Version {
    /// Returns the version as text.
    pub(crate) fn text(&self) -> String {
        match &self.0 {
            BackendVersion::Object(version) => version.text().to_owned(),
            #[cfg(feature = "client")]
            BackendVersion::Revision(revision) => revision.to_string(),
            BackendVersion::Write(write) => write.to_string(),
        }
    }
}

/// Version in the terms of a back end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BackendVersion {
    /// ETag of an object.
    Object(ObjectVersion),
    /// Revision of etcd at which the record was written.
    #[cfg(feature = "client")]
    Revision(i64),
    /// Number of the write in memory.
    Write(u64),
}

/// Record with its version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versioned {
    /// Content.
    pub value: Bytes,
    /// Version, for [`Records::replace`].
    pub version: Version,
}

/// Result of a conditional write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Written {
    /// The record has the new content, and this version.
    Done(Version),
    /// Another writer was first. Contains the current record; `None` if it does not exist.
    Lost(Option<Versioned>),
}

/// Page of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// Keys in ascending order.
    pub keys: Vec<RecordKey>,
    /// True if further keys may follow the last one.
    pub more: bool,
}

/// Checks the size of a record before it is written.
pub(crate) fn check_size(key: &RecordKey, value: &Bytes) -> Result<(), RecordError> {
    if value.len() > MAX_RECORD_BYTES {
        return Err(RecordError::TooLarge {
            record: key.clone(),
            bytes: value.len(),
        });
    }
    Ok(())
}

/// Returns the error of a version that another back end assigned.
pub(crate) fn foreign_version(key: &RecordKey) -> RecordError {
    RecordError::Damaged {
        record: key.clone(),
        reason: "its version belongs to another kind of records".to_owned(),
    }
}
