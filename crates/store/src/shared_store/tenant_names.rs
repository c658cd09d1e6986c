//! Names of a store's tenants: `tenants/<keyed hash of the name>/name`, encrypted. A host with the
//! master keys can thus enumerate the tenants.
//!
//! A *tenant* is an owner of snapshots in the store, usually an API key. The objects of a tenant
//! are encrypted with its keys.

use crate::shared_store::SharedStore;
use crate::shared_store::tenant_records::{MAX_RECORD_BYTES, record_beginning, version_of};
use crate::tenant::SHARED_TENANT;
use crate::{DamagedObject, FormatError, StoreError};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum size in bytes of an object with the name of a tenant.
const MAX_NAME_BYTES: u64 = 4096;

/// Tenants of a store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TenantNames {
    /// Names that the master keys decrypt. The shared tenant comes last, because the others refer
    /// to it.
    pub names: Vec<String>,
    /// Number of tenants without a name or with other master keys.
    pub foreign: u64,
    /// Damaged or missing names of tenants with these master keys. Operations on all tenants skip
    /// these tenants and must report a failure.
    pub damaged: Vec<DamagedObject>,
}

/// Result of reading the name of a tenant.
#[derive(Debug)]
enum FoundName {
    Name(String),
    Missing,
    Unreadable(FormatError),
}

impl SharedStore {
    /// Writes the name of a tenant. Without it, only hosts that know the name can find the tenant.
    async fn write_tenant_name(&self, folder: &str, name: &str) {
        let key = format!("{folder}/name");
        let sealed = match self.keyring.seal_record(&key, name.as_bytes()) {
            Ok(sealed) => sealed,
            Err(e) => {
                return tracing::warn!(folder, error = %e, "cannot encrypt the name of a tenant");
            }
        };
        // Ignore the error: a host with read-only access works without writing the name.
        if let Err(e) = self.backend.put(&key, sealed.into()).await {
            tracing::warn!(folder, error = %e, "cannot write the name of a tenant");
        }
    }

    /// Writes the name of a tenant if it is missing or damaged.
    pub(crate) async fn ensure_tenant_name(&self, folder: &str, name: &str) {
        match self.tenant_name(folder).await {
            Ok(FoundName::Name(_)) => {}
            Ok(_) => self.write_tenant_name(folder, name).await,
            Err(e) => tracing::warn!(folder, error = %e, "cannot read the name of a tenant"),
        }
    }

    /// Lists the tenants of the store.
    pub async fn tenants(&self) -> Result<TenantNames, StoreError> {
        let listed = self.backend.list("tenants").await?;
        let mut folders: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for object in &listed {
            if let Some((folder, _)) = object.key.rsplit_once('/') {
                folders.entry(folder).or_default().insert(&object.key);
            }
        }
        let mut tenants = TenantNames::default();
        for (folder, keys) in folders {
            let reason = match self.tenant_name(folder).await? {
                FoundName::Name(name) => {
                    tenants.names.push(name);
                    continue;
                }
                FoundName::Missing => None,
                FoundName::Unreadable(e) => Some(e.to_string()),
            };
            let is_ours = self.is_ours(&keys).await?;
            if reason.is_none() || !is_ours {
                tenants.foreign += 1;
            }
            if is_ours {
                tenants.damaged.push(DamagedObject {
                    object: format!("{folder}/name"),
                    reason: reason.unwrap_or_else(|| "the object is missing".to_owned()),
                });
            }
        }
        tenants
            .names
            .sort_by_key(|name| (name == SHARED_TENANT, name.clone()));
        Ok(tenants)
    }

    /// Returns whether a master key of this host encrypted a record of a tenant without a readable
    /// name. `keys` are the keys of the tenant's objects.
    async fn is_ours(&self, keys: &BTreeSet<&str>) -> Result<bool, StoreError> {
        for key in keys.iter().filter(|key| version_of(key).is_some()) {
            match self.backend.get(key, MAX_RECORD_BYTES).await {
                Ok(record) if self.keyring.is_likely_ours(&record, &record_beginning()) => {
                    return Ok(true);
                }
                Ok(_) | Err(StoreError::Missing { .. } | StoreError::TooLarge { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(false)
    }

    /// Reads the name of the tenant whose objects are in `folder`.
    async fn tenant_name(&self, folder: &str) -> Result<FoundName, StoreError> {
        let key = format!("{folder}/name");
        let object = match self.backend.get(&key, MAX_NAME_BYTES).await {
            Err(StoreError::Missing { .. }) => return Ok(FoundName::Missing),
            Err(StoreError::TooLarge { .. }) => {
                let reason = FormatError::Damaged("it is too large for a name");
                return Ok(FoundName::Unreadable(reason));
            }
            other => other?,
        };
        let name = match self.keyring.open_record(&key, &object) {
            Ok(name) => name,
            Err(e) => return Ok(FoundName::Unreadable(e)),
        };
        let name = String::from_utf8(name).ok();
        // Reject a name that was moved from another folder.
        let name = name.filter(|name| folder == format!("tenants/{}", self.keyring.locate(name)));
        let moved = FormatError::Damaged("it is the name of another tenant");
        Ok(name.map_or(FoundName::Unreadable(moved), FoundName::Name))
    }
}
