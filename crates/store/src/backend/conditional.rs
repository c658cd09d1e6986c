//! Conditional writes, which succeed only if no other host has written the object meanwhile.
//!
//! A store may execute a write whose response is lost. The content of each write must therefore be
//! unique (random nonce or random bytes). The writer then recognises its own write when it reads
//! the object back, and an ETag never returns to an earlier value.

use super::{Backend, Tags};
use crate::StoreError;
use crate::data_keys::random;
use bytes::Bytes;
use object_store::path::Path;
use object_store::{
    Error, ObjectStore, ObjectStoreExt, PutMode, PutPayload, PutResult, UpdateVersion,
};

/// Maximum number of attempts at a conditional write that is rejected although the object did not
/// change.
const WRITE_ATTEMPTS: usize = 3;

/// Object in each store that is used to test conditional writes.
const CHECKED: &str = "conditions";
/// Maximum size in bytes of that object.
const MAX_CHECKED_BYTES: u64 = 64;

/// Version of an object, as the store assigned it. Versions have no order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectVersion(UpdateVersion);

impl ObjectVersion {
    /// Returns the version as the store wrote it: the ETag.
    #[must_use]
    pub fn text(&self) -> &str {
        let UpdateVersion { e_tag, version } = &self.0;
        e_tag.as_deref().or(version.as_deref()).unwrap_or("")
    }
}

/// Object with its version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versioned {
    /// Content.
    pub bytes: Bytes,
    /// Version, for [`Backend::replace`].
    pub version: ObjectVersion,
}

/// Result of a conditional write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Written {
    /// The object has the new content, and this version.
    Done(ObjectVersion),
    /// Another writer was first. Contains the current object; `None` if it does not exist.
    Lost(Option<Versioned>),
}

impl Written {
    /// Returns the version of a successful write.
    pub fn done(self) -> Option<ObjectVersion> {
        match self {
            Self::Done(version) => Some(version),
            Self::Lost(_) => None,
        }
    }
}

impl Backend {
    /// Checks that the store implements conditional writes.
    ///
    /// # Errors
    /// [`StoreError::NoConditions`] if it does not.
    pub async fn check_conditions(&self) -> Result<(), StoreError> {
        let ignored = || StoreError::NoConditions {
            object: CHECKED.to_owned(),
        };
        let created = self.create_versioned(CHECKED, content()?, MAX_CHECKED_BYTES);
        let current = match created.await? {
            Written::Done(version) => version,
            Written::Lost(Some(current)) => current.version,
            // The store rejected the creation, but the object does not exist. No host removes the
            // object.
            Written::Lost(None) => return Err(ignored()),
        };
        // The object exists: a second creation must fail.
        if self.create(CHECKED, content()?).await? {
            return Err(ignored());
        }
        // Other hosts may check concurrently. A replacement that loses against their writes also
        // proves that the store compares versions.
        let replaced = self.replace(CHECKED, content()?, &current, MAX_CHECKED_BYTES);
        if let Written::Lost(None) = replaced.await? {
            return Err(ignored());
        }
        // This host or another one has replaced `current`: a write that expects it must fail.
        match self
            .replace(CHECKED, content()?, &current, MAX_CHECKED_BYTES)
            .await?
        {
            Written::Lost(Some(_)) => Ok(()),
            Written::Done(_) | Written::Lost(None) => Err(ignored()),
        }
    }

    /// Sends one write request.
    ///
    /// All backends replace conditionally, except a directory that was not opened by its URL. Only
    /// one process uses such a directory, so a mutex orders its replacements.
    pub(super) async fn put_once(
        &self,
        path: &Path,
        payload: PutPayload,
        mode: PutMode,
    ) -> Result<PutResult, Error> {
        let put = self
            .store
            .put_opts(path, payload.clone(), mode.clone().into());
        let expected = match (put.await, mode) {
            (Err(Error::NotImplemented { .. }), PutMode::Update(expected)) => expected,
            (put, _) => return put,
        };
        let _guard = self.replacing.lock().await;
        if self.store.head(path).await?.e_tag != expected.e_tag {
            return Err(Error::Precondition {
                path: path.to_string(),
                source: "the object was replaced".into(),
            });
        }
        self.store
            .put_opts(path, payload, PutMode::Overwrite.into())
            .await
    }

    /// Reads an object of at most `limit` bytes with its version; `None` if it does not exist.
    pub async fn get_versioned(
        &self,
        key: &str,
        limit: u64,
    ) -> Result<Option<Versioned>, StoreError> {
        let read = match self.read(key, limit).await {
            Err(StoreError::Missing { .. }) => return Ok(None),
            other => other?,
        };
        Ok(Some(Versioned {
            version: version(key, read.1)?,
            bytes: read.0,
        }))
    }

    /// Creates an object if it does not exist. `bytes` must be unique. An existing object has at
    /// most `limit` bytes.
    ///
    /// # Errors
    /// [`StoreError::OutcomeUnknown`] if the object may have been written.
    /// [`StoreError::NoConditions`] if the store has no versions of objects.
    pub async fn create_versioned(
        &self,
        key: &str,
        bytes: Bytes,
        limit: u64,
    ) -> Result<Written, StoreError> {
        self.write_if(key, bytes, None, limit).await
    }

    /// Replaces an object if its version still is `expected`. `bytes` must be unique. The current
    /// object has at most `limit` bytes.
    ///
    /// # Errors
    /// [`StoreError::OutcomeUnknown`] if the object may have been replaced.
    /// [`StoreError::NoConditions`] if the store has no versions of objects.
    pub async fn replace(
        &self,
        key: &str,
        bytes: Bytes,
        expected: &ObjectVersion,
        limit: u64,
    ) -> Result<Written, StoreError> {
        self.write_if(key, bytes, Some(expected), limit).await
    }

    /// Writes an object if its version is `expected`. If `expected` is `None`, the object must not
    /// exist.
    async fn write_if(
        &self,
        key: &str,
        bytes: Bytes,
        expected: Option<&ObjectVersion>,
        limit: u64,
    ) -> Result<Written, StoreError> {
        let mode = match expected {
            Some(expected) => PutMode::Update(expected.0.clone()),
            None => PutMode::Create,
        };
        let unknown = |e: StoreError| {
            if e.is_unavailable() {
                let reason = match e {
                    StoreError::Unavailable { reason, .. } => reason,
                    e => e.to_string(),
                };
                StoreError::OutcomeUnknown {
                    object: key.to_owned(),
                    reason,
                }
            } else {
                e
            }
        };
        for _ in 0..WRITE_ATTEMPTS {
            match self.write(key, bytes.clone(), mode.clone()).await {
                Ok(put) => return version(key, (put.e_tag, put.version)).map(Written::Done),
                Err(StoreError::Conflict { .. } | StoreError::Missing { .. }) => {}
                Err(e) => return Err(unknown(e)),
            }
            let current = self.get_versioned(key, limit).await.map_err(unknown)?;
            match current {
                // An earlier attempt succeeded, but its response was lost.
                Some(current) if current.bytes == bytes => {
                    return Ok(Written::Done(current.version));
                }
                // Concurrent writes may all be rejected, with none of them succeeding.
                current if current.as_ref().map(|c| &c.version) == expected => {}
                current => return Ok(Written::Lost(current)),
            }
        }
        // An unchanged object proves nothing: an earlier attempt may still arrive at the store.
        Err(StoreError::OutcomeUnknown {
            object: key.to_owned(),
            reason: "the store rejects the write although the object did not change".to_owned(),
        })
    }
}

/// Returns unique content for a check.
fn content() -> Result<Bytes, StoreError> {
    let bytes = random::<32>().map_err(StoreError::damaged(CHECKED))?;
    Ok(Bytes::copy_from_slice(&bytes))
}

/// Returns the version of an object from its tags.
fn version(key: &str, (e_tag, version): Tags) -> Result<ObjectVersion, StoreError> {
    match e_tag.as_deref().map(|tag| tag.trim_matches('"')) {
        None | Some("") => Err(StoreError::NoConditions {
            object: key.to_owned(),
        }),
        Some(_) => Ok(ObjectVersion(UpdateVersion { e_tag, version })),
    }
}
