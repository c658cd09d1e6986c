//! Modules of functions: the way from a module's digest to the root that names its content, and the
//! hosts that hold it.
//!
//! `modules/<keyed hash of the digest>/<root>/<id of the host>` is encrypted and bound to its key,
//! so that only a host with the tenant's keys can say what a digest names. A module is pushed as a
//! snapshot of one file. What a host holds is not collected, also after [`SharedStore::remove`]:
//! the last holder gives the content up, and one that came meanwhile keeps it all the same.

use crate::data_keys::{Hash, HashOf};
use crate::tenant::{SharedStore, Tenant};
use crate::{FormatError, Listed, StoreError};

/// Folder of the modules of a tenant.
const MODULES: &str = "modules";

impl Tenant {
    /// Folder of the roots that a digest names. The same in all generations of keys.
    fn module_folder(&self, digest: &str) -> Result<String, StoreError> {
        // No snapshot has an id with a space.
        let subject = format!("module {digest}");
        let name = self.oldest()?.hash(HashOf::Name, subject.as_bytes());
        Ok(self.key(&format!("{MODULES}/{name}")))
    }
}

impl SharedStore {
    /// Says that `host` needs the module `digest`, which was pushed as `root`. Fails if its content
    /// may be gone; then push it again. The id of a host consists of letters and digits.
    pub async fn hold_module(
        &self,
        tenant: &Tenant,
        digest: &str,
        root: Hash,
        host: &str,
    ) -> Result<(), StoreError> {
        let key = format!("{}/{root}/{host}", tenant.module_folder(digest)?);
        self.write_list(tenant, &key, &digest).await?;
        // Read after the holder is there: a collection that condemns the content from now on finds
        // the holder before it removes anything.
        let manifest = tenant.manifest_key(&root);
        let is_condemned = self.condemned(tenant).await?.contains_key(&manifest);
        if is_condemned || self.backend.head(&manifest).await?.is_none() {
            self.backend.delete(&key).await?;
            return Err(StoreError::Gone(manifest));
        }
        Ok(())
    }

    /// Takes back what [`Self::hold_module`] said. The last holder gives the content up.
    pub async fn release_module(
        &self,
        tenant: &Tenant,
        digest: &str,
        root: Hash,
        host: &str,
    ) -> Result<(), StoreError> {
        let folder = format!("{}/{root}", tenant.module_folder(digest)?);
        self.backend.delete(&format!("{folder}/{host}")).await?;
        match self.backend.list(&folder).await?.is_empty() {
            true => self.remove(tenant, root).await,
            false => Ok(()),
        }
    }

    /// Root of the module `digest`; none: no host holds it.
    pub async fn module(&self, tenant: &Tenant, digest: &str) -> Result<Option<Hash>, StoreError> {
        let mut found = self.backend.list(&tenant.module_folder(digest)?).await?;
        found.sort_by_key(|holder| std::cmp::Reverse(holder.modified_ms));
        for holder in &found {
            let damaged = |reason| StoreError::damaged(&holder.key)(FormatError::Damaged(reason));
            let root = root_of(holder).ok_or_else(|| damaged("its key names no content"))?;
            match self.read_list::<String>(tenant, &holder.key).await? {
                Some(written) if written == digest => return Ok(Some(root)),
                Some(_) => return Err(damaged("it is of another module")),
                // Taken back meanwhile.
                None => {}
            }
        }
        Ok(None)
    }

    /// Roots of all modules that hosts hold.
    pub(crate) async fn held_modules(&self, tenant: &Tenant) -> Result<Vec<Hash>, StoreError> {
        let holders = self.backend.list(&tenant.key(MODULES)).await?;
        Ok(holders.iter().filter_map(root_of).collect())
    }
}

fn root_of(holder: &Listed) -> Option<Hash> {
    let (folder, _) = holder.key.rsplit_once('/')?;
    folder.rsplit('/').next()?.parse().ok()
}
