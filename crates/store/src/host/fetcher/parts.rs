//! Parts of snapshots (layers of memory) that VMMs wait for. Several VMMs may need the same part,
//! which is opened once.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors.

use crate::CachedPart;
use crate::host::fetch_grants::LayerOrigin;
use crate::host::{RemoteError, RemoteStore};
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
    /// Open layers, which VMMs share.
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
