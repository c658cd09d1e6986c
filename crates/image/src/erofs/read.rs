//! Reader of EROFS images as [`super::write`] creates them: uncompressed, contiguous, on one
//! device. The offsets and field names are defined in fs/erofs/erofs_fs.h of Linux.
//!
//! Images may be hostile. Every read is bounded by the end of the file, arithmetic on fields of the
//! image cannot overflow, and the widths of the fields bound the use of memory.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const SUPER_BLOCK: u64 = 1024;
const EROFS_MAGIC: u32 = 0xe0f5_e1e2;
/// Incompatible feature that is accepted: `EROFS_FEATURE_INCOMPAT_ZERO_PADDING`, which concerns
/// compressed data only.
const ACCEPTED_FEATURES: u32 = 1;
/// Unit of inode numbers in bytes.
const INODE_SLOT_BYTES: u64 = 32;
const DIRENT_BYTES: usize = 12;
/// Prefixes of attribute names, by `EROFS_XATTR_INDEX_*`.
const XATTR_PREFIXES: [(u8, &str); 5] = [
    (1, "user."),
    (2, "system.posix_acl_access"),
    (3, "system.posix_acl_default"),
    (4, "trusted."),
    (6, "security."),
];

/// Error of an image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("the image cannot be read: {0}")]
    Read(#[from] io::Error),
    #[error("the image is damaged: {0}")]
    Damaged(&'static str),
    #[error("the image uses an unsupported feature: {0}")]
    Foreign(&'static str),
}

/// An EROFS image.
pub(super) struct ErofsImage<'a> {
    file: &'a File,
    /// Block size in bytes.
    block: u64,
    /// Offset of inode 0 in the image.
    inodes: u64,
    /// Offset of the attributes that several inodes share.
    attributes: u64,
    /// Modification time of compact inodes, which store no time.
    time: (i64, u32),
    /// Inode number of the root directory.
    pub root: u64,
}

/// Location of a file's last, partial block.
enum InodeLayout {
    /// All blocks are contiguous.
    Plain,
    /// The last block follows the inode, at this offset of the image.
    Tail(u64),
}

/// An inode of any type.
pub(super) struct Inode {
    /// Inode number.
    pub number: u64,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub mtime: (i64, u32),
    pub links: u32,
    /// First block of the content, or a device number.
    pub word: u32,
    layout: InodeLayout,
    /// Offset and length of the extended attributes in bytes.
    attributes: (u64, u64),
}

type ErofsResult<T> = Result<T, ImageError>;

/// Reads a little-endian number, or returns 0 if the bytes are missing.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes
        .get(at..at + 2)
        .and_then(|b| b.try_into().ok())
        .map_or(0, u16::from_le_bytes)
}

/// Reads a little-endian number, or returns 0 if the bytes are missing.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes
        .get(at..at + 4)
        .and_then(|b| b.try_into().ok())
        .map_or(0, u32::from_le_bytes)
}

/// Reads a little-endian number. Missing bytes are read as 0.
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

impl<'a> ErofsImage<'a> {
    /// Opens an image: reads and checks its super block.
    pub(super) fn open(file: &'a File) -> ErofsResult<Self> {
        let mut image = Self {
            file,
            block: 0,
            inodes: 0,
            attributes: 0,
            time: (0, 0),
            root: 0,
        };
        let head = image.bytes(SUPER_BLOCK, 128)?;
        if u32_at(&head, 0) != EROFS_MAGIC {
            return Err(ImageError::Damaged("it is not an EROFS image"));
        }
        // feature_incompat, extra_devices
        if u32_at(&head, 80) & !ACCEPTED_FEATURES != 0 || u16_at(&head, 86) != 0 {
            return Err(ImageError::Foreign("compression, or several devices"));
        }
        // blkszbits: 512 bytes to 64 KiB
        let bits = u32::from(head[12]);
        if !(9..=16).contains(&bits) {
            return Err(ImageError::Damaged("its block size is invalid"));
        }
        image.block = 1 << bits;
        // root_nid, build_time, build_time_nsec, meta_blkaddr, xattr_blkaddr
        image.root = u64::from(u16_at(&head, 14));
        let seconds = i64::try_from(u64_at(&head, 24)).unwrap_or(0);
        image.time = (seconds, nanoseconds(u32_at(&head, 32)));
        // The products cannot overflow: block numbers have 32 bits, and the block size has at most
        // 17 bits.
        image.inodes = u64::from(u32_at(&head, 40)) * image.block;
        image.attributes = u64::from(u32_at(&head, 44)) * image.block;
        Ok(image)
    }

    fn bytes(&self, at: u64, length: usize) -> ErofsResult<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.fill(at, &mut bytes)?;
        Ok(bytes)
    }

    fn fill(&self, at: u64, buffer: &mut [u8]) -> ErofsResult<()> {
        match self.file.read_exact_at(buffer, at) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                Err(ImageError::Damaged("it is truncated"))
            }
            // The offset exceeds the maximum of the host's file system.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {
                Err(ImageError::Damaged("an offset is out of range"))
            }
            outcome => Ok(outcome?),
        }
    }

    /// Reads an inode. Its fields are not trusted, and checked where they are used.
    pub(super) fn inode(&self, number: u64) -> ErofsResult<Inode> {
        let far = ImageError::Damaged("the number of an inode is out of range");
        let at = number.checked_mul(INODE_SLOT_BYTES);
        let at = at.and_then(|at| at.checked_add(self.inodes)).ok_or(far)?;
        // A compact inode has 32 bytes, an extended inode 64. Both begin in the same way.
        let compact = self.bytes(at, 32)?;
        // i_format: bit 0 selects the extended inode, bits 1 to 3 the layout of the data.
        let format = u16_at(&compact, 0);
        let extended = format & 1 == 1;
        let i = if extended {
            self.bytes(at, 64)?
        } else {
            compact
        };
        // i_xattr_icount: 0 without attributes, otherwise n for a header of 12 bytes and n - 1
        // units of 4 bytes.
        let counted = u64::from(u16_at(&i, 2));
        let length = match counted {
            0 => 0,
            n => 12 + 4 * (n - 1),
        };
        // The sum cannot overflow: a read at an offset near the maximum has failed before.
        let inode_end = at + i.len() as u64;
        // EROFS_INODE_FLAT_PLAIN and EROFS_INODE_FLAT_INLINE.
        let layout = match format >> 1 & 7 {
            0 => InodeLayout::Plain,
            2 => InodeLayout::Tail(inode_end + length),
            _ => {
                return Err(ImageError::Foreign("a compressed or fragmented file"));
            }
        };
        // The numbers below are the offsets of the fields in `struct erofs_inode_extended` and
        // `struct erofs_inode_compact`.
        let mtime = (
            i64::try_from(u64_at(&i, 32)).unwrap_or(0),
            nanoseconds(u32_at(&i, 40)),
        );
        Ok(Inode {
            number,
            mode: u32::from(u16_at(&i, 4)),
            uid: if extended {
                u32_at(&i, 24)
            } else {
                u16_at(&i, 24).into()
            },
            gid: if extended {
                u32_at(&i, 28)
            } else {
                u16_at(&i, 26).into()
            },
            size: if extended {
                u64_at(&i, 8)
            } else {
                u32_at(&i, 8).into()
            },
            mtime: if extended { mtime } else { self.time },
            links: if extended {
                u32_at(&i, 44)
            } else {
                u16_at(&i, 6).into()
            },
            word: u32_at(&i, 16),
            layout,
            attributes: (inode_end, length),
        })
    }

    /// Reads content from `offset`, which must be inside the file. Returns the number of bytes
    /// read.
    pub(super) fn read(&self, inode: &Inode, offset: u64, buffer: &mut [u8]) -> ErofsResult<usize> {
        // The product cannot overflow: the factors have at most 32 and 17 bits.
        let first = u64::from(inode.word) * self.block;
        let (at, remaining) = match inode.layout {
            InodeLayout::Tail(tail) => {
                // Number of bytes in whole blocks before the tail.
                let before = inode.size.div_ceil(self.block).saturating_sub(1) * self.block;
                match offset.checked_sub(before) {
                    Some(into) => (tail + into, inode.size - offset),
                    None => (first.saturating_add(offset), before - offset),
                }
            }
            InodeLayout::Plain => (first.saturating_add(offset), inode.size - offset),
        };
        let length = usize::try_from(remaining).unwrap_or(usize::MAX);
        let length = length.min(buffer.len());
        self.fill(at, &mut buffer[..length])?;
        Ok(length)
    }

    /// Returns the target of a symbolic link.
    pub(super) fn target(&self, inode: &Inode) -> ErofsResult<Vec<u8>> {
        // PATH_MAX bounds the allocation.
        let length = usize::try_from(inode.size)
            .ok()
            .filter(|n| *n <= 4096)
            .ok_or(ImageError::Damaged(
                "the target of a symbolic link is too long",
            ))?;
        let mut target = vec![0; length];
        let mut filled = 0;
        while filled < length {
            filled += self.read(inode, filled as u64, &mut target[filled..])?;
        }
        Ok(target)
    }

    /// Returns the names in the directory block at `offset`, with their inode numbers.
    pub(super) fn names(&self, directory: &Inode, offset: u64) -> ErofsResult<Vec<(Vec<u8>, u64)>> {
        const INVALID: ImageError = ImageError::Damaged("a directory block is invalid");
        // Each block of a directory starts with a table of entries. The names follow the table.
        let remaining = (directory.size - offset).min(self.block);
        let mut block = vec![0; usize::try_from(remaining).unwrap_or(0)];
        let mut filled = 0;
        while filled < block.len() {
            filled += self.read(directory, offset + filled as u64, &mut block[filled..])?;
        }
        // The name of the first entry directly follows the table, so its offset is the table's
        // size.
        let table = usize::from(u16_at(&block, 8));
        if table < DIRENT_BYTES || table % DIRENT_BYTES != 0 || table > block.len() {
            return Err(INVALID);
        }
        let begins = |n: usize| usize::from(u16_at(&block, n * DIRENT_BYTES + 8));
        let count = table / DIRENT_BYTES;
        let mut names = Vec::with_capacity(count);
        for n in 0..count {
            // A name ends where the next one starts. The last name ends with the block or a zero
            // byte.
            let end = if n + 1 < count {
                begins(n + 1)
            } else {
                block.len()
            };
            let name = block.get(begins(n)..end).ok_or(INVALID)?;
            let name = name.split(|b| *b == 0).next().unwrap_or_default();
            // A slash would create a file in another directory.
            if name.is_empty() || name.contains(&b'/') {
                return Err(INVALID);
            }
            if name != b"." && name != b".." {
                names.push((name.to_vec(), u64_at(&block, n * DIRENT_BYTES)));
            }
        }
        Ok(names)
    }

    /// Block size in bytes.
    pub(super) fn block(&self) -> u64 {
        self.block
    }

    /// Returns the extended attributes with their full names.
    pub(super) fn attributes(&self, inode: &Inode) -> ErofsResult<Vec<(Vec<u8>, Vec<u8>)>> {
        const INVALID: ImageError = ImageError::Damaged("an extended attribute is invalid");
        let (at, length) = inode.attributes;
        if length == 0 {
            return Ok(Vec::new());
        }
        let body = self.bytes(at, usize::try_from(length).unwrap_or(0))?;
        let mut found = Vec::new();
        // h_shared_count: number of references to shared attributes, which precede the inode's own.
        let shared = usize::from(body[4]);
        // The header has 12 bytes. A reference is the offset of an attribute in units of 4 bytes.
        for n in 0..shared {
            let at = 12 + 4 * n;
            if at + 4 > body.len() {
                return Err(INVALID);
            }
            let place = self.attributes + 4 * u64::from(u32_at(&body, at));
            let head = self.bytes(place, 4)?;
            let entry = self.bytes(place, entry_length(&head))?;
            found.extend(attribute(&entry).ok_or(INVALID)?);
        }
        let mut rest = body.get(12 + 4 * shared..).ok_or(INVALID)?;
        // Each attribute begins at a multiple of 4 bytes.
        while rest.len() >= 4 {
            let length = entry_length(rest);
            found.extend(rest.get(..length).and_then(attribute).ok_or(INVALID)?);
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
        Ok(found)
    }
}

/// Length of an attribute entry in bytes: a header of 4 bytes (length of the name, number of the
/// prefix, length of the value), the name and the value.
fn entry_length(head: &[u8]) -> usize {
    4 + usize::from(head[0]) + usize::from(u16_at(head, 2))
}

/// Parses the name and value of an attribute. Returns `None` if the entry is too short, and
/// `Some(None)` if the prefix is unknown.
fn attribute(entry: &[u8]) -> Option<Option<(Vec<u8>, Vec<u8>)>> {
    let name = entry.get(4..4 + usize::from(*entry.first()?))?;
    let value = entry.get(4 + name.len()..)?;
    let prefix = XATTR_PREFIXES.iter().find(|(index, _)| *index == entry[1]);
    Some(prefix.map(|(_, prefix)| ([prefix.as_bytes(), name].concat(), value.to_vec())))
}

fn nanoseconds(n: u32) -> u32 {
    n.min(999_999_999)
}
