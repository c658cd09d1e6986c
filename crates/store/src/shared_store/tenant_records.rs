//! Records of tenants with their wrapped secrets, and rotation of their keys.
//!
//! A *tenant* is an owner of snapshots in the store, usually an API key. The objects of a tenant
//! are encrypted with its keys. A *pack* is an object in the store with many compressed and
//! encrypted chunks. The *data keys* of a tenant hash and encrypt its objects. A rotation adds a
//! *generation* of data keys, which are derived from a secret. The secrets are stored *wrapped*:
//! encrypted with a master key.
//!
//! A record is the encrypted object `tenants/<keyed hash of the name>/<version>`. Its content
//! repeats the version, except in the first record. Records are never overwritten: the latest
//! version is valid, and two hosts that write the same version conflict. Each host remembers the
//! latest version that it has seen ([`crate::VersionMemory`]). Generations of data keys are never
//! removed, so that all objects remain readable. After a change of the master key, the secrets are
//! wrapped again without changing any pack.

use crate::data_keys::{DataKeys, hex, random, to_hex};
use crate::envelope::TenantId;
use crate::keyring::{MAX_WRAPPED_BYTES, key_error};
use crate::version_memory::RecordVersion;
use crate::{FormatError, Listed, SharedStore, StoreError, Tenant};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use zeroize::Zeroizing;

/// Maximum size in bytes of the record of a tenant.
pub(crate) const MAX_RECORD_BYTES: u64 = 1 << 20;
/// Maximum number of generations of a tenant.
const MAX_GENERATIONS: usize = 1000;
/// Number of record versions that are retained for hosts that have just listed them.
const RETAINED_VERSIONS: usize = 3;

/// Content of a record. [`record_beginning`] depends on the order of these fields and of the fields
/// of [`Wrapped`].
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    id: String,
    generations: Vec<Wrapped>,
    /// Version in the key of the record. `None` in the first record and in records of earlier
    /// versions of Jiffy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    version: Option<u32>,
}

impl Record {
    /// Returns the newest generation of data keys.
    fn generation(&self) -> u32 {
        let generations = self.generations.iter().map(|wrapped| wrapped.generation);
        generations.max().unwrap_or(0)
    }
}

/// Secret of a generation, encrypted with a master key.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wrapped {
    generation: u32,
    /// Name of the master key.
    key: String,
    /// Encrypted secret in hexadecimal.
    secret: String,
}

/// Keys of a tenant after a rotation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TenantKeys {
    /// Generation of the data keys for new objects.
    pub generation: u32,
    /// Number of generations whose secrets were wrapped again.
    pub rewrapped: u64,
}

impl SharedStore {
    fn prefix(&self, name: &str) -> String {
        format!("tenants/{}", self.keyring.locate(name))
    }

    /// Opens tenant `name`. `None` if the tenant does not exist.
    pub async fn find_tenant(&self, name: &str) -> Result<Option<Arc<Tenant>>, StoreError> {
        match self.newest(name).await? {
            Some((_, record)) => self.unwrap(name, &record).await.map(Arc::new).map(Some),
            None => Ok(None),
        }
    }

    /// Opens tenant `name` and creates it if necessary.
    pub async fn tenant(&self, name: &str) -> Result<Arc<Tenant>, StoreError> {
        if let Some((_, record)) = self.newest(name).await? {
            self.ensure_tenant_name(&self.prefix(name), name).await;
            return self.unwrap(name, &record).await.map(Arc::new);
        }
        let id: TenantId = random().map_err(|e| key_error(name, &e.to_string()))?;
        let record = Record {
            id: to_hex(&id),
            generations: vec![self.new_generation(name, &id, 1).await?],
            version: None,
        };
        match self.write(name, 1, &record).await {
            // Another host created the tenant concurrently.
            Err(StoreError::Conflict { .. }) => {}
            other => other?,
        }
        self.ensure_tenant_name(&self.prefix(name), name).await;
        match self.newest(name).await? {
            Some((_, record)) => self.unwrap(name, &record).await.map(Arc::new),
            None => Err(key_error(name, "its record was removed concurrently")),
        }
    }

    /// Wraps the secrets of tenant `name` with the current master key. Afterwards former master
    /// keys cannot unwrap any secret. An interrupted call must be repeated.
    pub async fn rewrap(&self, name: &str) -> Result<TenantKeys, StoreError> {
        let (mut version, mut record) = self.existing(name).await?;
        let id = id_of(name, &record)?;
        let mut keys = TenantKeys {
            generation: 0,
            rewrapped: 0,
        };
        for wrapped in &mut record.generations {
            keys.generation = keys.generation.max(wrapped.generation);
            if wrapped.key == self.keyring.current() {
                continue;
            }
            let secret = self.unwrap_one(name, &id, wrapped).await?;
            *wrapped = self
                .wrap_one(name, &id, wrapped.generation, &secret)
                .await?;
            keys.rewrapped += 1;
        }
        if keys.rewrapped > 0 {
            version += 1;
            self.write(name, version, &record).await?;
        }
        // Remove the records that former master keys can unwrap.
        for old in self.backend.list(&self.prefix(name)).await? {
            if version_of(&old.key).is_some_and(|old| old < version) {
                self.backend.delete(&old.key).await?;
            }
        }
        Ok(keys)
    }

    /// Adds a generation of data keys to tenant `name`. Later pushes hash and encrypt with the new
    /// keys and share no chunks with earlier snapshots.
    pub async fn rotate(&self, name: &str) -> Result<Arc<Tenant>, StoreError> {
        let (version, mut record) = self.existing(name).await?;
        let id = id_of(name, &record)?;
        let next = record.generation() + 1;
        record
            .generations
            .push(self.new_generation(name, &id, next).await?);
        self.write(name, version + 1, &record).await?;
        self.tenant(name).await
    }

    /// Returns the latest record of a tenant with its version.
    async fn existing(&self, name: &str) -> Result<(u32, Record), StoreError> {
        let newest = self.newest(name).await?;
        newest.ok_or_else(|| key_error(name, "it does not exist in the store"))
    }

    /// Reads the latest record of tenant `name`.
    async fn newest(&self, name: &str) -> Result<Option<(u32, Record)>, StoreError> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let listed = self.backend.list(&self.prefix(name)).await?;
            match self.newest_of(name, &listed).await {
                // Another host rewrote the record and removed this version.
                Err(StoreError::Missing { .. }) if attempts < RETAINED_VERSIONS => {}
                other => return other,
            }
        }
    }

    /// Reads the record of a tenant with the highest version among `listed`. Fails if this host has
    /// seen a later version.
    async fn newest_of(
        &self,
        name: &str,
        listed: &[Listed],
    ) -> Result<Option<(u32, Record)>, StoreError> {
        let newest = listed
            .iter()
            .filter_map(|object| version_of(&object.key))
            .max();
        let prefix = self.prefix(name);
        let Some(version) = newest else {
            // The call fails if this host has seen a record of the tenant.
            self.versions.check(&prefix, RecordVersion::default())?;
            return Ok(None);
        };
        let key = record_key(&prefix, version);
        let object = self.backend.get(&key, MAX_RECORD_BYTES).await?;
        let opened = self.keyring.open_record(name, &object);
        let opened = Zeroizing::new(opened.map_err(StoreError::damaged(&key))?);
        let parsed = serde_json::from_slice::<Record>(&opened);
        let record = parsed.map_err(|_| key_error(name, "its record is malformed"))?;
        if record.version.is_some_and(|written| written != version) {
            let reason = FormatError::Damaged("it is another version of the record");
            return Err(StoreError::damaged(&key)(reason));
        }
        let current = RecordVersion {
            version: version.into(),
            generation: record.generation(),
        };
        self.versions.check(&prefix, current)?;
        Ok(Some((version, record)))
    }

    /// Writes a version of a tenant's record, which must not exist yet, and removes old versions.
    async fn write(&self, name: &str, version: u32, record: &Record) -> Result<(), StoreError> {
        let malformed = |_| key_error(name, "its record cannot be encoded");
        let record = Record {
            // Omit the version of the first record, for earlier versions of Jiffy.
            version: (version > 1).then_some(version),
            ..record.clone()
        };
        let text = serde_json::to_vec(&record).map_err(malformed)?;
        let key = record_key(&self.prefix(name), version);
        let sealed = self
            .keyring
            .seal_record(name, &text)
            .map_err(StoreError::damaged(&key))?;
        // Without conditional writes, two hosts could write different records of the same version.
        self.backend.check_conditions().await?;
        if !self.backend.create(&key, sealed.clone().into()).await?
            // The response to an earlier attempt may have been lost.
            && self.backend.get(&key, MAX_RECORD_BYTES).await? != sealed
        {
            return Err(StoreError::Conflict { object: key });
        }
        let listed = self.backend.list(&self.prefix(name)).await?;
        for old in listed {
            let is_old = |at: u32| at as usize + RETAINED_VERSIONS <= version as usize;
            if version_of(&old.key).is_some_and(is_old) {
                self.backend.delete(&old.key).await?;
            }
        }
        Ok(())
    }

    /// Creates the secret of a generation, and wraps it with the current master key.
    async fn new_generation(
        &self,
        name: &str,
        id: &TenantId,
        generation: u32,
    ) -> Result<Wrapped, StoreError> {
        let secret = random().map_err(|e| key_error(name, &e.to_string()))?;
        self.wrap_one(name, id, generation, &Zeroizing::new(secret))
            .await
    }

    /// Encrypts the secret of one generation under the current master key.
    async fn wrap_one(
        &self,
        name: &str,
        id: &TenantId,
        generation: u32,
        secret: &[u8; 32],
    ) -> Result<Wrapped, StoreError> {
        let wrapped = self
            .keyring
            .wrap(name, &context(id, generation), secret)
            .await?;
        Ok(Wrapped {
            generation,
            key: self.keyring.current().to_owned(),
            secret: to_hex(&wrapped),
        })
    }

    /// Decrypts the secret of one generation of a tenant's keys with the master key.
    async fn unwrap_one(
        &self,
        name: &str,
        id: &TenantId,
        wrapped: &Wrapped,
    ) -> Result<Zeroizing<[u8; 32]>, StoreError> {
        let malformed = || key_error(name, "a secret in its record is malformed");
        if wrapped.secret.len() > 2 * MAX_WRAPPED_BYTES {
            return Err(malformed());
        }
        let bytes = (wrapped.secret.as_bytes().chunks(2))
            .map(|pair| {
                std::str::from_utf8(pair)
                    .ok()
                    .and_then(hex::<1>)
                    .map(|[byte]| byte)
            })
            .collect::<Option<Vec<u8>>>()
            .ok_or_else(malformed)?;
        let context = context(id, wrapped.generation);
        self.keyring
            .unwrap(name, &wrapped.key, &context, &bytes)
            .await
    }

    /// Decrypts the secrets of a record, and derives the keys of each generation.
    async fn unwrap(&self, name: &str, record: &Record) -> Result<Tenant, StoreError> {
        let id = id_of(name, record)?;
        if record.generations.is_empty() || record.generations.len() > MAX_GENERATIONS {
            return Err(key_error(name, "its record has no or too many generations"));
        }
        let mut generations = BTreeMap::new();
        for wrapped in &record.generations {
            let secret = self.unwrap_one(name, &id, wrapped).await?;
            generations.insert(
                wrapped.generation,
                DataKeys::derive(wrapped.generation, &secret),
            );
        }
        Ok(Tenant::new(name, id, generations))
    }
}

fn context(id: &TenantId, generation: u32) -> Vec<u8> {
    [&id[..], &generation.to_le_bytes()].concat()
}

fn id_of(name: &str, record: &Record) -> Result<TenantId, StoreError> {
    hex(&record.id).ok_or_else(|| key_error(name, "the id in its record is malformed"))
}

/// Returns the beginning of each record before its encryption. `None` for bytes that vary.
pub(crate) fn record_beginning() -> Vec<Option<u8>> {
    let fixed = |text: &'static str| text.bytes().map(Some);
    let id = std::iter::repeat_n(None, 2 * size_of::<TenantId>());
    let rest = "\",\"generations\":[{\"generation\":";
    fixed("{\"id\":\"").chain(id).chain(fixed(rest)).collect()
}

fn record_key(prefix: &str, version: u32) -> String {
    format!("{prefix}/{version:010}")
}

/// Returns the version in the key of a record. `None` for other objects of a tenant, such as its
/// name.
pub(crate) fn version_of(key: &str) -> Option<u32> {
    key.rsplit('/').next()?.parse().ok()
}
