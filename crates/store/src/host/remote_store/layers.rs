//! Fetches layers of memory that restored guests need, if they are not completely stored on this
//! host.

use crate::host::{LayerOrigin, RemoteError, RemoteStore};
use crate::{CachedPart, FormatError, Selection, StoreError, Tenant};
use std::sync::Arc;

impl RemoteStore {
    /// Opens the tenant whose snapshot contains the layer.
    pub(crate) async fn owner_of(&self, origin: &LayerOrigin) -> Result<Arc<Tenant>, RemoteError> {
        let tenant = self.find_tenant(&origin.tenant).await?;
        tenant.ok_or_else(|| RemoteError::NoTenant {
            tenant: origin.tenant.clone(),
        })
    }

    /// Opens the part of a snapshot (memory or disk) that contains a layer. The part stays in the
    /// cache while the returned value exists.
    pub(crate) async fn open_part(
        &self,
        tenant: &Arc<Tenant>,
        origin: &LayerOrigin,
    ) -> Result<CachedPart, RemoteError> {
        let snapshot = self.shared.open(tenant, origin.snapshot).await?;
        if snapshot.part_root(origin.part)? != origin.layer {
            let reason = FormatError::Damaged("its hash differs from the requested layer");
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
        persisted.map_err(|e| StoreError::Task(e.to_string()))??;
        Ok(())
    }
}
