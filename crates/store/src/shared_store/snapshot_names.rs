//! Names of snapshots: maps an id, chosen by a host, to the root of the content.
//!
//! A *tenant* is an owner of snapshots in the store, usually an API key. The objects of a tenant
//! are encrypted with its keys.
//!
//! The object `names/<keyed hash of the id>/<root>` is encrypted, and authenticated together with
//! this object name. Only a host with the tenant's keys can therefore name a snapshot. A snapshot
//! that has a name is not collected, even after [`SharedStore::remove`], because two ids may name
//! the same content.

use crate::data_keys::Hash;
use crate::shared_store::SharedStore;
use crate::tenant::Tenant;
use crate::version_memory::RecordVersion;
use crate::{FormatError, Listed, StoreError};
use serde::{Deserialize, Serialize};
use std::time::SystemTime;

/// Folder of a tenant's names.
pub(crate) const NAMES: &str = "names";
/// Maximum number of roots of one id. Each interrupted move leaves one root.
const MAX_NAMES: usize = 64;
/// Attempts at reading a name that other hosts move concurrently.
const READ_ATTEMPTS: usize = 3;

/// Content of a name.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum NameContent {
    /// Name that is assigned once. Earlier versions of Jiffy wrote only such names.
    Once(String),
    /// Name that can move between snapshots.
    Moving {
        id: String,
        /// Increases with each move.
        version: u64,
    },
}

/// Name that was read.
#[derive(Debug)]
struct FoundName {
    root: Hash,
    version: u64,
}

impl SharedStore {
    /// Names the pushed snapshot `root` with `id`, which no host has used before. Unlike
    /// [`Self::set_name`], sends one request only.
    pub async fn set_new_name(
        &self,
        tenant: &Tenant,
        id: &str,
        root: Hash,
    ) -> Result<(), StoreError> {
        let key = format!("{}/{root}", tenant.name_folder(id)?);
        let content = NameContent::Once(id.to_owned());
        self.write_list(tenant, &key, &content).await
    }

    /// Names the pushed snapshot `root` with `id`, which may have named another snapshot.
    pub async fn set_name(&self, tenant: &Tenant, id: &str, root: Hash) -> Result<(), StoreError> {
        self.write_name(tenant, id, root, false).await
    }

    /// Names the pushed snapshot `root` with a name that moves between snapshots, such as the name
    /// of a template. A host that has read the new name rejects older versions of it.
    pub async fn move_name(&self, tenant: &Tenant, id: &str, root: Hash) -> Result<(), StoreError> {
        self.write_name(tenant, id, root, true).await
    }

    /// Writes a name. Without `moves`, the first name of an id has no version, like the names of
    /// [`Self::set_new_name`].
    async fn write_name(
        &self,
        tenant: &Tenant,
        id: &str,
        root: Hash,
        moves: bool,
    ) -> Result<(), StoreError> {
        let folder = tenant.name_folder(id)?;
        let before = self.backend.list(&folder).await?;
        let key = format!("{folder}/{root}");
        let seen = self.versions.known(&folder).version;
        let newest = self.newest_name(tenant, id, &before).await?;
        let newest = newest.map_or(0, |newest| newest.version).max(seen);
        // A name with a version must not be replaced by one without: hosts that have seen the
        // version would reject it.
        let is_new = newest == 0 && before.iter().all(|name| name.key == key);
        let content = if is_new && !moves {
            NameContent::Once(id.to_owned())
        } else {
            NameContent::Moving {
                id: id.to_owned(),
                // Include the clock, because a removed name leaves no version behind.
                version: newest.saturating_add(1).max(now_ms()),
            }
        };
        self.write_list(tenant, &key, &content).await?;
        if let NameContent::Moving { version, .. } = content {
            self.check_name(&folder, version)?;
        }
        // Remove the old roots after writing the new one, so that the id always names a snapshot.
        let others = before.iter().filter(|name| name.key != key);
        let delete = |name: &Listed| {
            let key = name.key.clone();
            async move { self.backend.delete(&key).await }
        };
        futures_util::future::try_join_all(others.map(delete)).await?;
        Ok(())
    }

    /// Returns the root of the snapshot that `id` names.
    ///
    /// # Errors
    /// [`StoreError::Regressed`] if this host has seen a later move of the name.
    pub async fn named(&self, tenant: &Tenant, id: &str) -> Result<Option<Hash>, StoreError> {
        let folder = tenant.name_folder(id)?;
        for _ in 0..READ_ATTEMPTS {
            let names = self.backend.list(&folder).await?;
            if names.is_empty() {
                break;
            }
            // `None` if another host moved the name concurrently: list again.
            if let Some(newest) = self.newest_name(tenant, id, &names).await? {
                self.check_name(&folder, newest.version)?;
                return Ok(Some(newest.root));
            }
        }
        Ok(None)
    }

    /// Records that this host has seen `version` of the name with this folder. Fails if this host
    /// has seen a later version.
    fn check_name(&self, folder: &str, version: u64) -> Result<(), StoreError> {
        match (version, self.versions.known(folder).version) {
            // The versions of names that do not move are not remembered.
            (0, 0) => Ok(()),
            _ => self.versions.check(
                folder,
                RecordVersion {
                    version,
                    // Only the record of a tenant has a generation (of its data keys).
                    generation: 0,
                },
            ),
        }
    }

    /// Returns the newest of the names `found` of one id. `None` if all of them were removed
    /// concurrently. An interrupted move leaves two names.
    async fn newest_name(
        &self,
        tenant: &Tenant,
        id: &str,
        found: &[Listed],
    ) -> Result<Option<FoundName>, StoreError> {
        let mut newest: Option<(u64, i64, Hash)> = None;
        if found.len() > MAX_NAMES {
            let key = found.first().map_or("", |found| &found.key);
            let reason = FormatError::Damaged("one id names too many snapshots");
            return Err(StoreError::damaged(key)(reason));
        }
        for name in found {
            let damaged = |reason| StoreError::damaged(&name.key)(FormatError::Damaged(reason));
            let root = root_of(name).ok_or_else(|| damaged("its key contains no root"))?;
            let (written, version) = match self.read_list(tenant, &name.key).await? {
                Some(NameContent::Once(written)) => (written, 0),
                Some(NameContent::Moving { id, version }) => (id, version),
                None => continue,
            };
            if written != id {
                return Err(damaged("it is the name of another snapshot"));
            }
            // The version decides. Among names without versions, the clock of the store decides.
            newest = newest.max(Some((version, name.modified_ms, root)));
        }
        Ok(newest.map(|(version, _, root)| FoundName { root, version }))
    }

    /// Removes a name. Its snapshot remains until it is removed as well.
    pub async fn remove_name(&self, tenant: &Tenant, id: &str) -> Result<(), StoreError> {
        let folder = tenant.name_folder(id)?;
        for name in self.backend.list(&folder).await? {
            self.backend.delete(&name.key).await?;
        }
        self.versions.forget(&folder);
        Ok(())
    }

    /// Returns the roots of all snapshots that have a name.
    pub(crate) async fn named_roots(&self, tenant: &Tenant) -> Result<Vec<Hash>, StoreError> {
        let names = self.backend.list(&tenant.key(NAMES)).await?;
        Ok(names.iter().filter_map(root_of).collect())
    }
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(0))
}

fn root_of(name: &Listed) -> Option<Hash> {
    name.key.rsplit('/').next()?.parse().ok()
}
