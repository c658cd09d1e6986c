//! Objects of a tenant that a garbage collection examines, in little memory: a tenant may have
//! millions.
//!
//! A *tenant* is an owner of snapshots in the store, usually an API key. The objects of a tenant
//! are encrypted with its keys. The *root* of a snapshot is the hash that identifies the snapshot
//! in the store.

use crate::data_keys::{Hash, hex, to_hex};
use crate::pack::PackId;
use crate::tenant::{BUNDLES, Tenant};
use crate::{Listed, StoreError};
use std::collections::HashSet;

/// Name of an object without its tenant.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum ObjectName {
    /// Description of the snapshot with this root.
    Manifest(Hash),
    /// Places of the snapshot's chunks in packs, by the root of the snapshot.
    Locations(Hash),
    /// Resume bundle: copies of all that a host reads first to resume the snapshot with this root.
    Bundle(Hash),
    /// Object with many chunks, by the generation of its data keys and its id.
    Pack(u32, PackId),
    /// Object that Jiffy has not written, by its name below the tenant.
    Other(Box<str>),
}

/// Object in the store.
#[derive(Debug, Clone)]
pub(super) struct StoredObject {
    pub name: ObjectName,
    /// Size in bytes.
    pub bytes: u64,
    /// Time of the last change by the store's clock, milliseconds since 1970.
    pub modified_ms: i64,
    /// True if a snapshot or a push needs the object.
    pub is_live: bool,
}

/// Objects of a tenant, ordered by their names.
#[derive(Debug, Default)]
pub(super) struct StoredObjects {
    objects: Vec<StoredObject>,
    /// Live objects that were not listed, for example because a push wrote them after the listing.
    /// They are in use, so [`Self::live`] counts them.
    unlisted: HashSet<ObjectName>,
}

impl ObjectName {
    /// Parses the key of an object of `tenant`. `None` if it belongs to another tenant.
    pub fn parse(tenant: &Tenant, key: &str) -> Option<Self> {
        let rest = key.strip_prefix(&tenant.key(""))?;
        let mut parts = rest.split('/');
        let (kind, name) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
        let root = || name.parse::<Hash>().ok();
        let parsed = match (kind, parts.next(), parts.next()) {
            ("manifests", None, _) => root().map(Self::Manifest),
            ("locations", None, _) => root().map(Self::Locations),
            (BUNDLES, None, _) => root().map(Self::Bundle),
            ("packs", Some(id), None) => {
                let generation = name.parse().ok();
                generation
                    .zip(hex::<16>(id))
                    .map(|(generation, id)| Self::Pack(generation, id))
            }
            _ => None,
        };
        // Names in another notation are not written by Jiffy.
        let parsed = parsed.filter(|parsed| parsed.key(tenant) == key);
        Some(parsed.unwrap_or_else(|| Self::Other(rest.into())))
    }

    /// Returns the key of the object.
    pub fn key(&self, tenant: &Tenant) -> String {
        match self {
            Self::Manifest(root) => tenant.manifest_key(root),
            Self::Locations(root) => tenant.locations_key(root),
            Self::Bundle(root) => tenant.bundle_key(root),
            Self::Pack(generation, id) => tenant.key(&format!("packs/{generation}/{}", to_hex(id))),
            Self::Other(name) => tenant.key(name),
        }
    }
}

impl StoredObjects {
    /// Adds the objects of a listing.
    pub fn add(&mut self, tenant: &Tenant, listed: Vec<Listed>) {
        self.objects.extend(listed.into_iter().filter_map(|listed| {
            Some(StoredObject {
                name: ObjectName::parse(tenant, &listed.key)?,
                bytes: listed.bytes,
                modified_ms: listed.modified_ms,
                is_live: false,
            })
        }));
    }

    /// Orders the objects. Must be called after the last listing.
    pub fn sort(&mut self) {
        self.objects.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        self.objects.dedup_by(|a, b| a.name == b.name);
        self.objects.shrink_to_fit();
    }

    fn position(&self, name: &ObjectName) -> Option<usize> {
        let found = self
            .objects
            .binary_search_by(|object| object.name.cmp(name));
        found.ok()
    }

    pub fn get(&self, name: &ObjectName) -> Option<&StoredObject> {
        self.objects.get(self.position(name)?)
    }

    /// Marks an object as live.
    pub fn mark(&mut self, name: ObjectName) {
        match self.position(&name).and_then(|at| self.objects.get_mut(at)) {
            Some(object) => object.is_live = true,
            None => drop(self.unlisted.insert(name)),
        }
    }

    /// Marks the resume bundles of live snapshots among `roots`. A collection removes a bundle
    /// together with its snapshot.
    pub fn mark_bundles(&mut self, roots: &HashSet<Hash>) {
        for root in roots {
            let manifest = self.get(&ObjectName::Manifest(*root));
            let bundle = ObjectName::Bundle(*root);
            if manifest.is_some_and(|manifest| manifest.is_live) && self.get(&bundle).is_some() {
                self.mark(bundle);
            }
        }
    }

    /// Returns the number of live objects.
    pub fn live(&self) -> u64 {
        let listed = self.objects.iter().filter(|object| object.is_live);
        (listed.count() + self.unlisted.len()) as u64
    }

    pub fn iter(&self) -> impl Iterator<Item = &StoredObject> {
        self.objects.iter()
    }

    /// Returns the roots of the listed manifests, in ascending order.
    pub fn roots(&self) -> impl Iterator<Item = Hash> {
        self.objects.iter().filter_map(|object| match object.name {
            ObjectName::Manifest(root) => Some(root),
            _ => None,
        })
    }
}

/// Converts the index of a snapshot to 32 bits. Returns an error if the index is too large.
pub(super) fn number(at: usize) -> Result<u32, StoreError> {
    u32::try_from(at).map_err(|_| StoreError::TooMany {
        prefix: "manifests".to_owned(),
        limit: u32::MAX as usize,
    })
}
