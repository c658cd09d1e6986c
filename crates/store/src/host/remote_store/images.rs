//! Images of volumes in the shared store. An image is a snapshot of one file, which the store finds
//! by the id of the image.
//!
//! The *root* of a snapshot is the hash that identifies it in the store.

use crate::host::{FoundSnapshot, MemoryPull, RemoteError, RemoteStore};
use crate::{
    Attributes, EngineKind, LayerKind, PartSource, PushOptions, PushReport, SnapshotSource,
    StoreError, Tenant,
};
use std::fs::File;
use std::sync::Arc;

/// Name of the part with the image.
const IMAGE_PART: &str = "volume";

/// Returns the name of an image in the store. It cannot equal the id of a snapshot, because those
/// contain no spaces.
fn name(id: &str) -> String {
    format!("volume {id}")
}

impl RemoteStore {
    /// Stores an image of `owner` (the id of an API key, or `None` for the host's owner). Chunks
    /// that this host stored recently are not sent again. Calls `record` with the root of the image
    /// before the first write. After an interrupted call, [`Self::remove_image`] with this root
    /// removes everything that was stored.
    pub async fn store_image(
        &self,
        owner: Option<&str>,
        id: &str,
        image: File,
        created_ms: u64,
        record: impl FnOnce(String) -> Result<(), RemoteError>,
    ) -> Result<PushReport, RemoteError> {
        let tenant = self.tenant(owner).await?;
        let source = SnapshotSource {
            // The format requires an engine. No reader of an image uses this value.
            engine: EngineKind::Microvm,
            created_ms,
            attributes: Attributes {
                id: name(id),
                owner: owner.unwrap_or_default().to_owned(),
                ..Attributes::default()
            },
            lineage: Vec::new(),
            parts: vec![PartSource {
                kind: LayerKind::File,
                name: IMAGE_PART.to_owned(),
                file: Arc::new(image),
                inherited: Vec::new(),
            }],
            working_set: Vec::new(),
        };
        let root = self.shared.root(&tenant, &source).await?;
        record(root.to_string())?;
        let options = PushOptions::new(self.index_cache().to_owned());
        let pushed = self.shared.push(&tenant, &source, &options).await;
        if let Err(StoreError::Key { .. }) = &pushed {
            // Another host has rotated the keys. The next call reads them again.
            self.forget_tenant(tenant.name());
        }
        let (pushed, report) = pushed?;
        let name = name(id);
        let naming = self.shared.set_new_name(&tenant, &name, pushed.root);
        naming.await?;
        Ok(report)
    }

    /// Fetches an image of `owner`. `None` if the store has no image with this id. The cache may
    /// evict the image, but the returned file stays readable. The caller must check the content:
    /// any host with the keys of the owner may have written it.
    pub async fn fetch_image(
        &self,
        owner: Option<&str>,
        id: &str,
    ) -> Result<Option<File>, RemoteError> {
        let tenant_name = owner.unwrap_or(crate::host::LOCAL_TENANT);
        let Some(tenant) = self.find_tenant(tenant_name).await? else {
            return Ok(None);
        };
        match self.fetch_known(&tenant, id).await {
            Err(RemoteError::Store(StoreError::Key { .. })) => {
                self.forget_tenant(tenant_name);
                match self.find_tenant(tenant_name).await? {
                    Some(tenant) => self.fetch_known(&tenant, id).await,
                    None => Ok(None),
                }
            }
            other => other,
        }
    }

    /// Fetches an image of a tenant with the keys that this host has cached.
    async fn fetch_known(
        &self,
        tenant: &Arc<Tenant>,
        id: &str,
    ) -> Result<Option<File>, RemoteError> {
        let Some(root) = self.shared.named(tenant, &name(id)).await? else {
            return Ok(None);
        };
        let snapshot = FoundSnapshot {
            id: name(id),
            parent: None,
            shared: false,
            remote: self.shared.open(tenant, root).await?,
            written: Arc::default(),
        };
        let part = snapshot.remote.part(IMAGE_PART);
        let (number, _) = part.ok_or_else(|| RemoteError::Damaged {
            id: name(id),
            reason: "has no file",
        })?;
        let pulling = self.pull_part(&snapshot, number, MemoryPull::All, tenant.name());
        pulling.await?.0.file().map(Some)
    }

    /// Removes an image of `owner`. `root` is the value that [`Self::store_image`] recorded.
    /// Succeeds if the image does not exist.
    pub async fn remove_image(
        &self,
        owner: Option<&str>,
        id: &str,
        root: Option<&str>,
    ) -> Result<(), RemoteError> {
        let tenant = owner.unwrap_or(crate::host::LOCAL_TENANT);
        self.retract(tenant, &name(id), root, true).await
    }
}
