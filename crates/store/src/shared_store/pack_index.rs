//! Reads the index of a pack: the list of its chunks, at the end of the object.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *pack* is an object in the store with many
//! compressed and encrypted chunks.

use crate::data_keys::{DataKeys, hex};
use crate::envelope::{HEADER_BYTES, Header};
use crate::pack::{Entry, MAX_INDEX_BYTES, PACK_MAGIC, PackId, TRAILER_BYTES, Trailer};
use crate::shared_store::SharedStore;
use crate::tenant::Tenant;
use crate::{FormatError, StoreError};

/// Number of bytes first read from the end of a pack. They include the whole index of most packs.
const FIRST_READ_BYTES: u64 = 32 << 10;

/// Returns the id in the key of a pack.
pub(crate) fn pack_id(key: &str) -> Option<PackId> {
    hex(key.rsplit('/').next()?)
}

impl SharedStore {
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
    // The index is authenticated together with the pack's header, which is rebuilt, not read.
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
