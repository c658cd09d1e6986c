//! Leases: objects that protect the objects of a push from garbage collection.
//!
//! A *collection* removes objects that no snapshot needs. It first *condemns* an object, and a
//! later collection removes the object.
//!
//! A push first writes `leases/<id>`: the encrypted list of the keys that it reuses. The lease
//! protects these objects and all objects written after it. Only after that the push reads the
//! list of condemned objects and checks that the reused objects exist. The push does not reuse
//! objects that are condemned or missing by then: it chooses others and replaces its list. Objects
//! condemned later are protected, because a collection reads the lists of the leases before it
//! removes an object.
//!
//! Earlier versions of Jiffy wrote a constant to `leases/<id>` and the list to
//! `leases/<id>.reused`.

use crate::data_keys::{Hash, random, to_hex};
use crate::shared_store::SharedStore;
use crate::tenant::Tenant;
use crate::{FormatError, StoreError};
use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Lifetime of a lease, by the clock of the store.
pub const LEASE_TIME: Duration = Duration::from_secs(24 * 3600);
/// Maximum size in bytes of the list of a lease.
const MAX_LIST_BYTES: u64 = 256 << 20;
/// Context that is authenticated with an encrypted list, so that no other object can replace it.
const CONTEXT: &[u8] = b"jiffy store list";
/// Suffix of the lists of earlier versions of Jiffy.
pub(crate) const REUSED: &str = ".reused";
/// Content of the leases of earlier versions of Jiffy.
const WITHOUT_LIST: &[u8] = b"lease";

/// Lease of a push in progress.
#[derive(Debug)]
pub(crate) struct Lease {
    pub id: String,
    key: String,
    /// Time of the creation of this value, before the lease is written.
    since: Instant,
    is_written: AtomicBool,
}

impl SharedStore {
    /// Creates a lease, which [`Self::protect`] writes. Sends no request.
    pub(crate) fn new_lease(&self, tenant: &Tenant) -> Result<Lease, StoreError> {
        let id = random::<16>().map_err(StoreError::damaged("lease"))?;
        let id = to_hex(&id);
        Ok(Lease {
            key: tenant.key(&format!("leases/{id}")),
            id,
            since: Instant::now(),
            is_written: AtomicBool::new(false),
        })
    }

    /// Writes the lease with the list `keys` of protected objects, replacing its former list. Must
    /// be called before the push writes other objects. Each write renews the time of the lease, and
    /// an unlisted object is protected only if it is written after that time.
    pub(crate) async fn protect(
        &self,
        tenant: &Tenant,
        lease: &Lease,
        keys: &BTreeSet<String>,
    ) -> Result<(), StoreError> {
        // Set the flag before the write: a write without a response may have been executed.
        lease.is_written.store(true, Ordering::Relaxed);
        self.write_list(tenant, &lease.key, keys).await
    }

    /// Reads the keys that the lease `key` protects. `None` if the lease has ended.
    pub(crate) async fn leased_keys(
        &self,
        tenant: &Tenant,
        key: &str,
    ) -> Result<Option<BTreeSet<String>>, StoreError> {
        match self.backend.get(key, MAX_LIST_BYTES).await {
            Err(StoreError::Missing { .. }) => Ok(None),
            Ok(object) if object == WITHOUT_LIST => {
                self.read_list(tenant, &format!("{key}{REUSED}")).await
            }
            object => open_list(tenant, key, &object?).map(Some),
        }
    }

    /// Fails if the lease has expired or may expire soon.
    pub(crate) async fn check_lease(&self, lease: &Lease) -> Result<(), StoreError> {
        let ended = || StoreError::LeaseEnded(lease.id.clone());
        // Half of the lifetime leaves a margin for differences between the clocks of host and
        // store.
        if lease.since.elapsed() > LEASE_TIME / 2 {
            return Err(ended());
        }
        self.backend
            .head(&lease.key)
            .await?
            .ok_or_else(ended)
            .map(drop)
    }

    /// Removes a lease. If the removal fails, the lease expires later.
    pub(crate) async fn end_lease(&self, lease: &Lease) {
        if !lease.is_written.load(Ordering::Relaxed) {
            return;
        }
        if let Err(e) = self.backend.delete(&lease.key).await {
            tracing::warn!(key = lease.key, error = %e, "cannot remove a lease: it remains until it expires");
        }
    }

    /// Writes a value, encrypted and authenticated together with its key.
    pub(crate) async fn write_list(
        &self,
        tenant: &Tenant,
        key: &str,
        value: &impl serde::Serialize,
    ) -> Result<(), StoreError> {
        let malformed = |_| StoreError::damaged(key)(FormatError::Damaged("it cannot be encoded"));
        let text = serde_json::to_vec(value).map_err(malformed)?;
        let object = tenant.seal(CONTEXT, key, &text)?;
        self.backend.put(key, object.into()).await
    }

    /// Reads a value that [`Self::write_list`] wrote. `None` if the object does not exist.
    pub(crate) async fn read_list<T: serde::de::DeserializeOwned>(
        &self,
        tenant: &Tenant,
        key: &str,
    ) -> Result<Option<T>, StoreError> {
        let object = match self.backend.get(key, MAX_LIST_BYTES).await {
            Err(StoreError::Missing { .. }) => return Ok(None),
            other => other?,
        };
        open_list(tenant, key, &object).map(Some)
    }

    /// Returns the keys among `keys` that a push must not reuse: condemned objects and damaged
    /// packs.
    pub(crate) async fn unusable(
        &self,
        tenant: &Tenant,
        keys: &BTreeSet<String>,
    ) -> Result<HashSet<String>, StoreError> {
        let mut unusable = self.condemned_among(tenant, keys).await?;
        unusable.extend(self.distrusted(tenant).await?);
        Ok(unusable)
    }

    /// Fails if one of the snapshots `roots` was marked for removal or is in `unusable`.
    pub(crate) async fn check_retained(
        &self,
        tenant: &Tenant,
        roots: impl IntoIterator<Item = Hash>,
        unusable: &HashSet<String>,
    ) -> Result<(), StoreError> {
        let check = async |root: Hash| {
            let key = tenant.manifest_key(&root);
            let is_removed = unusable.contains(&key)
                || self
                    .backend
                    .head(&tenant.removed_key(&root))
                    .await?
                    .is_some();
            if is_removed {
                Err(StoreError::Gone(key))
            } else {
                Ok(())
            }
        };
        self.backend.each(roots, check).await
    }
}

/// Decrypts and decodes a value that [`SharedStore::write_list`] wrote to `key`.
fn open_list<T: serde::de::DeserializeOwned>(
    tenant: &Tenant,
    key: &str,
    object: &[u8],
) -> Result<T, StoreError> {
    let text = tenant.open(CONTEXT, key, object)?;
    let malformed = FormatError::Damaged("it is malformed");
    serde_json::from_slice(&text).map_err(|_| StoreError::damaged(key)(malformed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, BackendSettings, Keyring};
    use object_store::memory::InMemory;
    use std::sync::Arc;

    #[tokio::test]
    async fn leases_of_this_and_of_earlier_versions_protect_what_they_list() {
        let key = "1".repeat(64);
        let keys = format!("locator = \"{key}\"\ncurrent = \"k\"\n[keys]\nk = \"{key}\"\n");
        let backend = Backend::new(
            Arc::new(InMemory::new()),
            object_store::path::Path::default(),
            BackendSettings::default(),
        );
        let store = SharedStore::new(backend, Keyring::parse(&keys).unwrap());
        let tenant = store.tenant("alice").await.unwrap();
        let list: BTreeSet<String> = ["a".to_owned(), "b".to_owned()].into();
        let lease = store.new_lease(&tenant).unwrap();
        store.end_lease(&lease).await;
        assert_eq!(store.backend.traffic().deletes, 0);
        store.protect(&tenant, &lease, &list).await.unwrap();
        let leased = store.leased_keys(&tenant, &lease.key).await.unwrap();
        assert_eq!(leased, Some(list.clone()));
        store.end_lease(&lease).await;
        let leased = store.leased_keys(&tenant, &lease.key).await.unwrap();
        assert_eq!(leased, None);
        let old = tenant.key("leases/old");
        store.backend.put(&old, WITHOUT_LIST.into()).await.unwrap();
        assert_eq!(store.leased_keys(&tenant, &old).await.unwrap(), None);
        let reused = format!("{old}{REUSED}");
        store.write_list(&tenant, &reused, &list).await.unwrap();
        let leased = store.leased_keys(&tenant, &old).await.unwrap();
        assert_eq!(leased, Some(list));
    }
}
