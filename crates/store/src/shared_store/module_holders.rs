//! Modules (WebAssembly programs) of functions: maps a module's digest to the root of its content
//! and to the hosts that hold it.
//!
//! A *tenant* is an owner of snapshots in the store, usually an API key. The objects of a tenant
//! are encrypted with its keys. A *collection* removes objects that no snapshot needs. It first
//! *condemns* an object, and a later collection removes the object.
//!
//! The object `modules/<keyed hash of the digest>/<root>/<id of the host>` is encrypted, and its
//! name is authenticated with it, so that only a host with the tenant's encryption keys can map a
//! digest to a root. A module is pushed as a snapshot of one file. The last holder to release a
//! module marks its content for removal. A later garbage collection removes the content, unless a
//! host holds the module again by then.

use crate::data_keys::Hash;
use crate::shared_store::SharedStore;
use crate::tenant::Tenant;
use crate::{FormatError, Listed, StoreError};

/// Folder of a tenant's modules.
pub(crate) const MODULES: &str = "modules";

impl SharedStore {
    /// Registers `host` as a holder of the module `digest`, which was pushed as `root`. The id of a
    /// host consists of letters and digits.
    ///
    /// # Errors
    /// [`StoreError::Gone`] if the content may have been removed. The caller should push it again.
    pub async fn hold_module(
        &self,
        tenant: &Tenant,
        digest: &str,
        root: Hash,
        host: &str,
    ) -> Result<(), StoreError> {
        let key = format!("{}/{root}/{host}", tenant.module_folder(digest)?);
        // The object contains the digest. `write_list` encrypts any value, not only lists.
        self.write_list(tenant, &key, &digest).await?;
        // Check after the registration. If a collection condemns the content after this check, the
        // collection that would remove the content finds the holder first.
        let manifest = tenant.manifest_key(&root);
        let wanted = [manifest.clone()].into();
        let condemned = self.condemned_among(tenant, &wanted).await?;
        if !condemned.is_empty() || self.backend.head(&manifest).await?.is_none() {
            self.backend.delete(&key).await?;
            return Err(StoreError::Gone(manifest));
        }
        Ok(())
    }

    /// Releases a module after [`Self::hold_module`]. The last holder marks the content for
    /// removal.
    pub async fn release_module(
        &self,
        tenant: &Tenant,
        digest: &str,
        root: Hash,
        host: &str,
    ) -> Result<(), StoreError> {
        let folder = format!("{}/{root}", tenant.module_folder(digest)?);
        self.backend.delete(&format!("{folder}/{host}")).await?;
        if self.backend.list(&folder).await?.is_empty() {
            self.remove(tenant, root).await
        } else {
            Ok(())
        }
    }

    /// Returns the root of the module `digest`. `None` if no host holds the module.
    pub async fn module(&self, tenant: &Tenant, digest: &str) -> Result<Option<Hash>, StoreError> {
        let mut holders = self.backend.list(&tenant.module_folder(digest)?).await?;
        // Hosts may hold the module under several roots, for example after a rotation of keys.
        // Prefer the newest registration.
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.modified_ms));
        for holder in &holders {
            let damaged = |reason| StoreError::damaged(&holder.key)(FormatError::Damaged(reason));
            let root = root_of(holder).ok_or_else(|| damaged("its key contains no root"))?;
            match self.read_list::<String>(tenant, &holder.key).await? {
                Some(written) if written == digest => return Ok(Some(root)),
                Some(_) => return Err(damaged("it belongs to another module")),
                // The holder was removed concurrently.
                None => {}
            }
        }
        Ok(None)
    }

    /// Returns the roots of all modules that hosts hold.
    pub(crate) async fn held_modules(&self, tenant: &Tenant) -> Result<Vec<Hash>, StoreError> {
        let holders = self.backend.list(&tenant.key(MODULES)).await?;
        Ok(holders.iter().filter_map(root_of).collect())
    }
}

fn root_of(holder: &Listed) -> Option<Hash> {
    let (folder, _) = holder.key.rsplit_once('/')?;
    folder.rsplit('/').next()?.parse().ok()
}
