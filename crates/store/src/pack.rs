//! Pack: many chunks in one immutable object.
//!
//! A *chunk* is 64 KiB of memory or of a disk.
//!
//! | offset | bytes | content |
//! |---|---|---|
//! | 0 | 64 | header ([`crate::envelope`]), name: the pack's id |
//! | 64 | | frames, each encrypted: 1 byte of codec (0 raw, 1 zstd), then the chunk |
//! | n | | index, encrypted: entries of 48 bytes |
//! | end - 56 | 8 | n |
//! | end - 48 | 4 | length of the index in bytes |
//! | end - 44 | 4 | number of frames |
//! | end - 40 | 32 | BLAKE3 of header, index and the 16 bytes before |
//! | end - 8 | 8 | end magic |
//!
//! An entry: hash of the chunk (32), offset of its frame (4), length of the frame (4), length of
//! the chunk (4), 0 (4). A frame is authenticated with the hash of its chunk but not with its pack,
//! so that it can be moved to another pack.

use crate::FormatError;
use crate::codec::Reader;
use crate::data_keys::{DataKeys, Hash, SEAL_BYTES, random};
use crate::envelope::{HEADER_BYTES, Header, TenantId};
use crate::manifest::CHUNK_BYTES;
use bytes::Bytes;

/// Maximum size of a pack in bytes.
pub const MAX_PACK_BYTES: u64 = 64 << 20;
/// Maximum number of frames of a pack.
pub const MAX_PACK_FRAMES: usize = 1 << 16;
/// Length in bytes of a pack's trailer, which locates the index.
pub const TRAILER_BYTES: usize = 56;
/// Length in bytes of an entry of the index.
pub const ENTRY_BYTES: usize = 48;
/// Maximum length of a frame in bytes: an incompressible chunk.
pub const MAX_FRAME_BYTES: usize = CHUNK_BYTES as usize + 1 + SEAL_BYTES;
/// Maximum length in bytes of the index of a pack.
pub const MAX_INDEX_BYTES: usize = MAX_PACK_FRAMES * ENTRY_BYTES + SEAL_BYTES;

/// First bytes of a pack.
pub(crate) const PACK_MAGIC: [u8; 8] = *b"JIFFYPAK";
/// Magic number in the trailer of a pack.
const END_MAGIC: [u8; 8] = *b"JIFFYEND";
/// First byte of the plain text of a frame: the chunk is not compressed.
const RAW: u8 = 0;
/// First byte of the plain text of a frame: the chunk is compressed with zstd.
const ZSTD: u8 = 1;
/// Compression level of zstd: the fastest one of the usual levels.
const ZSTD_LEVEL: i32 = 1;

/// Random id of a pack.
pub type PackId = [u8; 16];

/// Frame in a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Hash of the chunk.
    pub hash: Hash,
    /// Offset of the frame in the pack, in bytes.
    pub offset: u32,
    /// Length of the frame in bytes.
    pub length: u32,
    /// Length of the chunk in bytes.
    pub chunk: u32,
}

/// Compresses and encrypts a chunk.
pub fn encode_frame(keys: &DataKeys, hash: &Hash, chunk: &[u8]) -> Result<Vec<u8>, FormatError> {
    let packed = zstd::bulk::compress(chunk, ZSTD_LEVEL).ok();
    let (codec, data) = match &packed {
        Some(packed) if packed.len() < chunk.len() => (ZSTD, packed.as_slice()),
        _ => (RAW, chunk),
    };
    let mut plain = Vec::with_capacity(data.len() + 1);
    plain.push(codec);
    plain.extend(data);
    keys.seal(&hash.0, &plain)
}

/// Decrypts and decompresses a frame, and checks that its chunk has the hash `hash`.
pub fn decode_frame(keys: &DataKeys, hash: &Hash, frame: &[u8]) -> Result<Vec<u8>, FormatError> {
    if frame.len() > MAX_FRAME_BYTES {
        return Err(FormatError::Damaged("a frame is too long"));
    }
    let mut plain = keys.open(&hash.0, frame)?;
    let chunk = match plain.first() {
        Some(&RAW) => plain.split_off(1),
        Some(&ZSTD) => zstd::bulk::decompress(&plain[1..], CHUNK_BYTES as usize)
            .map_err(|_| FormatError::Damaged("a frame cannot be decompressed"))?,
        _ => return Err(FormatError::Damaged("the codec of a frame is unknown")),
    };
    if keys.chunk_hash(&chunk) == *hash {
        Ok(chunk)
    } else {
        Err(FormatError::Damaged("a chunk has another hash"))
    }
}

/// Builder of a pack.
#[derive(Debug)]
pub struct PackWriter {
    header: Header,
    bytes: Vec<u8>,
    entries: Vec<Entry>,
}

impl PackWriter {
    /// Starts a pack of `tenant` with a random id.
    pub fn new(keys: &DataKeys, tenant: TenantId) -> Result<Self, FormatError> {
        Ok(Self::with_id(keys, tenant, random()?))
    }

    /// Starts a pack with the given id.
    pub fn with_id(keys: &DataKeys, tenant: TenantId, id: PackId) -> Self {
        let mut name = [0; 32];
        name[..16].copy_from_slice(&id);
        let header = Header {
            magic: PACK_MAGIC,
            generation: keys.generation(),
            tenant,
            name,
        };
        Self {
            header,
            bytes: header.encode().to_vec(),
            entries: Vec::new(),
        }
    }

    /// Returns the id.
    pub fn id(&self) -> PackId {
        *self.header.name.first_chunk().unwrap_or(&[0; 16])
    }

    /// Returns the current length in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns true if the pack has no frames.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds the frame of a chunk of `chunk` bytes. The caller must finish the pack before its
    /// length exceeds [`MAX_PACK_BYTES`].
    pub fn push(&mut self, hash: Hash, frame: &[u8], chunk: usize) -> Result<Entry, FormatError> {
        let full = FormatError::Damaged("the pack is full");
        if self.entries.len() >= MAX_PACK_FRAMES || frame.len() > MAX_FRAME_BYTES {
            return Err(full);
        }
        let entry = Entry {
            hash,
            offset: u32::try_from(self.bytes.len()).map_err(|_| full.clone())?,
            length: u32::try_from(frame.len()).map_err(|_| full.clone())?,
            chunk: u32::try_from(chunk).map_err(|_| full)?,
        };
        self.bytes.extend(frame);
        self.entries.push(entry);
        Ok(entry)
    }

    /// Appends index and trailer. Returns the object and its index.
    pub fn finish(mut self, keys: &DataKeys) -> Result<(Bytes, Vec<Entry>), FormatError> {
        let mut index = Vec::with_capacity(self.entries.len() * ENTRY_BYTES);
        for entry in &self.entries {
            index.extend(entry.hash.0);
            for field in [entry.offset, entry.length, entry.chunk, 0] {
                index.extend(field.to_le_bytes());
            }
        }
        let index = keys.seal(&self.header.encode(), &index)?;
        let numbers = numbers(self.bytes.len(), index.len(), self.entries.len())?;
        let sum = checksum(&self.header, &index, &numbers);
        self.bytes.extend(index);
        self.bytes.extend(numbers);
        self.bytes.extend(sum);
        self.bytes.extend(END_MAGIC);
        Ok((self.bytes.into(), self.entries))
    }
}

/// Encodes offset and length of the index and the number of frames, as in the trailer.
fn numbers(offset: usize, length: usize, frames: usize) -> Result<[u8; 16], FormatError> {
    let full = |_| FormatError::Damaged("the pack is full");
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&(offset as u64).to_le_bytes());
    bytes[8..12].copy_from_slice(&u32::try_from(length).map_err(full)?.to_le_bytes());
    bytes[12..].copy_from_slice(&u32::try_from(frames).map_err(full)?.to_le_bytes());
    Ok(bytes)
}

fn checksum(header: &Header, index: &[u8], numbers: &[u8; 16]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher
        .update(&header.encode())
        .update(index)
        .update(numbers);
    *hasher.finalize().as_bytes()
}

/// Trailer of a pack: location of its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trailer {
    /// Offset of the index.
    pub offset: u64,
    /// Length of the index in bytes.
    pub length: u32,
    /// Number of frames.
    pub frames: u32,
    sum: [u8; 32],
}

impl Trailer {
    /// Decodes the last [`TRAILER_BYTES`] of a pack of `size` bytes.
    pub fn decode(bytes: &[u8], size: u64) -> Result<Self, FormatError> {
        let mut reader = Reader::new(bytes);
        let trailer = Self {
            offset: reader.u64()?,
            length: reader.u32()?,
            frames: reader.u32()?,
            sum: reader.array()?,
        };
        if reader.array()? != END_MAGIC {
            return Err(FormatError::Magic);
        }
        reader.end()?;
        let indexed = trailer.frames as usize * ENTRY_BYTES + SEAL_BYTES;
        let end = trailer
            .offset
            .checked_add(u64::from(trailer.length) + TRAILER_BYTES as u64);
        let plausible = trailer.frames as usize <= MAX_PACK_FRAMES
            && trailer.length as usize == indexed
            && trailer.offset >= HEADER_BYTES as u64
            && size <= MAX_PACK_BYTES
            && end == Some(size);
        if plausible {
            Ok(trailer)
        } else {
            Err(FormatError::Damaged("its end contradicts its size"))
        }
    }

    /// Decrypts and decodes the index of the pack with `header`.
    pub fn open(
        &self,
        keys: &DataKeys,
        header: &Header,
        index: &[u8],
    ) -> Result<Vec<Entry>, FormatError> {
        let numbers = numbers(self.offset as usize, index.len(), self.frames as usize)?;
        if checksum(header, index, &numbers) != self.sum {
            return Err(FormatError::Damaged("its index has another checksum"));
        }
        decode_index(&keys.open(&header.encode(), index)?, self.offset)
    }
}

/// Decodes an index whose frames end at `end`. Public for fuzzing.
pub fn decode_index(index: &[u8], end: u64) -> Result<Vec<Entry>, FormatError> {
    let mut reader = Reader::new(index);
    let mut entries = Vec::with_capacity(index.len() / ENTRY_BYTES);
    let mut next = HEADER_BYTES as u64;
    for _ in 0..index.len() / ENTRY_BYTES {
        let entry = Entry {
            hash: Hash(reader.array()?),
            offset: reader.u32()?,
            length: reader.u32()?,
            chunk: reader.u32()?,
        };
        let sound = reader.u32()? == 0
            && u64::from(entry.offset) == next
            && entry.length as usize <= MAX_FRAME_BYTES
            && entry.length as usize > SEAL_BYTES
            && (1..=CHUNK_BYTES).contains(&entry.chunk);
        if !sound {
            return Err(FormatError::Damaged(
                "an entry of its index contradicts the others",
            ));
        }
        next += u64::from(entry.length);
        entries.push(entry);
    }
    reader.end()?;
    if next == end {
        Ok(entries)
    } else {
        Err(FormatError::Damaged("its index does not cover its frames"))
    }
}

const _: () = assert!(TRAILER_BYTES == 8 + 4 + 4 + 32 + 8);
const _: () = assert!(ENTRY_BYTES == 32 + 4 * 4);
