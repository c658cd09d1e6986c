//! Manifest of a snapshot: the hashes of its chunks, and the data for restoring it on a host.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *tenant* is an owner of snapshots in the store,
//! usually an API key. The objects of a tenant are encrypted with its keys. The *working set* of a
//! snapshot is the memory that a restored guest touches first. It is recorded, and prefetched by
//! later restores.
//!
//! Body, little-endian, encrypted in an [`Envelope`](crate::envelope):
//!
//! | offset | bytes | content |
//! |---|---|---|
//! | 0 | 4 | bytes per chunk (65,536) |
//! | 4 | 4 | engine: 1 microvm, 2 gvisor |
//! | 8 | 8 | time of creation, milliseconds since 1970 |
//! | 16 | | 7 strings, each after its length (u16): the fields of [`Attributes`] in order |
//! | | 4 | number of ancestors, then the ancestors, nearest first: scope (4) and root (32) |
//! | | 4 | number of parts, then the parts ([`crate::layer`]) |
//! | | 4 | number of chunks of the working set, then the 4-byte number of each chunk |
//!
//! The scope of an ancestor is 0 (tenant) or 1 (shared).
//!
//! The root, which identifies the snapshot, is the keyed hash of this body after replacing the
//! hashes of each part by the root of the part.

use crate::FormatError;
use crate::codec::{Reader, put_count, put_string};
use crate::data_keys::{DataKeys, Hash, HashOf};
use crate::envelope::{Header, TenantId};
use crate::layer::Layer;
use serde::{Deserialize, Serialize};

/// Size of a chunk in bytes.
pub const CHUNK_BYTES: u32 = 64 << 10;
/// Maximum size of a manifest in bytes, sufficient for 512 GiB without holes.
pub const MAX_MANIFEST_BYTES: u64 = 320 << 20;
/// Maximum number of ancestors of a snapshot.
pub const MAX_LINEAGE: usize = 256;
/// Maximum number of parts of a snapshot: layers, state and files.
pub const MAX_PARTS: usize = 1024;
/// Maximum number of chunks of a working set: 64 GiB.
pub const MAX_WORKING_SET: usize = 1 << 20;
/// First bytes of a manifest.
pub(crate) const MANIFEST_MAGIC: [u8; 8] = *b"JIFFYMAN";

/// Engine that isolated the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// KVM microVM, with layers.
    Microvm,
    /// gVisor, with whole files.
    Gvisor,
}

/// Versions and origin of a snapshot, as the engine writes them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attributes {
    /// Id of the snapshot on the host that created it.
    pub id: String,
    /// Template and its version.
    pub template: String,
    /// Version of Jiffy.
    pub engine_version: String,
    /// Release of the guest kernel, or version of gVisor.
    pub kernel: String,
    /// Version of the agent.
    pub agent: String,
    /// Minimum processor level of a host that restores the snapshot.
    pub processor_level: String,
    /// Id of the API key that owns the snapshot.
    pub owner: String,
}

/// Scope of the keys under which a snapshot is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Keys of the tenant.
    Tenant,
    /// Keys of the shared tenant, for stock templates.
    Shared,
}

/// Name of a snapshot in a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SnapshotName {
    /// Scope of the keys under which the snapshot is stored.
    pub scope: Scope,
    /// Root of its manifest.
    pub root: Hash,
}

/// Content of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredManifest {
    /// Engine.
    pub engine: EngineKind,
    /// Time of creation in milliseconds since 1970, for information.
    pub created_ms: u64,
    /// Versions and origin.
    pub attributes: Attributes,
    /// Ancestors, nearest first.
    pub lineage: Vec<SnapshotName>,
    /// Layers, state and files.
    pub parts: Vec<Layer>,
    /// Chunks of memory that a restored guest touches first. A push uploads them before all other
    /// chunks, in the order of this list. The list of the microVM engine is ascending.
    pub working_set: Vec<u32>,
}

impl StoredManifest {
    /// Encodes the manifest. `part` appends a part: with its hashes for storage, or with its root
    /// instead of the hashes for the root of the manifest.
    fn body(
        &self,
        mut part: impl FnMut(&mut Vec<u8>, &Layer) -> Result<(), FormatError>,
    ) -> Result<Vec<u8>, FormatError> {
        let mut to = Vec::new();
        to.extend(CHUNK_BYTES.to_le_bytes());
        let engine: u32 = match self.engine {
            EngineKind::Microvm => 1,
            EngineKind::Gvisor => 2,
        };
        to.extend(engine.to_le_bytes());
        to.extend(self.created_ms.to_le_bytes());
        let a = &self.attributes;
        for text in [
            &a.id,
            &a.template,
            &a.engine_version,
            &a.kernel,
            &a.agent,
            &a.processor_level,
            &a.owner,
        ] {
            put_string(&mut to, text)?;
        }
        put_count(&mut to, self.lineage.len())?;
        for ancestor in &self.lineage {
            let scope: u32 = match ancestor.scope {
                Scope::Tenant => 0,
                Scope::Shared => 1,
            };
            to.extend(scope.to_le_bytes());
            to.extend(ancestor.root.0);
        }
        put_count(&mut to, self.parts.len())?;
        for layer in &self.parts {
            part(&mut to, layer)?;
        }
        put_count(&mut to, self.working_set.len())?;
        for chunk in &self.working_set {
            to.extend(chunk.to_le_bytes());
        }
        Ok(to)
    }

    /// Returns the root, which identifies the snapshot.
    pub fn root(&self, keys: &DataKeys) -> Result<Hash, FormatError> {
        let body = self.body(|to, layer| {
            layer.encode_head(to)?;
            to.extend(layer.root(keys)?.0);
            Ok(())
        })?;
        Ok(keys.hash(HashOf::Manifest, &body))
    }

    /// Encodes and encrypts the manifest. Returns its root and the object.
    pub fn encode(
        &self,
        keys: &DataKeys,
        tenant: TenantId,
    ) -> Result<(Hash, Vec<u8>), FormatError> {
        let body = self.body(|to, layer| layer.encode(to))?;
        // Never write a manifest that cannot be read back.
        if Self::decode_body(&body)? != *self {
            return Err(FormatError::Damaged("it cannot be encoded"));
        }
        let root = self.root(keys)?;
        let header = Header {
            magic: MANIFEST_MAGIC,
            generation: keys.generation(),
            tenant,
            name: root.0,
        };
        Ok((root, header.seal(keys, &body)?))
    }

    /// Decrypts and decodes `object`, and checks that its root is `root`.
    pub fn decode(object: &[u8], keys: &DataKeys, root: Hash) -> Result<Self, FormatError> {
        let header = Header::decode(MANIFEST_MAGIC, object)?;
        if header.name != root.0 {
            return Err(FormatError::Damaged(
                "it is the manifest of another snapshot",
            ));
        }
        let manifest = Self::decode_body(&header.open(keys, object)?)?;
        if manifest.root(keys)? == root {
            Ok(manifest)
        } else {
            Err(FormatError::Damaged("its hashes do not match its root"))
        }
    }

    /// Decodes the body of a manifest. Public for fuzzing.
    pub fn decode_body(body: &[u8]) -> Result<Self, FormatError> {
        let mut reader = Reader::new(body);
        if reader.u32()? != CHUNK_BYTES {
            return Err(FormatError::Damaged("its chunks have another size"));
        }
        let engine = match reader.u32()? {
            1 => EngineKind::Microvm,
            2 => EngineKind::Gvisor,
            _ => return Err(FormatError::Damaged("its engine is unknown")),
        };
        let created_ms = reader.u64()?;
        let attributes = Attributes {
            id: reader.string()?,
            template: reader.string()?,
            engine_version: reader.string()?,
            kernel: reader.string()?,
            agent: reader.string()?,
            processor_level: reader.string()?,
            owner: reader.string()?,
        };
        // An ancestor is its scope (4 bytes) and its root (32 bytes).
        let ancestors = reader.count(36, MAX_LINEAGE)?;
        let lineage = (0..ancestors)
            .map(|_| ancestor(&mut reader))
            .collect::<Result<Vec<_>, _>>()?;
        let parts = reader.count(crate::layer::MIN_LAYER_BYTES, MAX_PARTS)?;
        let parts = (0..parts)
            .map(|_| Layer::decode(&mut reader))
            .collect::<Result<Vec<_>, _>>()?;
        let touched = reader.count(4, MAX_WORKING_SET)?;
        let working_set = (0..touched)
            .map(|_| reader.u32())
            .collect::<Result<Vec<_>, _>>()?;
        reader.end()?;
        let manifest = Self {
            engine,
            created_ms,
            attributes,
            lineage,
            parts,
            working_set,
        };
        manifest.check()?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), FormatError> {
        let mut names: Vec<&str> = self.parts.iter().map(|part| part.name.as_str()).collect();
        names.sort_unstable();
        if names.windows(2).any(|two| two[0] == two[1]) {
            return Err(FormatError::Damaged("two of its parts have the same name"));
        }
        Ok(())
    }
}

/// Decodes the name of an ancestor.
fn ancestor(reader: &mut Reader<'_>) -> Result<SnapshotName, FormatError> {
    let scope = match reader.u32()? {
        0 => Scope::Tenant,
        1 => Scope::Shared,
        _ => return Err(FormatError::Damaged("the scope of an ancestor is unknown")),
    };
    Ok(SnapshotName {
        scope,
        root: Hash(reader.array()?),
    })
}
