//! Reads and removes snapshots in a store: their manifests, the locations of their chunks, and
//! references between tenants.
//!
//! The *root* of a snapshot is the hash that identifies it in the store. A *tenant* is an owner of
//! snapshots, usually an API key. The *shared tenant* owns the stock templates, which all tenants
//! may read. A *generation* is a version of a tenant's keys.

use crate::data_keys::{DataKeys, Hash};
use crate::envelope::{HEADER_BYTES, Header};
use crate::locations::{Locations, MAX_LOCATIONS_BYTES};
use crate::manifest::{MANIFEST_MAGIC, MAX_MANIFEST_BYTES, StoredManifest};
use crate::shared_store::SharedStore;
use crate::tenant::{SHARED_TENANT, Tenant};
use crate::{FormatError, RemoteSnapshot, StoreError};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time after which the record of the shared tenant is read again.
const SHARED_TIME: Duration = Duration::from_secs(300);

impl SharedStore {
    /// Reads and verifies the manifest of a snapshot of `tenant`, and reads its locations.
    pub async fn open(
        &self,
        tenant: &Arc<Tenant>,
        root: Hash,
    ) -> Result<RemoteSnapshot, StoreError> {
        let key = tenant.locations_key(&root);
        let (manifest, locations) = tokio::join!(
            self.manifest(tenant, root),
            self.backend.get(&key, MAX_LOCATIONS_BYTES)
        );
        with_locations(tenant, root, manifest?, &locations?)
    }

    /// Reads and verifies a manifest. Returns it with the keys of its generation.
    pub(crate) async fn manifest(
        &self,
        tenant: &Tenant,
        root: Hash,
    ) -> Result<(DataKeys, StoredManifest), StoreError> {
        let key = tenant.manifest_key(&root);
        let object = self.backend.get(&key, MAX_MANIFEST_BYTES).await?;
        decode_manifest(tenant, root, &object)
    }

    /// Reads the locations of the chunks of a snapshot.
    pub(crate) async fn locations(
        &self,
        tenant: &Tenant,
        keys: &DataKeys,
        root: Hash,
    ) -> Result<Locations, StoreError> {
        let key = tenant.locations_key(&root);
        let object = self.backend.get(&key, MAX_LOCATIONS_BYTES).await?;
        Locations::decode(&object, keys, root).map_err(StoreError::damaged(&key))
    }

    /// Lists the roots of a tenant's snapshots.
    pub async fn snapshots(&self, tenant: &Tenant) -> Result<Vec<Hash>, StoreError> {
        let listed = self.backend.list(&tenant.key("manifests")).await?;
        let roots = listed
            .iter()
            .filter_map(|object| object.key.rsplit('/').next()?.parse().ok());
        Ok(roots.collect())
    }

    /// Records in the shared tenant that snapshot `root` of `tenant` depends on snapshot `ancestor`
    /// of the shared tenant.
    pub(crate) async fn refer(
        &self,
        tenant: &Tenant,
        ancestor: &Hash,
        root: &Hash,
    ) -> Result<(), StoreError> {
        let refer = async || {
            let shared = self.shared_tenant().await?;
            // Write the reference before checking the ancestor: a later collection then finds it.
            let key = shared.reference_key(ancestor, tenant, root);
            self.backend
                .put(&key, bytes::Bytes::from_static(b"needed"))
                .await?;
            let manifest = shared.manifest_key(ancestor);
            let unusable = self.unusable(&shared, &[manifest.clone()].into()).await?;
            self.check_retained(&shared, [*ancestor], &unusable).await?;
            match self.backend.head(&manifest).await? {
                Some(_) => Ok(()),
                None => Err(StoreError::Gone(manifest)),
            }
        };
        match refer().await {
            // Another host may have rotated the keys of the shared tenant since they were read.
            Err(StoreError::Key { .. }) => {
                *self.shared.lock().await = None;
                refer().await
            }
            other => other,
        }
    }

    /// Returns the shared tenant. Its secrets are read at most once in [`SHARED_TIME`].
    pub(crate) async fn shared_tenant(&self) -> Result<Arc<Tenant>, StoreError> {
        let mut shared = self.shared.lock().await;
        if let Some((opened, tenant)) = &*shared
            && opened.elapsed() < SHARED_TIME
        {
            return Ok(tenant.clone());
        }
        let tenant = self.tenant(SHARED_TENANT).await?;
        *shared = Some((Instant::now(), tenant.clone()));
        Ok(tenant)
    }

    /// Removes the record of [`Self::refer`].
    pub(crate) async fn unrefer(
        &self,
        tenant: &Tenant,
        ancestor: &Hash,
        root: &Hash,
    ) -> Result<(), StoreError> {
        let shared = self.shared_tenant().await?;
        self.backend
            .delete(&shared.reference_key(ancestor, tenant, root))
            .await
    }
}

/// Decodes and verifies the manifest and the locations of the snapshot `root` of `tenant`.
pub(crate) fn decode_snapshot(
    tenant: &Arc<Tenant>,
    root: Hash,
    manifest: &[u8],
    locations: &[u8],
) -> Result<RemoteSnapshot, StoreError> {
    let decoded = decode_manifest(tenant, root, manifest)?;
    with_locations(tenant, root, decoded, locations)
}

/// Decodes and verifies a manifest. Returns it with the keys of its generation.
fn decode_manifest(
    tenant: &Tenant,
    root: Hash,
    object: &[u8],
) -> Result<(DataKeys, StoredManifest), StoreError> {
    let key = tenant.manifest_key(&root);
    let header = object.get(..HEADER_BYTES).unwrap_or(object);
    let header = Header::decode(MANIFEST_MAGIC, header).map_err(StoreError::damaged(&key))?;
    if header.tenant != tenant.id() {
        return Err(StoreError::Tenant { object: key });
    }
    let keys = tenant.generation(header.generation)?;
    let manifest = StoredManifest::decode(object, keys, root).map_err(StoreError::damaged(&key))?;
    Ok((keys.clone(), manifest))
}

/// Decodes the locations of a snapshot, one for each stored chunk of its manifest.
fn with_locations(
    tenant: &Arc<Tenant>,
    root: Hash,
    (keys, manifest): (DataKeys, StoredManifest),
    object: &[u8],
) -> Result<RemoteSnapshot, StoreError> {
    let key = tenant.locations_key(&root);
    let locations = Locations::decode(object, &keys, root).map_err(StoreError::damaged(&key))?;
    let stored: usize = manifest.parts.iter().map(|part| part.hashes.len()).sum();
    if locations.0.len() != stored {
        let reason = FormatError::Damaged("their number does not match the manifest");
        return Err(StoreError::damaged(&key)(reason));
    }
    Ok(RemoteSnapshot {
        root,
        manifest: Arc::new(manifest),
        locations: Arc::new(locations),
        tenant: tenant.clone(),
        keys,
    })
}
