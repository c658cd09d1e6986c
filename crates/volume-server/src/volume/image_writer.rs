//! Writes the image of a volume. Changes of the volume wait meanwhile.
//!
//! The *image* is one file with all files of the volume, which a snapshot of the volume stores. The
//! *charged* bytes of a file are its length, rounded up to 4 KiB.

use super::Volume;
use crate::catalog::Catalog;
use crate::contents::errno;
use crate::image::{
    CHUNK, ENTRY_BYTES, GROUP, HEAD_BYTES, ImageEntry, LARGE, MAGIC, SMALL_ALIGNMENT, VERSION,
};
use crate::usage::charge;
use nix::errno::Errno;
use nix::libc;
use nix::unistd::{Whence, lseek};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// Bytes that are copied at once if the file systems cannot copy.
const BUFFER: usize = 1 << 20;

/// Result of writing an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageSummary {
    /// Charged bytes of the contents.
    pub bytes: u64,
    /// Number of files.
    pub files: u64,
}

impl Volume {
    /// Writes an image of the volume to an empty file. The image has the state of the volume at one
    /// time: it contains every change whose request was complete before, and none in part.
    pub fn write_image(&self, image: &File) -> Result<ImageSummary, Errno> {
        let _frozen = self.changes().write();
        let copy = self.catalog().copy()?;
        let catalog = copy.metadata().map_err(|e| errno(&e))?.len();
        let mut entries = Vec::new();
        let files = Catalog::files(self.catalog().read())?;
        for node in files {
            // A content that a power failure removed is empty.
            if let Some(state) = self.contents().state(node)?
                && state.length > 0
            {
                entries.push(ImageEntry {
                    node,
                    offset: 0,
                    length: state.length,
                    modified_ns: state.modified_ns,
                    accessed_ns: state.accessed_ns,
                });
            }
        }
        let index = (HEAD_BYTES + entries.len() * ENTRY_BYTES) as u64;
        let catalog_offset = index.next_multiple_of(CHUNK);
        let mut end = (catalog_offset + catalog).next_multiple_of(CHUNK);
        // A small content follows the previous one directly if both belong to the same group of
        // nodes. Any other content starts at a new chunk of the store.
        let mut group = None;
        for entry in &mut entries {
            let own = (entry.length < LARGE).then_some(entry.node / GROUP);
            let alignment = if own.is_some() && own == group {
                SMALL_ALIGNMENT
            } else {
                CHUNK
            };
            group = own;
            entry.offset = end.next_multiple_of(alignment);
            end = entry.offset.checked_add(entry.length).ok_or(Errno::EFBIG)?;
        }
        let failed = |e: std::io::Error| errno(&e);
        // A server that was killed may have written a part. The end may be a hole.
        image.set_len(0).map_err(failed)?;
        image.set_len(end).map_err(failed)?;
        copy_data(&copy, image, catalog_offset, catalog)?;
        let mut bytes = 0;
        for entry in &entries {
            let content = self.contents().file(entry.node, false)?;
            copy_data(&content, image, entry.offset, entry.length)?;
            bytes += charge(entry.length);
        }
        let mut head = Vec::with_capacity(HEAD_BYTES + entries.len() * ENTRY_BYTES);
        head.extend_from_slice(&MAGIC);
        head.extend_from_slice(&VERSION.to_le_bytes());
        head.extend_from_slice(&[0; 4]);
        let space = self.space();
        for field in [
            space.quota.bytes,
            space.quota.nodes,
            entries.len() as u64,
            catalog_offset,
            catalog,
            bytes,
        ] {
            head.extend_from_slice(&field.to_le_bytes());
        }
        for entry in &entries {
            head.extend_from_slice(&entry.bytes());
        }
        image.write_all_at(&head, 0).map_err(failed)?;
        Ok(ImageSummary {
            bytes,
            files: entries.len() as u64,
        })
    }
}

/// Copies the first `length` bytes of a file without its holes to `offset` of another file.
fn copy_data(from: &File, to: &File, offset: u64, length: u64) -> Result<(), Errno> {
    let signed = |value: u64| i64::try_from(value).map_err(|_| Errno::EFBIG);
    let mut at = 0;
    while at < length {
        let start = match lseek(from, signed(at)?, Whence::SeekData) {
            Ok(start) => start.cast_unsigned(),
            // The rest is a hole.
            Err(Errno::ENXIO) => return Ok(()),
            Err(e) => return Err(e),
        };
        let stop = lseek(from, signed(start)?, Whence::SeekHole)?.cast_unsigned();
        let stop = stop.min(length);
        if start >= stop {
            return Ok(());
        }
        copy_range(from, to, start, offset + start, stop - start)?;
        at = stop;
    }
    Ok(())
}

/// Copies a range. File systems that share blocks copy nothing.
fn copy_range(from: &File, to: &File, start: u64, offset: u64, length: u64) -> Result<(), Errno> {
    let mut done = 0;
    let mut buffer = Vec::new();
    while done < length {
        let (mut source, mut target) = (
            i64::try_from(start + done).map_err(|_| Errno::EFBIG)?,
            i64::try_from(offset + done).map_err(|_| Errno::EFBIG)?,
        );
        let rest = usize::try_from(length - done).unwrap_or(usize::MAX);
        if buffer.is_empty() {
            // SAFETY: both offsets are valid for writes during the call, and the descriptors are
            // open.
            let copied = Errno::result(unsafe {
                libc::copy_file_range(
                    from.as_raw_fd(),
                    &raw mut source,
                    to.as_raw_fd(),
                    &raw mut target,
                    rest,
                    0,
                )
            });
            match copied {
                Ok(copied) if copied > 0 => {
                    done += copied.cast_unsigned() as u64;
                    continue;
                }
                // The file became shorter.
                Ok(_) => return Err(Errno::EIO),
                Err(Errno::EINTR) => continue,
                Err(
                    Errno::EXDEV | Errno::ENOSYS | Errno::EOPNOTSUPP | Errno::EINVAL | Errno::EPERM,
                ) => {
                    buffer = vec![0; BUFFER];
                }
                Err(e) => return Err(e),
            }
        }
        let part = buffer.len().min(rest);
        let part = buffer.get_mut(..part).ok_or(Errno::EINVAL)?;
        from.read_exact_at(part, start + done)
            .map_err(|e| errno(&e))?;
        to.write_all_at(part, offset + done)
            .map_err(|e| errno(&e))?;
        done += part.len() as u64;
    }
    Ok(())
}
