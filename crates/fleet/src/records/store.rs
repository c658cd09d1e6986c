//! Records in the object store, with its conditional writes (`If-Match`, `If-None-Match`).

use super::{
    BackendVersion, MAX_PAGE_KEYS, MAX_RECORD_BYTES, Page, RecordError, RecordKey, Records,
    Version, Versioned, Written, check_size,
};
use async_trait::async_trait;
use bytes::Bytes;
use jiffy_store::{Backend, BackendSettings, StoreError};

/// Records as objects of a store, written with `If-None-Match` and `If-Match`.
#[derive(Debug)]
pub struct StoreRecords {
    backend: Backend,
}

impl StoreRecords {
    /// Uses the store of `backend`, with the limits for records.
    pub fn new(backend: &Backend) -> Self {
        Self::with_settings(backend, BackendSettings::control())
    }

    /// Like [`Self::new`], with other limits.
    pub fn with_settings(backend: &Backend, settings: BackendSettings) -> Self {
        Self {
            backend: backend.with_settings(settings),
        }
    }
}

#[async_trait]
impl Records for StoreRecords {
    async fn get(&self, key: &RecordKey) -> Result<Option<Versioned>, RecordError> {
        let read = self
            .backend
            .get_versioned(key.as_str(), MAX_RECORD_BYTES as u64);
        let read = read.await.map_err(|e| record_error(key, e))?;
        Ok(read.map(versioned))
    }

    async fn create(&self, key: &RecordKey, value: Bytes) -> Result<Written, RecordError> {
        check_size(key, &value)?;
        let limit = MAX_RECORD_BYTES as u64;
        let written = self.backend.create_versioned(key.as_str(), value, limit);
        written.await.map(outcome).map_err(|e| record_error(key, e))
    }

    async fn replace(
        &self,
        key: &RecordKey,
        value: Bytes,
        version: &Version,
    ) -> Result<Written, RecordError> {
        check_size(key, &value)?;
        let BackendVersion::Object(expected) = &version.0 else {
            return Err(super::foreign_version(key));
        };
        let limit = MAX_RECORD_BYTES as u64;
        let written = self.backend.replace(key.as_str(), value, expected, limit);
        written.await.map(outcome).map_err(|e| record_error(key, e))
    }

    async fn list(
        &self,
        prefix: &RecordKey,
        after: Option<&RecordKey>,
        limit: usize,
    ) -> Result<Page, RecordError> {
        let limit = limit.min(MAX_PAGE_KEYS);
        let after = after.map(RecordKey::as_str);
        let listed = self.backend.list_page(prefix.as_str(), after, limit);
        let listed = listed.await.map_err(|e| record_error(prefix, e))?;
        let more = listed.len() == limit;
        let keys = listed.iter().map(|object| object.key.parse());
        Ok(Page {
            keys: keys.collect::<Result<_, _>>()?,
            more,
        })
    }

    async fn purge(&self, key: &RecordKey) -> Result<(), RecordError> {
        let removed = self.backend.delete(key.as_str()).await;
        removed.map_err(|e| record_error(key, e))
    }
}

fn versioned(object: jiffy_store::Versioned) -> Versioned {
    Versioned {
        value: object.bytes,
        version: Version(BackendVersion::Object(object.version)),
    }
}

fn outcome(written: jiffy_store::Written) -> Written {
    match written {
        jiffy_store::Written::Done(version) => {
            Written::Done(Version(BackendVersion::Object(version)))
        }
        jiffy_store::Written::Lost(current) => Written::Lost(current.map(versioned)),
    }
}

/// Converts an error of the store.
fn record_error(key: &RecordKey, e: StoreError) -> RecordError {
    let record = key.clone();
    let reason = e.to_string();
    match e {
        // These reasons do not repeat the key and the remedy.
        StoreError::OutcomeUnknown { reason, .. } => RecordError::Unknown { record, reason },
        StoreError::Unavailable { reason, .. } | StoreError::Absent { reason, .. } => {
            RecordError::Unavailable { record, reason }
        }
        e if e.is_unavailable() => RecordError::Unavailable { record, reason },
        StoreError::Denied { .. } => RecordError::Denied { reason },
        StoreError::NoConditions { .. } => RecordError::Unsuitable(reason),
        _ => RecordError::Damaged { record, reason },
    }
}
