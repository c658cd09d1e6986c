//! Names of a store's tenants: `tenants/<keyed hash of the name>/name`, encrypted, so that a host
//! with the master keys can work on all of them.

use crate::StoreError;
use crate::tenant::{SHARED_TENANT, SharedStore};
use std::collections::BTreeSet;

const MAX_NAME_BYTES: u64 = 4096;

/// Tenants of a store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TenantNames {
    /// Names that the master keys open. Stock templates come last: the others refer to them.
    pub names: Vec<String>,
    /// Tenants that were made with other master keys.
    pub foreign: u64,
}

impl SharedStore {
    /// Writes the name of a tenant. Without it only hosts that know the name find the tenant.
    pub(crate) async fn write_tenant_name(&self, folder: &str, name: &str) {
        let key = format!("{folder}/name");
        let sealed = match self.keyring.seal_record(&key, name.as_bytes()) {
            Ok(sealed) => sealed,
            Err(e) => return tracing::warn!("the name of a tenant is not written: {e}"),
        };
        // A host that may only read the store works all the same.
        if let Err(e) = self.backend.put(&key, sealed.into()).await {
            tracing::warn!("the name of a tenant is not written: {e}");
        }
    }

    /// Lists the tenants of the store.
    pub async fn tenants(&self) -> Result<TenantNames, StoreError> {
        let listed = self.backend.list("tenants").await?;
        let folders: BTreeSet<&str> = listed
            .iter()
            .filter_map(|found| found.key.rsplit_once('/').map(|(folder, _)| folder))
            .collect();
        let mut tenants = TenantNames::default();
        for folder in folders {
            match self.tenant_name(folder).await? {
                Some(name) => tenants.names.push(name),
                None => tenants.foreign += 1,
            }
        }
        tenants
            .names
            .sort_by_key(|name| (name == SHARED_TENANT, name.clone()));
        Ok(tenants)
    }

    async fn tenant_name(&self, folder: &str) -> Result<Option<String>, StoreError> {
        let key = format!("{folder}/name");
        let object = match self.backend.get(&key, MAX_NAME_BYTES).await {
            Err(StoreError::Missing { .. }) => return Ok(None),
            other => other?,
        };
        let name = self.keyring.open_record(&key, &object).ok();
        let name = name.and_then(|name| String::from_utf8(name).ok());
        // A name that was moved to another folder is none.
        Ok(name.filter(|name| folder == format!("tenants/{}", self.keyring.locate(name))))
    }
}
