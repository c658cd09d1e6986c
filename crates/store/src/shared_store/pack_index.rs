//! Indexes of a tenant's packs: the chunks that the store has. Indexes that were read are cached,
//! still encrypted, in a directory of the host.

use crate::data_keys::{DataKeys, Hash, hex};
use crate::envelope::{HEADER_BYTES, Header};
use crate::locations::Location;
use crate::pack::{Entry, MAX_INDEX_BYTES, PACK_MAGIC, PackId, TRAILER_BYTES, Trailer};
use crate::shared_store::SharedStore;
use crate::tenant::Tenant;
use crate::{FormatError, StoreError};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;
use std::sync::Mutex;

/// Number of bytes first read from the end of a pack. They include the whole index of most packs.
const FIRST_READ_BYTES: u64 = 32 << 10;

/// Chunks that the store has, with their locations.
#[derive(Debug, Default)]
pub(crate) struct PackIndex {
    pub chunks: HashMap<Hash, Location>,
    pub packs: HashSet<PackId>,
}

impl PackIndex {
    pub fn add(&mut self, pack: PackId, entries: &[Entry]) {
        self.packs.insert(pack);
        for entry in entries {
            let location = Location {
                pack,
                offset: entry.offset,
                length: entry.length,
            };
            self.chunks.entry(entry.hash).or_insert(location);
        }
    }
}

/// Returns the id in the key of a pack.
pub(crate) fn pack_id(key: &str) -> Option<PackId> {
    hex(key.rsplit('/').next()?)
}

impl SharedStore {
    /// Reads the indexes of all packs of a generation except the packs in `without`.
    pub(crate) async fn pack_index(
        &self,
        tenant: &Tenant,
        keys: &DataKeys,
        cache: &Path,
        without: &HashSet<String>,
    ) -> Result<PackIndex, StoreError> {
        let prefix = tenant.key(&format!("packs/{}", keys.generation()));
        let listed = self.backend.list(&prefix).await?;
        let cache = cache.join(prefix.replace('/', "-"));
        fs::create_dir_all(&cache).map_err(StoreError::io(&cache))?;
        let index = Mutex::new(PackIndex::default());
        let packs = listed.iter().filter(|pack| !without.contains(&pack.key));
        self.backend
            .each(packs, async |pack| {
                let Some(id) = pack_id(&pack.key) else {
                    return Ok(());
                };
                match self.read_index(tenant, keys, &cache, id, pack.bytes).await {
                    Ok(entries) => {
                        index
                            .lock()
                            .unwrap_or_else(|e| e.into_inner())
                            .add(id, &entries);
                        Ok(())
                    }
                    // Do not reuse a pack that is damaged or was just collected.
                    Err(e @ (StoreError::Damaged { .. } | StoreError::Missing { .. })) => {
                        tracing::warn!(error = %e, "cannot reuse a pack");
                        Ok(())
                    }
                    Err(e) => Err(e),
                }
            })
            .await?;
        evict_unlisted(&cache, &listed);
        Ok(index.into_inner().unwrap_or_else(|e| e.into_inner()))
    }

    async fn read_index(
        &self,
        tenant: &Tenant,
        keys: &DataKeys,
        cache: &Path,
        id: PackId,
        size: u64,
    ) -> Result<Vec<Entry>, StoreError> {
        let cached = cache.join(crate::data_keys::to_hex(&id));
        if let Ok(tail) = fs::read(&cached)
            && let Ok(entries) = decode_tail(tenant, keys, id, &tail, size)
        {
            return Ok(entries);
        }
        let tail = self.read_tail(tenant, keys, id, size).await?;
        let key = tenant.pack_key(keys.generation(), &id);
        let entries =
            decode_tail(tenant, keys, id, &tail, size).map_err(StoreError::damaged(&key))?;
        // If the write fails, the next push reads the index from the store again.
        if let Err(e) = fs::write(&cached, &tail) {
            tracing::warn!(path = %cached.display(), error = %e, "cannot cache the index of a pack");
        }
        Ok(entries)
    }

    /// Reads index and trailer of a pack of `size` bytes from the store.
    pub(crate) async fn read_tail(
        &self,
        tenant: &Tenant,
        keys: &DataKeys,
        id: PackId,
        size: u64,
    ) -> Result<Vec<u8>, StoreError> {
        let key = tenant.pack_key(keys.generation(), &id);
        let short = StoreError::damaged(&key);
        if size < (HEADER_BYTES + TRAILER_BYTES) as u64 {
            return Err(short(FormatError::Damaged("it is truncated")));
        }
        let from = size.saturating_sub(FIRST_READ_BYTES);
        let read = self.backend.get_range(&key, from..size).await?;
        let end = read.len().saturating_sub(TRAILER_BYTES);
        let trailer = Trailer::decode(&read[end..], size).map_err(short)?;
        // The first read contains the whole index.
        if trailer.offset >= from {
            return Ok(read[(trailer.offset - from) as usize..].to_vec());
        }
        Ok(self
            .backend
            .get_range(&key, trailer.offset..size)
            .await?
            .to_vec())
    }
}

/// Decodes index and trailer of a pack of `size` bytes.
pub(crate) fn decode_tail(
    tenant: &Tenant,
    keys: &DataKeys,
    id: PackId,
    tail: &[u8],
    size: u64,
) -> Result<Vec<Entry>, FormatError> {
    let short = FormatError::Damaged("it is truncated");
    let end = tail.len().checked_sub(TRAILER_BYTES).ok_or(short.clone())?;
    if end > MAX_INDEX_BYTES {
        return Err(FormatError::Damaged("its index is too long"));
    }
    let trailer = Trailer::decode(&tail[end..], size)?;
    if trailer.length as usize != end {
        return Err(short);
    }
    let mut name = [0; 32];
    name[..16].copy_from_slice(&id);
    let header = Header {
        magic: PACK_MAGIC,
        generation: keys.generation(),
        tenant: tenant.id(),
        name,
    };
    trailer.open(keys, &header, &tail[..end])
}

/// Removes cached indexes of packs that no longer exist.
fn evict_unlisted(cache: &Path, listed: &[crate::Listed]) {
    let existing: HashSet<&str> = listed
        .iter()
        .filter_map(|pack| pack.key.rsplit('/').next())
        .collect();
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        if entry
            .file_name()
            .to_str()
            .is_none_or(|name| !existing.contains(name))
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}
