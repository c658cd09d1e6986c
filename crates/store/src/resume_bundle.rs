//! Resume bundle: one object with everything that a host reads first to resume a snapshot of
//! another host. It is a copy of other objects, and can be rebuilt from them.
//!
//! A *chunk* is 64 KiB of memory or of a disk. The *root* of a snapshot is the hash that identifies
//! it in the store. A *pack* is an object in the store with many compressed and encrypted chunks. A
//! *frame* is a compressed and encrypted chunk in a pack. The *locations* of a snapshot are an
//! object with pack and frame of each chunk. A *part* is the memory, the disk or another file of a
//! snapshot.
//!
//! Body, little-endian, encrypted in an [`Envelope`](crate::envelope) named by the snapshot's root:
//!
//! | bytes | content |
//! |---|---|
//! | 4 | number of snapshots: the snapshot and its ancestors, nearest first |
//! | | each snapshot: length (4) and bytes of its manifest, then of its locations, as stored |
//! | 4 | number of chunks |
//! | 16 each | number of snapshot (4), part (4) and chunk (4), and length of the frame (4) |
//! | | frames as in packs ([`crate::pack`]), in the order of use |
//!
//! Manifests, locations and frames are verified like content of their own objects and of packs.

use crate::FormatError;
use crate::codec::{Reader, put_count};
use crate::data_keys::{DataKeys, Hash, SEAL_BYTES};
use crate::envelope::{Header, TenantId};
use crate::manifest::MAX_LINEAGE;
use crate::pack::MAX_FRAME_BYTES;
use bytes::Bytes;

/// Maximum number of bytes of all frames.
pub const MAX_BUNDLED_BYTES: usize = 16 << 20;
/// Maximum number of bytes of all manifests and locations.
pub const MAX_BUNDLED_DOCUMENTS: usize = 16 << 20;
/// Maximum number of chunks.
pub const MAX_BUNDLED_CHUNKS: usize = 1 << 16;
/// Length in bytes of the entry of a chunk.
const CHUNK_ENTRY_BYTES: usize = 16;
/// Maximum size of a bundle in bytes, with 4,096 bytes for lengths, counts and encryption.
pub(crate) const MAX_BUNDLE_BYTES: u64 =
    (MAX_BUNDLED_BYTES + MAX_BUNDLED_DOCUMENTS + MAX_BUNDLED_CHUNKS * CHUNK_ENTRY_BYTES + 4096)
        as u64;
/// First bytes of a bundle.
const BUNDLE_MAGIC: [u8; 8] = *b"JIFFYRES";

/// Objects of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BundledSnapshot {
    /// Object of its manifest.
    pub manifest: Bytes,
    /// Object of its locations.
    pub locations: Bytes,
}

/// Chunk in a bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BundledChunk {
    /// Index of its snapshot in the bundle.
    pub snapshot: u32,
    /// Index of its part in the manifest.
    pub part: u32,
    /// Number of the chunk in its part.
    pub number: u32,
    /// Frame.
    pub frame: Bytes,
}

/// Content of a resume bundle.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResumeBundle {
    /// The snapshot and its ancestors, nearest first.
    pub snapshots: Vec<BundledSnapshot>,
    /// Chunks in the order of use.
    pub chunks: Vec<BundledChunk>,
}

impl ResumeBundle {
    /// Encodes and encrypts the bundle of the snapshot `root`.
    pub fn encode(
        &self,
        keys: &DataKeys,
        tenant: TenantId,
        root: Hash,
    ) -> Result<Vec<u8>, FormatError> {
        let mut body = Vec::new();
        put_count(&mut body, self.snapshots.len())?;
        for snapshot in &self.snapshots {
            for object in [&snapshot.manifest, &snapshot.locations] {
                put_count(&mut body, object.len())?;
                body.extend_from_slice(object);
            }
        }
        put_count(&mut body, self.chunks.len())?;
        for chunk in &self.chunks {
            for field in [chunk.snapshot, chunk.part, chunk.number] {
                body.extend(field.to_le_bytes());
            }
            put_count(&mut body, chunk.frame.len())?;
        }
        for chunk in &self.chunks {
            body.extend_from_slice(&chunk.frame);
        }
        let body = Bytes::from(body);
        // Never write a bundle that cannot be read back.
        Self::decode_body(&body)?;
        header(keys, tenant, root).seal(keys, &body)
    }

    /// Returns the generation of the data keys of the encrypted bundle `object` of `tenant`.
    pub(crate) fn generation(object: &[u8], tenant: TenantId) -> Result<u32, FormatError> {
        let header = Header::decode(BUNDLE_MAGIC, object)?;
        if header.tenant == tenant {
            Ok(header.generation)
        } else {
            Err(FormatError::Damaged("it belongs to another tenant"))
        }
    }

    /// Decrypts and decodes the bundle of the snapshot `root`.
    pub fn decode(
        object: &[u8],
        keys: &DataKeys,
        tenant: TenantId,
        root: Hash,
    ) -> Result<Self, FormatError> {
        let expected = header(keys, tenant, root);
        if Header::decode(BUNDLE_MAGIC, object)? != expected {
            return Err(FormatError::Damaged("it belongs to another snapshot"));
        }
        Self::decode_body(&expected.open(keys, object)?.into())
    }

    /// Decodes the body. Public for fuzzing.
    pub fn decode_body(body: &Bytes) -> Result<Self, FormatError> {
        let mut reader = Reader::new(body);
        let count = reader.count(8, MAX_LINEAGE + 1)?;
        let mut documents = 0;
        let mut snapshots = Vec::with_capacity(count);
        for _ in 0..count {
            let mut object = || {
                let length = reader.count(1, MAX_BUNDLED_DOCUMENTS)?;
                documents += length;
                Ok::<_, FormatError>(body.slice_ref(reader.bytes(length)?))
            };
            snapshots.push(BundledSnapshot {
                manifest: object()?,
                locations: object()?,
            });
        }
        if documents > MAX_BUNDLED_DOCUMENTS {
            return Err(FormatError::Damaged("its manifests are too large"));
        }
        let count = reader.count(CHUNK_ENTRY_BYTES, MAX_BUNDLED_CHUNKS)?;
        let mut entries = Vec::with_capacity(count);
        let mut bytes = 0;
        for _ in 0..count {
            let entry = [reader.u32()?, reader.u32()?, reader.u32()?, reader.u32()?];
            let [snapshot, _, _, length] = entry.map(|field| field as usize);
            bytes += length;
            let is_sound = snapshot < snapshots.len()
                && (SEAL_BYTES + 1..=MAX_FRAME_BYTES).contains(&length)
                && bytes <= MAX_BUNDLED_BYTES;
            if !is_sound {
                return Err(FormatError::Damaged("a chunk is outside its limits"));
            }
            entries.push(entry);
        }
        let mut chunks = Vec::with_capacity(count);
        for [snapshot, part, number, length] in entries {
            chunks.push(BundledChunk {
                snapshot,
                part,
                number,
                frame: body.slice_ref(reader.bytes(length as usize)?),
            });
        }
        reader.end()?;
        Ok(Self { snapshots, chunks })
    }
}

fn header(keys: &DataKeys, tenant: TenantId, root: Hash) -> Header {
    Header {
        magic: BUNDLE_MAGIC,
        generation: keys.generation(),
        tenant,
        name: root.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bundle() -> ResumeBundle {
        let chunk = |number| BundledChunk {
            snapshot: 1,
            part: 2,
            number,
            frame: vec![number as u8; SEAL_BYTES + 1].into(),
        };
        let snapshot = |name: &'static str| BundledSnapshot {
            manifest: name.as_bytes().into(),
            locations: Bytes::new(),
        };
        ResumeBundle {
            snapshots: vec![snapshot("child"), snapshot("parent")],
            chunks: vec![chunk(7), chunk(3)],
        }
    }

    #[test]
    fn a_bundle_is_read_under_its_own_root_tenant_and_keys_only() {
        let (keys, root) = (DataKeys::derive(1, &[1; 32]), Hash([4; 32]));
        let mut object = bundle().encode(&keys, [9; 16], root).unwrap();
        let decode = |object: &[u8], keys, tenant: u8, root: u8| {
            ResumeBundle::decode(object, keys, [tenant; 16], Hash([root; 32]))
        };
        assert_eq!(decode(&object, &keys, 9, 4), Ok(bundle()));
        assert_eq!(ResumeBundle::generation(&object, [9; 16]), Ok(1));
        assert!(ResumeBundle::generation(&object, [8; 16]).is_err());
        let others = DataKeys::derive(1, &[2; 32]);
        for (keys, tenant, root) in [(&keys, 9, 5), (&keys, 8, 4), (&others, 9, 4)] {
            assert!(decode(&object, keys, tenant, root).is_err());
        }
        for at in 0..object.len() {
            object[at] ^= 1;
            assert!(decode(&object, &keys, 9, 4).is_err(), "byte {at}");
            object[at] ^= 1;
            assert!(decode(&object[..at], &keys, 9, 4).is_err());
        }
    }

    #[test]
    fn a_bundle_beyond_its_limits_is_neither_written_nor_read() {
        let keys = DataKeys::derive(1, &[1; 32]);
        let write = |bundle: &ResumeBundle| bundle.encode(&keys, [9; 16], Hash([4; 32]));
        let mut unknown_snapshot = bundle();
        unknown_snapshot.chunks[0].snapshot = 2;
        let mut long_frame = bundle();
        long_frame.chunks[0].frame = vec![0; MAX_FRAME_BYTES + 1].into();
        let mut many_bytes = bundle();
        let frame = Bytes::from(vec![0; MAX_FRAME_BYTES]);
        many_bytes.chunks[0].frame = frame;
        let chunk = many_bytes.chunks[0].clone();
        many_bytes.chunks = vec![chunk; MAX_BUNDLED_BYTES / MAX_FRAME_BYTES + 1];
        let mut large_documents = bundle();
        for snapshot in &mut large_documents.snapshots {
            snapshot.manifest = vec![0; MAX_BUNDLED_DOCUMENTS / 2 + 1].into();
        }
        let mut long_lineage = bundle();
        long_lineage.snapshots = vec![bundle().snapshots[0].clone(); MAX_LINEAGE + 2];
        for refused in [
            unknown_snapshot,
            long_frame,
            many_bytes,
            large_documents,
            long_lineage,
        ] {
            assert!(write(&refused).is_err());
        }
        assert!(ResumeBundle::decode_body(&Bytes::from_static(&[255; 64])).is_err());
    }
}
