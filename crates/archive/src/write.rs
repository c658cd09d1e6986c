//! Writer of tar archives in pax format: an extended header precedes an entry whose fields do not
//! fit into the plain header.
//!
//! The *map* of a sparse file lists its ranges with content. It is written in format 1.0 of GNU
//! tar.

use crate::entry::{ArchiveEntry, ArchiveEntryKind};
use crate::pax;
use std::io::{self, Write};
use tar::{EntryType, Header};

/// Size of a block of an archive in bytes. Headers are one block, and content is padded to blocks.
const BLOCK: usize = 512;
/// Length of the fields for name and target. Longer values are in an extended header.
const NAME: usize = 100;
/// Largest numbers in fields of seven (ids) and of eleven (size and time) octal digits.
const SMALL: u64 = 0o777_7777;
const LARGE: u64 = 0o777_7777_7777;

/// Writer of an archive.
pub struct ArchiveWriter<W> {
    out: W,
    /// Remaining bytes of the current entry.
    remaining: u64,
    /// Zeros between the content and the next block.
    padding: usize,
    /// Content of the extended header. Reused to avoid allocations.
    extended: Vec<u8>,
}

impl<W: Write> ArchiveWriter<W> {
    /// Creates a writer to `out`.
    pub fn new(out: W) -> Self {
        Self {
            out,
            remaining: 0,
            padding: 0,
            extended: Vec::new(),
        }
    }

    /// Starts an entry. [`ArchiveEntry::stored`] bytes of content must follow.
    pub fn begin(&mut self, entry: &ArchiveEntry) -> io::Result<()> {
        // In format 1.0, the map of a sparse file precedes its content, and both count as stored
        // bytes.
        let map = entry.is_sparse().then(|| map_of(entry));
        let stored = entry.stored() + map.as_ref().map_or(0, |map| map.len() as u64);
        let mut header = header_of(entry, stored);
        self.extend(entry, stored, map.is_some());
        if !self.extended.is_empty() {
            self.extended_header()?;
        }
        header.set_cksum();
        self.out.write_all(header.as_bytes())?;
        self.remaining = stored;
        let over = usize::try_from(stored % BLOCK as u64).unwrap_or(0);
        self.padding = (BLOCK - over) % BLOCK;
        match map {
            Some(map) => self.write_all(&map),
            None => Ok(()),
        }
    }

    /// Ends the current entry.
    pub fn end(&mut self) -> io::Result<()> {
        // The header contains the size, so missing content would make the archive invalid.
        if self.remaining > 0 {
            return Err(io::Error::other("content of an entry is missing"));
        }
        self.out.write_all(&[0; BLOCK][..self.padding])?;
        self.padding = 0;
        Ok(())
    }

    /// Adds an entry with its content.
    pub fn add(&mut self, entry: &ArchiveEntry, content: &[u8]) -> io::Result<()> {
        self.begin(entry)?;
        self.write_all(content)?;
        self.end()
    }

    /// Ends the archive.
    pub fn finish(mut self) -> io::Result<W> {
        // The end mark consists of two blocks of zeros.
        self.out.write_all(&[0; 2 * BLOCK])?;
        self.out.flush()?;
        Ok(self.out)
    }

    /// Collects the fields that do not fit into the header. `sparse` states whether a map precedes
    /// the content.
    fn extend(&mut self, entry: &ArchiveEntry, stored: u64, sparse: bool) {
        let text = &mut self.extended;
        text.clear();
        if sparse {
            pax::append(text, b"GNU.sparse.major", b"1");
            pax::append(text, b"GNU.sparse.minor", b"0");
            // This name replaces the `path` field. Readers without support for sparse files use the
            // name in the plain header, which may be truncated.
            pax::append(text, b"GNU.sparse.name", &entry.path);
            pax::append(
                text,
                b"GNU.sparse.realsize",
                entry.size.to_string().as_bytes(),
            );
        } else if entry.path.len() > NAME {
            pax::append(text, b"path", &entry.path);
        }
        if entry.link.len() > NAME {
            pax::append(text, b"linkpath", &entry.link);
        }
        let numbers: [(&[u8], u64, u64); 3] = [
            (b"size", stored, LARGE),
            (b"uid", entry.uid.into(), SMALL),
            (b"gid", entry.gid.into(), SMALL),
        ];
        for (key, value, maximum) in numbers {
            if value > maximum {
                pax::append(text, key, value.to_string().as_bytes());
            }
        }
        // The header has only whole, positive seconds.
        let (seconds, ns) = entry.mtime;
        if ns > 0 || seconds < 0 || seconds.unsigned_abs() > LARGE {
            pax::append(text, b"mtime", decimal(seconds, ns).as_bytes());
        }
        for (name, value) in &entry.xattrs {
            let key = [&b"SCHILY.xattr."[..], name].concat();
            pax::append(text, &key, value);
        }
    }

    /// Writes the extended header (pax) of an entry, which holds values that do not fit the
    /// ordinary header.
    fn extended_header(&mut self) -> io::Result<()> {
        let length = self.extended.len();
        // Readers without support for pax extract the header as a file with this name.
        let mut entry = ArchiveEntry::new(ArchiveEntryKind::File, *b"PaxHeaders/entry", 0o644);
        entry.size = length as u64;
        let mut header = header_of(&entry, length as u64);
        header.set_entry_type(EntryType::XHeader);
        header.set_cksum();
        self.out.write_all(header.as_bytes())?;
        self.out.write_all(&self.extended)?;
        let padding = length.next_multiple_of(BLOCK) - length;
        self.out.write_all(&[0; BLOCK][..padding])
    }
}

/// Writes content of the current entry.
impl<W: Write> Write for ArchiveWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.remaining {
            return Err(io::Error::other("the content of an entry exceeds its size"));
        }
        let n = self.out.write(bytes)?;
        self.remaining -= n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Returns the plain header, without its checksum.
fn header_of(entry: &ArchiveEntry, stored: u64) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(match entry.kind {
        ArchiveEntryKind::File => EntryType::Regular,
        ArchiveEntryKind::Directory => EntryType::Directory,
        ArchiveEntryKind::Symlink => EntryType::Symlink,
        ArchiveEntryKind::HardLink => EntryType::Link,
        ArchiveEntryKind::Fifo => EntryType::Fifo,
        // The number of an unknown device is missing or invalid, and its kind is not known.
        ArchiveEntryKind::Character(..) | ArchiveEntryKind::UnknownDevice => EntryType::Char,
        ArchiveEntryKind::Block(..) => EntryType::Block,
    });
    header.set_mode(entry.mode);
    header.set_uid(entry.uid.into());
    header.set_gid(entry.gid.into());
    header.set_size(stored);
    header.set_mtime(u64::try_from(entry.mtime.0).unwrap_or(0).min(LARGE));
    if let Some(ustar) = header.as_ustar_mut() {
        fill(&mut ustar.name, &entry.path);
        fill(&mut ustar.linkname, &entry.link);
        if let ArchiveEntryKind::Character(major, minor) | ArchiveEntryKind::Block(major, minor) =
            entry.kind
        {
            ustar.set_device_major(major);
            ustar.set_device_minor(minor);
        }
    }
    header
}

/// Copies a field, truncating it if necessary. The full value is in the extended header.
fn fill(field: &mut [u8; NAME], bytes: &[u8]) {
    let fits = bytes.len().min(NAME);
    field[..fits].copy_from_slice(&bytes[..fits]);
}

/// Returns the map of a sparse file in format 1.0: a count, then offsets and lengths, one per line,
/// padded to a block.
fn map_of(entry: &ArchiveEntry) -> Vec<u8> {
    let mut runs = entry.runs.clone();
    let end = runs.last().map_or(0, |run| run.offset + run.length);
    if end < entry.size {
        // GNU tar appends the size as an empty range.
        runs.push(crate::entry::ContentRange {
            offset: entry.size,
            length: 0,
        });
    }
    let mut text = format!("{}\n", runs.len());
    for run in &runs {
        text.push_str(&format!("{}\n{}\n", run.offset, run.length));
    }
    let mut map = text.into_bytes();
    map.resize(map.len().next_multiple_of(BLOCK), 0);
    map
}

/// Returns seconds and nanoseconds as a decimal number.
fn decimal(seconds: i64, ns: u32) -> String {
    // The number is a sum: -1.5 s consists of -2 seconds and 500,000,000 ns.
    if seconds < 0 && ns > 0 {
        let (seconds, ns) = (seconds + 1, 1_000_000_000 - ns.min(999_999_999));
        format!("-{}.{ns:09}", seconds.unsigned_abs())
    } else if ns > 0 {
        format!("{seconds}.{ns:09}")
    } else {
        seconds.to_string()
    }
}
