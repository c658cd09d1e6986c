//! Locations of a snapshot's chunks: pack and frame of each chunk. They are separate from the
//! manifest, so that frames can move without changing the manifest.
//!
//! A *chunk* is 64 KiB of memory or of a disk. A *pack* is an object in the store with many
//! compressed and encrypted chunks. The *root* of a snapshot is the hash that identifies it in the
//! store. A *frame* is a compressed and encrypted chunk in a pack.
//!
//! Body, encrypted in an [`Envelope`](crate::envelope) named by the snapshot's root: number of
//! packs (4 bytes) and their ids (16 bytes each), number of chunks (4), and an entry per chunk. The
//! entries follow the order of the stored chunks, part by part. An entry is the number of the
//! pack (4), and offset (4) and length (4) of the frame.

use crate::FormatError;
use crate::codec::{Reader, put_count};
use crate::data_keys::{DataKeys, Hash, SEAL_BYTES};
use crate::envelope::{HEADER_BYTES, Header, TenantId};
use crate::pack::{MAX_FRAME_BYTES, MAX_PACK_BYTES, PackId};
use std::collections::HashMap;

/// Maximum size in bytes of an object of locations.
pub const MAX_LOCATIONS_BYTES: u64 = 256 << 20;
/// Maximum number of packs that contain the chunks of a snapshot.
const MAX_PACKS: usize = 1 << 20;
/// Maximum number of chunks of a snapshot.
const MAX_CHUNKS: usize = 16 << 20;
/// Length in bytes of the entry of a chunk.
const CHUNK_LOCATION_BYTES: usize = 12;
/// First bytes of an object of locations.
const LOCATIONS_MAGIC: [u8; 8] = *b"JIFFYLOC";

/// Location of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Location {
    /// Pack.
    pub pack: PackId,
    /// Offset of the frame in bytes.
    pub offset: u32,
    /// Length of the frame in bytes.
    pub length: u32,
}

/// Locations of all stored chunks of a manifest, in the order of the chunks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Locations(pub Vec<Location>);

impl Locations {
    /// Encodes and encrypts the locations of the snapshot `root`.
    pub fn encode(
        &self,
        keys: &DataKeys,
        tenant: TenantId,
        root: Hash,
    ) -> Result<Vec<u8>, FormatError> {
        let header = Header {
            magic: LOCATIONS_MAGIC,
            generation: keys.generation(),
            tenant,
            name: root.0,
        };
        header.seal(keys, &self.encode_body()?)
    }

    /// Encodes the list of packs, then a pack's number, an offset and a length for each chunk.
    fn encode_body(&self) -> Result<Vec<u8>, FormatError> {
        let mut packs: Vec<PackId> = Vec::new();
        let mut numbers: HashMap<PackId, u32> = HashMap::new();
        let mut chunks = Vec::with_capacity(self.0.len() * CHUNK_LOCATION_BYTES);
        for location in &self.0 {
            let number = *numbers.entry(location.pack).or_insert_with(|| {
                packs.push(location.pack);
                (packs.len() - 1) as u32
            });
            for field in [number, location.offset, location.length] {
                chunks.extend(field.to_le_bytes());
            }
        }
        let mut to = Vec::with_capacity(chunks.len() + packs.len() * 16 + 8);
        put_count(&mut to, packs.len())?;
        to.extend(packs.iter().flatten());
        put_count(&mut to, self.0.len())?;
        to.extend(chunks);
        Ok(to)
    }

    /// Decrypts and decodes the locations of the snapshot `root`.
    pub fn decode(object: &[u8], keys: &DataKeys, root: Hash) -> Result<Self, FormatError> {
        let header = Header::decode(LOCATIONS_MAGIC, object)?;
        if header.name != root.0 {
            return Err(FormatError::Damaged("they belong to another snapshot"));
        }
        Self::decode_body(&header.open(keys, object)?)
    }

    /// Decodes the body. Public for fuzzing.
    pub fn decode_body(body: &[u8]) -> Result<Self, FormatError> {
        let mut reader = Reader::new(body);
        let packs = reader.count(16, MAX_PACKS)?;
        let packs = (0..packs)
            .map(|_| reader.array())
            .collect::<Result<Vec<PackId>, _>>()?;
        let count = reader.count(CHUNK_LOCATION_BYTES, MAX_CHUNKS)?;
        let mut chunks = Vec::with_capacity(count);
        for _ in 0..count {
            let pack = packs.get(reader.u32()? as usize);
            let (offset, length) = (reader.u32()?, reader.u32()?);
            let end = u64::from(offset) + u64::from(length);
            let fits = (SEAL_BYTES + 1..=MAX_FRAME_BYTES).contains(&(length as usize))
                && offset as usize >= HEADER_BYTES
                && end <= MAX_PACK_BYTES;
            let (Some(&pack), true) = (pack, fits) else {
                return Err(FormatError::Damaged("a location is invalid"));
            };
            chunks.push(Location {
                pack,
                offset,
                length,
            });
        }
        reader.end()?;
        Ok(Self(chunks))
    }

    /// Returns the packs without duplicates.
    pub fn packs(&self) -> impl Iterator<Item = PackId> {
        let mut packs: Vec<PackId> = self.0.iter().map(|location| location.pack).collect();
        packs.sort_unstable();
        packs.dedup();
        packs.into_iter()
    }
}
