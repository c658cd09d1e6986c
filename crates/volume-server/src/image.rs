//! Image of a volume: one file with its catalog and the contents of its files, for a store that
//! divides files into chunks.
//!
//! A *node* is a file, directory or link of a volume, identified by a number. The *charged* bytes
//! of a file are its length, rounded up to 4 KiB.
//!
//! | offset | bytes | content |
//! |---|---|---|
//! | 0 | 8 | `JIFFYVOL` |
//! | 8 | 4 | version |
//! | 12 | 4 | 0 |
//! | 16 | 8 | maximum number of bytes of the volume |
//! | 24 | 8 | maximum number of nodes |
//! | 32 | 8 | number of contents |
//! | 40 | 8 | offset of the catalog |
//! | 48 | 8 | length of the catalog |
//! | 56 | 8 | charged bytes of the contents |
//! | 64 | | contents: node, offset, length, times of the last change and access (8 bytes each) |
//!
//! Numbers are little-endian. Large contents start at multiples of the size of a chunk. Small
//! contents share chunks with contents of similar numbers. A change of one file therefore changes
//! few chunks.

mod read;

pub use crate::volume::ImageSummary;
pub use read::{ImageError, ImageHead, unpack};

/// Start of an image.
pub(crate) const MAGIC: [u8; 8] = *b"JIFFYVOL";
pub(crate) const VERSION: u32 = 1;
/// Length of the head and of the entry of a content.
pub(crate) const HEAD_BYTES: usize = 64;
pub(crate) const ENTRY_BYTES: usize = 40;
/// Size of the chunks of the store.
pub(crate) const CHUNK: u64 = 64 << 10;
/// Length from which a content starts at a multiple of [`CHUNK`].
pub(crate) const LARGE: u64 = 32 << 10;
/// Alignment of small contents.
pub(crate) const SMALL_ALIGNMENT: u64 = 512;
/// Small contents share chunks if the numbers of their nodes, divided by this constant, have the
/// same integer quotient.
pub(crate) const GROUP: u64 = 64;

/// Content of a file in an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ImageEntry {
    pub(crate) node: u64,
    /// Position of the content in the image.
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) modified_ns: i64,
    pub(crate) accessed_ns: i64,
}

impl ImageEntry {
    /// Encodes an entry.
    pub(crate) fn bytes(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        let fields = [
            self.node,
            self.offset,
            self.length,
            self.modified_ns.cast_unsigned(),
            self.accessed_ns.cast_unsigned(),
        ];
        for (place, field) in bytes.chunks_exact_mut(8).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    /// Parses an entry: five numbers of 64 bits in the order of the fields below.
    fn parse(bytes: &[u8; ENTRY_BYTES]) -> Self {
        let (fields, _) = bytes.as_chunks::<8>();
        let field = |at: usize| u64::from_le_bytes(fields.get(at).copied().unwrap_or_default());
        Self {
            node: field(0),
            offset: field(1),
            length: field(2),
            modified_ns: field(3).cast_signed(),
            accessed_ns: field(4).cast_signed(),
        }
    }
}
