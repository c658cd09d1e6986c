//! Reads and writes of contents, with charges for their lengths.
//!
//! The *content* of a file is in a file of the host that is named by a number. Each write is
//! charged to the quota of the volume.

use super::Volume;
use crate::contents::{errno, punch_hole, read_at};
use nix::errno::Errno;
use std::os::unix::fs::FileExt;

/// Maximum length of a file in bytes.
const MAX_LENGTH: u64 = 1 << 50;

impl Volume {
    /// Returns an error unless the node is a regular file.
    fn require_file(&self, node: u64) -> Result<(), Errno> {
        let found = super::Catalog::node(self.catalog.lock().read(), node)?;
        match (found.is_file(), found.is_directory()) {
            (true, _) => Ok(()),
            (_, true) => Err(Errno::EISDIR),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Reads from a file. Returns fewer bytes than the buffer has at the end of the file only.
    pub fn read(&self, node: u64, offset: u64, buffer: &mut [u8]) -> Result<usize, Errno> {
        self.require_file(node)?;
        read_at(&self.contents.file(node, false)?, buffer, offset)
    }

    /// Writes to a file, at its end if `offset` is `None`. Returns the number of written bytes.
    pub fn write(&self, node: u64, offset: Option<u64>, data: &[u8]) -> Result<usize, Errno> {
        self.require_file(node)?;
        let file = self.contents.file(node, true)?;
        let _lock = self.length_lock(node);
        let length = file.metadata().map_err(|e| errno(&e))?.len();
        let offset = offset.unwrap_or(length);
        let end = offset.checked_add(data.len() as u64);
        let end = end.filter(|end| *end <= MAX_LENGTH).ok_or(Errno::EFBIG)?;
        self.usage.resize(length, end.max(length))?;
        let written = file.write_all_at(data, offset);
        if let Err(e) = written {
            // A part may have been written.
            let now = file.metadata().map_or(end, |found| found.len());
            self.usage.resize(end.max(length), now)?;
            return Err(errno(&e));
        }
        Ok(data.len())
    }

    /// Sets the length of a file.
    pub(super) fn truncate(&self, node: u64, length: u64) -> Result<(), Errno> {
        self.require_file(node)?;
        if length > MAX_LENGTH {
            return Err(Errno::EFBIG);
        }
        let file = self.contents.file(node, true)?;
        let _lock = self.length_lock(node);
        let before = file.metadata().map_err(|e| errno(&e))?.len();
        // Space is charged before the file grows, and released after it shrank.
        if length > before {
            self.usage.resize(before, length)?;
        }
        if let Err(e) = file.set_len(length) {
            if length > before {
                self.usage.resize(length, before)?;
            }
            return Err(errno(&e));
        }
        if length < before {
            self.usage.resize(before, length)?;
        }
        Ok(())
    }

    /// Extends a file so that the range exists. The space is charged, but not reserved on the disk.
    pub fn extend(&self, node: u64, end: u64) -> Result<(), Errno> {
        if self.attributes(node)?.size < end {
            self.truncate(node, end)?;
        }
        Ok(())
    }

    /// Replaces a range of a file by zeros, and releases its blocks on the disk of the host.
    pub fn punch_hole(&self, node: u64, offset: u64, length: u64) -> Result<(), Errno> {
        self.require_file(node)?;
        let number = |value| i64::try_from(value).map_err(|_| Errno::EFBIG);
        let file = self.contents.file(node, true)?;
        punch_hole(&file, number(offset)?, number(length)?)
    }
}
