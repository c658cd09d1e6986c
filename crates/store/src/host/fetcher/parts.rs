//! Parts of snapshots that VMMs wait for. Each part is opened once.

use crate::host::fetch_grants::LayerOrigin;
use crate::host::{RemoteError, RemoteStore};
use crate::{CachedPart, FormatError, Selection, StoreError, Tenant};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use tokio::sync::OnceCell;

/// Part that is opened on first use. Its layer stays in the cache while this value exists.
pub type PartSlot = OnceCell<CachedPart>;

/// Parts in use.
#[derive(Debug)]
pub struct OpenParts {
    remote: Arc<RemoteStore>,
    parts: Mutex<HashMap<LayerOrigin, Weak<PartSlot>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

impl OpenParts {
    /// Creates an empty set of parts of `remote`.
    pub fn new(remote: Arc<RemoteStore>) -> Self {
        Self {
            remote,
            parts: Mutex::default(),
        }
    }

    /// The store.
    pub fn remote(&self) -> &RemoteStore {
        &self.remote
    }

    /// Returns the slot of a part. VMMs that need the same part share the slot.
    pub fn slot(&self, origin: &LayerOrigin) -> Arc<PartSlot> {
        let mut parts = lock(&self.parts);
        parts.retain(|_, slot| slot.strong_count() > 0);
        if let Some(slot) = parts.get(origin).and_then(Weak::upgrade) {
            return slot;
        }
        let slot = Arc::<PartSlot>::default();
        parts.insert(origin.clone(), Arc::downgrade(&slot));
        slot
    }

    /// Opens the part of a slot unless it is already open.
    pub async fn open<'a>(
        &self,
        slot: &'a PartSlot,
        origin: &LayerOrigin,
    ) -> Result<&'a CachedPart, RemoteError> {
        slot.get_or_try_init(|| async {
            let opened = self.read(origin).await;
            if opened.is_err() {
                // Read the tenant again at the next attempt: its keys may have been rotated.
                self.remote.forget_tenant(&origin.tenant);
            }
            opened
        })
        .await
    }

    async fn read(&self, origin: &LayerOrigin) -> Result<CachedPart, RemoteError> {
        let tenant = self.remote.owner_of(origin).await?;
        self.remote.open_part(&tenant, origin).await
    }
}

impl RemoteStore {
    async fn owner_of(&self, origin: &LayerOrigin) -> Result<Arc<Tenant>, RemoteError> {
        let tenant = self.find_tenant(&origin.tenant).await?;
        tenant.ok_or_else(|| RemoteError::NoTenant {
            tenant: origin.tenant.clone(),
        })
    }

    async fn open_part(
        &self,
        tenant: &Arc<Tenant>,
        origin: &LayerOrigin,
    ) -> Result<CachedPart, RemoteError> {
        let snapshot = self.shared.open(tenant, origin.snapshot).await?;
        if snapshot.part_root(origin.part)? != origin.layer {
            let reason = FormatError::Damaged("it is not the layer of the grant");
            return Err(StoreError::Damaged {
                object: origin.layer.to_string(),
                reason,
            }
            .into());
        }
        Ok(self
            .shared
            .cached_part(&snapshot, origin.part, &self.cache)?)
    }

    /// Fetches all chunks of a layer that are missing on this host, and persists the layer.
    pub async fn fetch_layer(&self, origin: &LayerOrigin) -> Result<(), RemoteError> {
        let tenant = self.owner_of(origin).await?;
        let part = self.open_part(&tenant, origin).await?;
        self.shared.fill(&part, Selection::All).await?;
        let layer = part.layer().clone();
        let persisted = tokio::task::spawn_blocking(move || layer.persist()).await;
        persisted.map_err(|e| StoreError::Source(e.to_string()))??;
        Ok(())
    }
}
