//! Readers: hosts that need content of a snapshot which they have not fetched yet.
//!
//! `readers/<root>/<id of the host>` is written by a host that restores lazily, and again now and
//! then. What a reader needs is not collected, also after the snapshot was removed. A reader that
//! was not renewed for [`READER_TIME`], by the clock of the store, is none any more.

use crate::data_keys::Hash;
use crate::tenant::{SharedStore, Tenant};
use crate::{Listed, StoreError};
use std::time::Duration;

/// Time after which a reader that was not renewed is none any more.
pub const READER_TIME: Duration = Duration::from_secs(7 * 24 * 3600);
const READERS: &str = "readers";

/// Readers of a tenant's snapshots.
#[derive(Debug, Default)]
pub(crate) struct Readers {
    /// Snapshots that they need.
    pub roots: Vec<Hash>,
    /// Keys of readers that are none any more.
    pub ended: Vec<String>,
}

impl Tenant {
    fn reader_key(&self, root: &Hash, host: &str) -> String {
        self.key(&format!("{READERS}/{root}/{host}"))
    }
}

impl SharedStore {
    /// Says that `host` needs content of snapshot `root`; renews what it said before. The id of a
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

    /// Takes back what [`Self::set_reader`] said.
    pub async fn remove_reader(
        &self,
        tenant: &Tenant,
        root: Hash,
        host: &str,
    ) -> Result<(), StoreError> {
        self.backend.delete(&tenant.reader_key(&root, host)).await
    }

    /// Readers at the time `now` of the store, in milliseconds since 1970.
    pub(crate) async fn readers(
        &self,
        tenant: &Tenant,
        now: i64,
        time: Duration,
    ) -> Result<Readers, StoreError> {
        let time = i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
        let mut readers = Readers::default();
        for found in self.backend.list(&tenant.key(READERS)).await? {
            match now - found.modified_ms > time {
                true => readers.ended.push(found.key),
                false => readers.roots.extend(root_of(&found)),
            }
        }
        Ok(readers)
    }
}

fn root_of(reader: &Listed) -> Option<Hash> {
    let (folder, _) = reader.key.rsplit_once('/')?;
    folder.rsplit('/').next()?.parse().ok()
}
