//! Ids of snapshots: the way from an id, which a host gave, to the root that names the content.
//!
//! `names/<keyed hash of the id>/<root>` is encrypted and bound to its key, so that only a host
//! with the tenant's keys can name a snapshot. A snapshot that has a name is not collected, even
//! after [`SharedStore::remove`]: two ids may name the same content.

use crate::data_keys::{Hash, HashOf};
use crate::tenant::{SharedStore, Tenant};
use crate::version_memory::RecordVersion;
use crate::{FormatError, Listed, StoreError};
use serde::{Deserialize, Serialize};
use std::time::SystemTime;

/// Folder of the names of a tenant.
const NAMES: &str = "names";
/// Maximum number of snapshots that one id names, each after a move that was cut off.
const MAX_NAMES: usize = 64;
/// Times that a name is looked up which other hosts move meanwhile.
const READ_ATTEMPTS: usize = 3;

impl Tenant {
    /// Folder of the roots that `id` names. The same in all generations of keys.
    fn name_folder(&self, id: &str) -> Result<String, StoreError> {
        let name = self.oldest()?.hash(HashOf::Name, id.as_bytes());
        Ok(self.key(&format!("{NAMES}/{name}")))
    }
}

/// Content of a name.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum NameContent {
    /// Name that was given once, as all names that earlier versions of Jiffy wrote.
    Once(String),
    /// Name that moves between snapshots.
    Moving {
        id: String,
        /// Rises with each move.
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
    /// Gives the pushed snapshot `root` the name `id`, which may have named another one.
    pub async fn set_name(&self, tenant: &Tenant, id: &str, root: Hash) -> Result<(), StoreError> {
        self.write_name(tenant, id, root, false).await
    }

    /// Gives the pushed snapshot `root` a name that moves between snapshots, such as that of a
    /// template. A host that has read it does not believe an older one afterwards.
    pub async fn move_name(&self, tenant: &Tenant, id: &str, root: Hash) -> Result<(), StoreError> {
        self.write_name(tenant, id, root, true).await
    }

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
        let known = self.versions.known(&folder).version;
        let is_new = known == 0 && before.iter().all(|found| found.key == key);
        let content = match is_new && !moves {
            true => NameContent::Once(id.to_owned()),
            false => {
                let newest = self.newest_name(tenant, id, &before).await?;
                let newest = newest.map_or(0, |newest| newest.version).max(known);
                NameContent::Moving {
                    id: id.to_owned(),
                    // By the clock too, as a name that was removed leaves no version.
                    version: newest.saturating_add(1).max(now_ms()),
                }
            }
        };
        self.write_list(tenant, &key, &content).await?;
        if let NameContent::Moving { version, .. } = content {
            self.check_name(&folder, version)?;
        }
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
    ///
    /// # Errors
    /// [`StoreError::Regressed`] if this host has seen a later move of the name.
    pub async fn named(&self, tenant: &Tenant, id: &str) -> Result<Option<Hash>, StoreError> {
        let folder = tenant.name_folder(id)?;
        for _ in 0..READ_ATTEMPTS {
            let found = self.backend.list(&folder).await?;
            if found.is_empty() {
                break;
            }
            // One that another host removes meanwhile was moved.
            if let Some(newest) = self.newest_name(tenant, id, &found).await? {
                self.check_name(&folder, newest.version)?;
                return Ok(Some(newest.root));
            }
        }
        Ok(None)
    }

    fn check_name(&self, folder: &str, version: u64) -> Result<(), StoreError> {
        match (version, self.versions.known(folder).version) {
            // One that does not move is not remembered.
            (0, 0) => Ok(()),
            _ => self.versions.check(
                folder,
                RecordVersion {
                    version,
                    generation: 0,
                },
            ),
        }
    }

    /// Newest of the names `found` of one id; `None` if all were removed meanwhile. A move that is
    /// cut off leaves two.
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
            let root = root_of(name).ok_or_else(|| damaged("its key names no snapshot"))?;
            let (written, version) = match self.read_list(tenant, &name.key).await? {
                Some(NameContent::Once(written)) => (written, 0),
                Some(NameContent::Moving { id, version }) => (id, version),
                None => continue,
            };
            if written != id {
                return Err(damaged("it is the name of another snapshot"));
            }
            // Versions decide; the clock of the store does among names that have none.
            newest = newest.max(Some((version, name.modified_ms, root)));
        }
        Ok(newest.map(|(version, _, root)| FoundName { root, version }))
    }

    /// Takes a name away. Its snapshot stays, until it is removed too.
    pub async fn remove_name(&self, tenant: &Tenant, id: &str) -> Result<(), StoreError> {
        let folder = tenant.name_folder(id)?;
        for name in self.backend.list(&folder).await? {
            self.backend.delete(&name.key).await?;
        }
        self.versions.forget(&folder);
        Ok(())
    }

    /// Roots of all snapshots that have a name.
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
