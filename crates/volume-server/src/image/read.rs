//! Unpacks the image of a volume. The image is from a store: every field is checked. The *charged*
//! bytes of a file are its length, rounded up to 4 KiB.

use super::{ENTRY_BYTES, HEAD_BYTES, ImageEntry, MAGIC, VERSION};
use crate::contents::Contents;
use crate::usage::{Quota, charge};
use std::fs::{File, FileTimes};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Maximum length of a catalog in bytes: about 5 KiB for each of 10,000,000 files.
const MAX_CATALOG: u64 = 64 << 30;
/// Maximum number of contents.
const MAX_ENTRIES: u64 = 10_000_000;
/// Bytes that are copied at once. Parts of zeros become holes.
const BUFFER: usize = 64 << 10;

/// Errors of images.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The file is damaged, or is not an image.
    #[error("the image of the volume is damaged: {0}")]
    Damaged(&'static str),
    /// The image was written by a later version.
    #[error("the image of the volume has version {0}: update jiffy")]
    Version(u32),
    /// A file operation failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Head of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageHead {
    /// Size of the volume.
    pub quota: Quota,
    /// Charged bytes of the contents.
    pub bytes: u64,
    /// Number of contents.
    entries: u64,
    catalog_offset: u64,
    /// Length of the catalog in bytes.
    catalog: u64,
}

impl ImageHead {
    /// Reads and checks the head of an image.
    pub fn read(image: &File) -> Result<Self, ImageError> {
        let mut head = [0; HEAD_BYTES];
        image
            .read_exact_at(&mut head, 0)
            .map_err(|_| ImageError::Damaged("it is too short"))?;
        if !head.starts_with(&MAGIC) {
            return Err(ImageError::Damaged("it has no head"));
        }
        let (fields, _) = head.as_chunks::<8>();
        let field = |at: usize| u64::from_le_bytes(fields.get(at).copied().unwrap_or_default());
        // The upper half is 0.
        match u32::try_from(field(1)) {
            Ok(VERSION) => {}
            Ok(other) => return Err(ImageError::Version(other)),
            Err(_) => return Err(ImageError::Damaged("its version is invalid")),
        }
        let head = Self {
            quota: Quota {
                bytes: field(2),
                nodes: field(3),
            },
            entries: field(4),
            catalog_offset: field(5),
            catalog: field(6),
            bytes: field(7),
        };
        let length = image.metadata()?.len();
        let end = head.catalog_offset.checked_add(head.catalog);
        if head.entries > MAX_ENTRIES
            || head.catalog > MAX_CATALOG
            || end.is_none_or(|end| end > length)
        {
            return Err(ImageError::Damaged("its sizes are invalid"));
        }
        Ok(head)
    }
}

/// Creates the files of a volume in the empty directory `directory`. At most `max_bytes` bytes are
/// charged for contents.
pub fn unpack(image: &File, directory: &Path, max_bytes: u64) -> Result<(), ImageError> {
    let head = ImageHead::read(image)?;
    let length = image.metadata()?.len();
    let contents = Contents::open(directory.join("data"))
        .map_err(|e| ImageError::Io(io::Error::other(e.to_string())))?;
    let catalog = directory.join("catalog.db");
    copy(image, head.catalog_offset, head.catalog, &create(&catalog)?)?;
    let (mut bytes, mut last) = (0_u64, 0);
    for number in 0..head.entries {
        let mut entry = [0; ENTRY_BYTES];
        let at = HEAD_BYTES as u64 + number * ENTRY_BYTES as u64;
        image.read_exact_at(&mut entry, at)?;
        let entry = ImageEntry::parse(&entry);
        let end = entry.offset.checked_add(entry.length);
        if entry.node <= last || end.is_none_or(|end| end > length) {
            return Err(ImageError::Damaged("the position of a file is invalid"));
        }
        last = entry.node;
        bytes = bytes.saturating_add(charge(entry.length));
        if bytes > max_bytes {
            return Err(ImageError::Damaged("its files exceed their size"));
        }
        let file = create(&contents.path(entry.node))?;
        copy(image, entry.offset, entry.length, &file)?;
        let times = FileTimes::new()
            .set_modified(time(entry.modified_ns))
            .set_accessed(time(entry.accessed_ns));
        file.set_times(times)?;
    }
    // One call for all files.
    nix::unistd::syncfs(File::open(directory)?).map_err(io::Error::from)?;
    Ok(())
}

fn create(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o600).open(path)
}

/// Copies a range of the image to a new file.
fn copy(image: &File, offset: u64, length: u64, to: &File) -> io::Result<()> {
    to.set_len(length)?;
    let mut buffer = vec![0; BUFFER];
    let mut done = 0;
    while done < length {
        let part = usize::try_from(length - done).unwrap_or(BUFFER).min(BUFFER);
        let part = buffer.get_mut(..part).unwrap_or_default();
        image.read_exact_at(part, offset + done)?;
        if part.iter().any(|byte| *byte != 0) {
            to.write_all_at(part, done)?;
        }
        done += part.len() as u64;
    }
    Ok(())
}

/// Times before 1970 become 1970.
fn time(nanoseconds: i64) -> SystemTime {
    let since = Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(0));
    SystemTime::UNIX_EPOCH
        .checked_add(since)
        .unwrap_or(SystemTime::UNIX_EPOCH)
}
