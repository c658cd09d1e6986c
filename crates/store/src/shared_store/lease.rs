//! Leases: objects that protect the objects of a push from garbage collection.
//!
//! A push first writes `leases/<id>`, which protects all objects written after it. Then it writes
//! the encrypted list of the keys that it reuses to `leases/<id>.reused`, and only after that reads
//! the list of condemned objects. The push does not reuse objects that are condemned by then.
//! Objects condemned later are protected, because a collection reads the lists of the leases before
//! it removes an object.

use crate::data_keys::{random, to_hex};
use crate::shared_store::SharedStore;
use crate::tenant::Tenant;
use crate::{FormatError, StoreError};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::{Duration, Instant};

/// Lifetime of a lease, by the clock of the store.
pub const LEASE_TIME: Duration = Duration::from_secs(24 * 3600);
const MAX_LIST_BYTES: u64 = 256 << 20;
const CONTEXT: &[u8] = b"jiffy store list";
pub(crate) const REUSED: &str = ".reused";

/// Lease of a push in progress.
#[derive(Debug)]
pub(crate) struct Lease {
    pub id: String,
    key: String,
    since: Instant,
}

/// Objects that a collection will remove, with the time of their condemnation (store's clock, ms).
pub(crate) type Condemned = BTreeMap<String, i64>;

impl SharedStore {
    pub(crate) async fn take_lease(&self, tenant: &Tenant) -> Result<Lease, StoreError> {
        let id = random::<16>().map_err(StoreError::damaged("lease"))?;
        let id = to_hex(&id);
        let key = tenant.key(&format!("leases/{id}"));
        let since = Instant::now();
        self.backend
            .put(&key, bytes::Bytes::from_static(b"lease"))
            .await?;
        Ok(Lease { id, key, since })
    }

    /// Adds the keys of reused objects to a lease.
    pub(crate) async fn protect(
        &self,
        tenant: &Tenant,
        lease: &Lease,
        keys: &BTreeSet<String>,
    ) -> Result<(), StoreError> {
        self.write_list(tenant, &format!("{}{REUSED}", lease.key), keys)
            .await
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
        for key in [format!("{}{REUSED}", lease.key), lease.key.clone()] {
            if let Err(e) = self.backend.delete(&key).await {
                tracing::warn!(error = %e, "cannot remove a lease: it remains until it expires");
            }
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
        let keys = tenant.current()?;
        let text = serde_json::to_vec(value).map_err(malformed)?;
        let context = [CONTEXT, key.as_bytes()].concat();
        let sealed = keys
            .seal(&context, &text)
            .map_err(StoreError::damaged(key))?;
        let object = [&keys.generation().to_le_bytes()[..], &sealed].concat();
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
        let damaged = |reason| StoreError::damaged(key)(FormatError::Damaged(reason));
        let (generation, sealed) = object
            .split_first_chunk()
            .ok_or_else(|| damaged("it is truncated"))?;
        let keys = tenant.generation(u32::from_le_bytes(*generation))?;
        let context = [CONTEXT, key.as_bytes()].concat();
        let text = keys
            .open(&context, sealed)
            .map_err(StoreError::damaged(key))?;
        serde_json::from_slice(&text)
            .map(Some)
            .map_err(|_| damaged("it is malformed"))
    }

    pub(crate) async fn condemned(&self, tenant: &Tenant) -> Result<Condemned, StoreError> {
        let condemned = self.read_list(tenant, &tenant.key("gc/condemned")).await?;
        Ok(condemned.unwrap_or_default())
    }

    /// Returns the keys of objects that a push must not reuse: condemned objects, damaged packs and
    /// manifests of removed snapshots.
    pub(crate) async fn lost(&self, tenant: &Tenant) -> Result<HashSet<String>, StoreError> {
        let mut lost: HashSet<String> = self.condemned(tenant).await?.into_keys().collect();
        lost.extend(self.distrusted(tenant).await?);
        for removed in self.backend.list(&tenant.key("removed")).await? {
            lost.insert(removed.key.replace("/removed/", "/manifests/"));
        }
        Ok(lost)
    }
}
