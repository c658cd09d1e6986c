//! Conditional writes, which succeed only if no other host has written the object meanwhile.

use super::{Backend, Tags};
use crate::StoreError;
use bytes::Bytes;
use object_store::path::Path;
use object_store::{
    Error, ObjectStore, ObjectStoreExt, PutMode, PutPayload, PutResult, UpdateVersion,
};

/// Attempts at a conditional replace that is rejected although the object did not change.
const REPLACE_ATTEMPTS: usize = 3;

/// Object with its version.
#[derive(Debug)]
pub(crate) struct Versioned {
    /// Content.
    pub bytes: Bytes,
    /// Version, for [`Backend::replace`].
    pub version: UpdateVersion,
}

/// Object in each store that is used to test conditional writes.
const CHECKED: &str = "conditions";

impl Backend {
    /// Checks that the store implements conditional writes.
    ///
    /// # Errors
    /// [`StoreError::NoConditions`] if it does not.
    pub(crate) async fn check_conditions(&self) -> Result<(), StoreError> {
        let content = Bytes::from_static(b"conditions");
        let is_new = self.create(CHECKED, content.clone()).await?;
        // A second creation must fail. A store that ignores the condition reports success.
        if is_new && self.create(CHECKED, content).await? {
            return Err(StoreError::NoConditions {
                object: CHECKED.to_owned(),
            });
        }
        Ok(())
    }

    /// Sends one write request.
    ///
    /// Only a directory that was not opened by its URL lacks conditional replace. A single process
    /// uses such a directory, so a mutex orders its replacements.
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
    pub(crate) async fn get_versioned(
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

    /// Replaces an object if its version still is `expected`. Returns the new version; `None` if
    /// another host replaced or removed the object meanwhile.
    ///
    /// # Errors
    /// [`StoreError::NoConditions`] if the store has no versions of objects.
    pub(crate) async fn replace(
        &self,
        key: &str,
        bytes: Bytes,
        expected: &UpdateVersion,
    ) -> Result<Option<UpdateVersion>, StoreError> {
        for _ in 0..REPLACE_ATTEMPTS {
            let mode = PutMode::Update(expected.clone());
            match self.write(key, bytes.clone(), mode).await {
                Ok(put) => return version(key, (put.e_tag, put.version)).map(Some),
                Err(StoreError::Conflict { .. } | StoreError::Missing { .. }) => {}
                Err(e) => return Err(e),
            }
            match self.get_versioned(key, bytes.len() as u64).await {
                // An earlier attempt succeeded, but its response was lost.
                Ok(Some(current)) if current.bytes == bytes => return Ok(Some(current.version)),
                // Concurrent writes may all be rejected, with none of them succeeding.
                Ok(Some(current)) if current.version == *expected => {}
                Ok(_) | Err(StoreError::TooLarge { .. }) => return Ok(None),
                Err(e) => return Err(e),
            }
        }
        Ok(None)
    }
}

/// Returns the version of an object from its tags.
fn version(key: &str, (e_tag, version): Tags) -> Result<UpdateVersion, StoreError> {
    match e_tag.as_deref().map(|tag| tag.trim_matches('"')) {
        None | Some("") => Err(StoreError::NoConditions {
            object: key.to_owned(),
        }),
        Some(_) => Ok(UpdateVersion { e_tag, version }),
    }
}
