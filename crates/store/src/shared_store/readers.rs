//! Readers: hosts that have not fetched a snapshot completely.
//!
//! The *root* of a snapshot is the hash that identifies it in the store. A *tenant* is an owner of
//! snapshots in the store, usually an API key. The objects of a tenant are encrypted with its keys.
//!
//! A host that restores lazily writes `readers/<root>/<id of the host>` and renews the object
//! periodically. Garbage collection does not remove a snapshot with readers, even if it was marked
//! for removal. A reader that was not renewed for [`READER_TIME`], by the clock of the store, is
//! expired.

use crate::data_keys::Hash;
use crate::shared_store::SharedStore;
use crate::tenant::Tenant;
use crate::{Listed, StoreError};
use std::time::Duration;

/// Time after which a reader expires unless renewed.
pub const READER_TIME: Duration = Duration::from_secs(7 * 24 * 3600);
/// Folder of a tenant's readers.
pub(crate) const READERS: &str = "readers";

/// Readers of a tenant's snapshots.
#[derive(Debug, Default)]
pub(crate) struct Readers {
    /// Roots of the snapshots with unexpired readers.
    pub roots: Vec<Hash>,
    /// Keys of expired readers.
    pub ended: Vec<String>,
}

impl SharedStore {
    /// Registers `host` as a reader of snapshot `root`, or renews its registration. The id of a
    /// host consists of letters and digits.
    pub async fn set_reader(
        &self,
        tenant: &Tenant,
        root: Hash,
        host: &str,
    ) -> Result<(), StoreError> {
        let reads = bytes::Bytes::from_static(b"reads");
        self.backend
            .put(&tenant.reader_key(&root, host), reads)
            .await
    }

    /// Removes the registration of [`Self::set_reader`].
    pub async fn remove_reader(
        &self,
        tenant: &Tenant,
        root: Hash,
        host: &str,
    ) -> Result<(), StoreError> {
        self.backend.delete(&tenant.reader_key(&root, host)).await
    }

    /// Returns the readers at the store's time `now`, in milliseconds since 1970. Readers that were
    /// not renewed for `time` are expired.
    pub(crate) async fn readers(
        &self,
        tenant: &Tenant,
        now: i64,
        time: Duration,
    ) -> Result<Readers, StoreError> {
        let time = i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
        let mut readers = Readers::default();
        for reader in self.backend.list(&tenant.key(READERS)).await? {
            if now - reader.modified_ms > time {
                readers.ended.push(reader.key);
            } else {
                readers.roots.extend(root_of(&reader));
            }
        }
        Ok(readers)
    }
}

fn root_of(reader: &Listed) -> Option<Hash> {
    let (folder, _) = reader.key.rsplit_once('/')?;
    folder.rsplit('/').next()?.parse().ok()
}
