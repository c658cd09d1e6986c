//! [`Tenant`]: an owner of snapshots in a store (usually an API key), with its data keys and the
//! keys (names) of its objects. Tenants cannot read each other's objects.

use crate::data_keys::{DataKeys, HashOf, to_hex};
use crate::envelope::TenantId;
use crate::keyring::key_error;
use crate::shared_store::module_holders::MODULES;
use crate::shared_store::readers::READERS;
use crate::shared_store::snapshot_names::NAMES;
use crate::{FormatError, Hash, StoreError};
use std::collections::BTreeMap;

/// Folder of a tenant's resume bundles.
pub(crate) const BUNDLES: &str = "resume";
/// Tenant whose keys all hosts have and whose objects all tenants may read: stock templates.
pub const SHARED_TENANT: &str = "shared";

/// Context of the encryption of records.
const RECORD_CONTEXT: &[u8] = b"jiffy record";

/// Tenant with its keys.
#[derive(Debug, Clone)]
pub struct Tenant {
    name: String,
    id: TenantId,
    /// Keys by generation. A rotation of keys adds a generation. New data is encrypted with the
    /// newest one.
    generations: BTreeMap<u32, DataKeys>,
}

impl Tenant {
    /// Creates a value with the data keys of all generations.
    pub(crate) fn new(name: &str, id: TenantId, generations: BTreeMap<u32, DataKeys>) -> Self {
        Self {
            name: name.to_owned(),
            id,
            generations,
        }
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the public id.
    pub fn id(&self) -> TenantId {
        self.id
    }

    /// Returns the data keys for new objects.
    pub fn current(&self) -> Result<&DataKeys, StoreError> {
        let newest = self.generations.values().next_back();
        newest.ok_or_else(|| key_error(&self.name, "it has no generation"))
    }

    /// Returns the data keys of its first generation.
    pub(crate) fn oldest(&self) -> Result<&DataKeys, StoreError> {
        let oldest = self.generations.values().next();
        oldest.ok_or_else(|| key_error(&self.name, "it has no generation"))
    }

    /// Returns the data keys of a generation.
    pub fn generation(&self, number: u32) -> Result<&DataKeys, StoreError> {
        let keys = self.generations.get(&number);
        keys.ok_or_else(|| {
            let reason =
                format!("this host does not have generation {number}; open the store again");
            key_error(&self.name, &reason)
        })
    }

    /// Encrypts the content of the record `key`. The same content is encrypted differently each
    /// time.
    pub fn seal_record(&self, key: &str, content: &[u8]) -> Result<Vec<u8>, StoreError> {
        self.seal(RECORD_CONTEXT, key, content)
    }

    /// Decrypts and authenticates the content of the record `key`.
    pub fn open_record(&self, key: &str, sealed: &[u8]) -> Result<Vec<u8>, StoreError> {
        self.open(RECORD_CONTEXT, key, sealed)
    }

    /// Encrypts a value with the newest keys. Decryption requires the same kind of value
    /// (`context`) and the same key of the object.
    pub(crate) fn seal(
        &self,
        context: &[u8],
        key: &str,
        content: &[u8],
    ) -> Result<Vec<u8>, StoreError> {
        let keys = self.current()?;
        let context = [context, key.as_bytes()].concat();
        let sealed = keys.seal(&context, content);
        let sealed = sealed.map_err(StoreError::damaged(key))?;
        Ok([&keys.generation().to_le_bytes()[..], &sealed].concat())
    }

    /// Decrypts and authenticates the output of [`Self::seal`].
    pub(crate) fn open(
        &self,
        context: &[u8],
        key: &str,
        sealed: &[u8],
    ) -> Result<Vec<u8>, StoreError> {
        let truncated = FormatError::Damaged("it is truncated");
        let (generation, sealed) = sealed
            .split_first_chunk()
            .ok_or_else(|| StoreError::damaged(key)(truncated))?;
        let keys = self.generation(u32::from_le_bytes(*generation))?;
        let context = [context, key.as_bytes()].concat();
        keys.open(&context, sealed)
            .map_err(StoreError::damaged(key))
    }

    /// Returns the key of one of its objects.
    pub(crate) fn key(&self, rest: &str) -> String {
        format!("{}/{rest}", to_hex(&self.id))
    }

    pub(crate) fn manifest_key(&self, root: &Hash) -> String {
        self.key(&format!("manifests/{root}"))
    }

    pub(crate) fn locations_key(&self, root: &Hash) -> String {
        self.key(&format!("locations/{root}"))
    }

    pub(crate) fn bundle_key(&self, root: &Hash) -> String {
        self.key(&format!("{BUNDLES}/{root}"))
    }

    pub(crate) fn removed_key(&self, root: &Hash) -> String {
        self.key(&format!("removed/{root}"))
    }

    /// Returns the key of the record that a snapshot of `other` depends on snapshot `ancestor` of
    /// this tenant.
    pub(crate) fn reference_key(&self, ancestor: &Hash, other: &Tenant, root: &Hash) -> String {
        self.key(&format!(
            "references/{ancestor}/{}-{root}",
            to_hex(&other.id)
        ))
    }

    pub(crate) fn pack_key(&self, generation: u32, pack: &[u8; 16]) -> String {
        self.key(&format!("packs/{generation}/{}", to_hex(pack)))
    }

    /// Returns the folder with the roots of `id`. The folder does not depend on the generation of
    /// keys.
    pub(crate) fn name_folder(&self, id: &str) -> Result<String, StoreError> {
        let name = self.oldest()?.hash(HashOf::Name, id.as_bytes());
        Ok(self.key(&format!("{NAMES}/{name}")))
    }

    /// Returns the folder with the roots of the module with `digest`. The folder does not depend on
    /// the generation of keys.
    pub(crate) fn module_folder(&self, digest: &str) -> Result<String, StoreError> {
        // Ids of snapshots contain no spaces, so the hash differs from the hashes of all ids.
        let subject = format!("module {digest}");
        let name = self.oldest()?.hash(HashOf::Name, subject.as_bytes());
        Ok(self.key(&format!("{MODULES}/{name}")))
    }

    /// Returns the key of the record that decides which host may run the sandbox `id`. `slot` is a
    /// number that the first two characters of the id determine. The records are listed by slot.
    pub fn head_key(&self, slot: u16, id: &str) -> Result<String, StoreError> {
        // Ids of snapshots contain no spaces, so the hash differs from the hashes of all ids.
        let name = self
            .oldest()?
            .hash(HashOf::Name, format!("head {id}").as_bytes());
        Ok(self.key(&format!("heads/{slot:04}/{name}")))
    }

    pub(crate) fn reader_key(&self, root: &Hash, host: &str) -> String {
        self.key(&format!("{READERS}/{root}/{host}"))
    }
}
