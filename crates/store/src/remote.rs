//! [`RemoteSnapshot`]: a snapshot in a store, whose manifest was read and verified.
//!
//! A *chunk* is 64 KiB of memory or of a disk. The *root* of a snapshot is the hash that identifies
//! it in the store.

use crate::data_keys::{DataKeys, Hash};
use crate::fetch_plan::ChunkRequest;
use crate::layer::Layer;
use crate::locations::Locations;
use crate::manifest::StoredManifest;
use crate::tenant::Tenant;
use crate::{FormatError, StoreError};
use std::sync::Arc;

/// Snapshot in a store whose manifest was verified against its root.
#[derive(Debug, Clone)]
pub struct RemoteSnapshot {
    /// Root: the keyed hash that identifies the snapshot.
    pub root: Hash,
    /// Manifest.
    pub manifest: Arc<StoredManifest>,
    /// Locations of its chunks.
    pub locations: Arc<Locations>,
    pub(crate) tenant: Arc<Tenant>,
    pub(crate) keys: DataKeys,
}

impl RemoteSnapshot {
    /// Returns the keys that its chunks are hashed and encrypted with.
    pub fn keys(&self) -> &DataKeys {
        &self.keys
    }

    /// Returns index and layer of the part named `name`.
    pub fn part(&self, name: &str) -> Option<(usize, &Layer)> {
        let mut parts = self.manifest.parts.iter().enumerate();
        parts.find(|(_, part)| part.name == name)
    }

    /// Returns the root of part `number`, which names the part in the cache.
    pub fn part_root(&self, number: usize) -> Result<Hash, StoreError> {
        let missing = FormatError::Damaged("it has no such part");
        let part = self.manifest.parts.get(number).ok_or(missing);
        let root = part.and_then(|part| part.root(&self.keys));
        root.map_err(StoreError::damaged(&self.tenant.manifest_key(&self.root)))
    }

    /// Returns the stored chunks of part `number` with their locations.
    pub(crate) fn wanted(&self, number: usize) -> Vec<ChunkRequest> {
        // The locations follow the order of the stored chunks of all parts: skip the earlier parts.
        let before: usize = self
            .manifest
            .parts
            .iter()
            .take(number)
            .map(|part| part.hashes.len())
            .sum();
        let stored = self
            .manifest
            .parts
            .get(number)
            .into_iter()
            .flat_map(Layer::stored);
        let located = stored.zip(self.locations.0.iter().skip(before));
        located
            .map(|((chunk, hash), &location)| ChunkRequest {
                number: chunk,
                hash,
                location,
            })
            .collect()
    }
}
