//! Ids of snapshots: the way from an id, which a host gave, to the root that names the content.
//!
//! `names/<keyed hash of the id>/<root>` is encrypted and bound to its key, so that only a host
//! with the tenant's keys can name a snapshot. A snapshot that has a name is not collected, even
//! after [`SharedStore::remove`]: two ids may name the same content.

use crate::data_keys::{Hash, HashOf};
use crate::tenant::{SharedStore, Tenant};
use crate::{FormatError, Listed, StoreError};

/// Folder of the names of a tenant.
const NAMES: &str = "names";

impl Tenant {
    /// Folder of the roots that `id` names. The same in all generations of keys.
    fn name_folder(&self, id: &str) -> Result<String, StoreError> {
        let name = self.oldest()?.hash(HashOf::Name, id.as_bytes());
        Ok(self.key(&format!("{NAMES}/{name}")))
    }
}

impl SharedStore {
    /// Gives the pushed snapshot `root` the name `id`, which may have named another one.
    pub async fn set_name(&self, tenant: &Tenant, id: &str, root: Hash) -> Result<(), StoreError> {
        let folder = tenant.name_folder(id)?;
        let before = self.backend.list(&folder).await?;
        let key = format!("{folder}/{root}");
        self.write_list(tenant, &key, &id).await?;
        // After the new one, so that the id names a snapshot at all times.
        let others = before.iter().filter(|found| found.key != key);
        let delete = |found: &Listed| {
            let key = found.key.clone();
            async move { self.backend.delete(&key).await }
        };
        futures_util::future::try_join_all(others.map(delete)).await?;
        Ok(())
    }

    /// Root of the snapshot that `id` names.
    pub async fn named(&self, tenant: &Tenant, id: &str) -> Result<Option<Hash>, StoreError> {
        let found = self.backend.list(&tenant.name_folder(id)?).await?;
        // One that is cut off while it names another snapshot leaves both.
        let Some(newest) = found.iter().max_by_key(|found| found.modified_ms) else {
            return Ok(None);
        };
        let damaged = |reason| StoreError::damaged(&newest.key)(FormatError::Damaged(reason));
        let root = root_of(newest).ok_or_else(|| damaged("its key names no snapshot"))?;
        match self.read_list::<String>(tenant, &newest.key).await? {
            Some(written) if written == id => Ok(Some(root)),
            Some(_) => Err(damaged("it is the name of another snapshot")),
            // Removed meanwhile.
            None => Ok(None),
        }
    }

    /// Takes a name away. Its snapshot stays, until it is removed too.
    pub async fn remove_name(&self, tenant: &Tenant, id: &str) -> Result<(), StoreError> {
        let found = self.backend.list(&tenant.name_folder(id)?).await?;
        for name in found {
            self.backend.delete(&name.key).await?;
        }
        Ok(())
    }

    /// Roots of all snapshots that have a name.
    pub(crate) async fn named_roots(&self, tenant: &Tenant) -> Result<Vec<Hash>, StoreError> {
        let names = self.backend.list(&tenant.key(NAMES)).await?;
        Ok(names.iter().filter_map(root_of).collect())
    }
}

fn root_of(name: &Listed) -> Option<Hash> {
    name.key.rsplit('/').next()?.parse().ok()
}
