//! Listing and removal of trees of files.
//!
//! The daemon accesses the files of a volume by FUSE requests to its server process.

use super::at;
use crate::{Entry, FileError, VolumeFiles, VolumePath};
use jiffy_volume_server::abi::{Fields, FieldsMut, opcode};
use jiffy_volume_server::{Attributes, MAX_WRITE};
use nix::errno::Errno;

/// Maximum number of entries of a listing.
const MAX_ENTRIES: usize = 100_000;
/// Length of `struct fuse_entry_out`: node, times of validity and attributes. An entry of a reply
/// to READDIRPLUS begins with it.
const ENTRY_OUT: usize = 128;
/// Length of `struct fuse_dirent` without the name. It follows [`ENTRY_OUT`].
const DIRENT: usize = 24;

/// Entries of a directory: names and attributes.
type Children = Vec<(Vec<u8>, Attributes)>;

impl VolumeFiles {
    /// Returns entries after `offset`, and the offset after them.
    fn children(
        &mut self,
        parts: &[String],
        node: u64,
        offset: u64,
    ) -> Result<(Children, u64), FileError> {
        let reply = self.call(opcode::READDIRPLUS, node, |body| {
            // `struct fuse_read_in`: the server opens no files, so that the handle is 0.
            body.put_u64(0); // fh
            body.put_u64(offset);
            body.put_u32(MAX_WRITE); // size
            body.put_u32(0); // read_flags
            body.put_u64(0); // lock_owner
            body.put_u64(0); // flags, padding
        })?;
        at(parts, reply.and_then(|reply| parse(reply, offset)))
    }

    /// Returns the entries of a directory, and of directories below it up to `depth` levels.
    pub fn list(&mut self, path: &VolumePath, depth: u32) -> Result<Vec<Entry>, FileError> {
        let root = self.resolve(path.parts())?;
        if !root.is_directory() {
            return at(path.parts(), Err(Errno::ENOTDIR));
        }
        let mut all = Vec::new();
        // Directories to be listed: a stack, because trees may be deep.
        let mut directories = vec![(path.parts().to_vec(), root.node, 1)];
        while let Some((parts, node, level)) = directories.pop() {
            let mut offset = 0;
            loop {
                let (children, next) = self.children(&parts, node, offset)?;
                if children.is_empty() && next == offset {
                    break;
                }
                for (name, attributes) in children {
                    if all.len() >= MAX_ENTRIES {
                        return Err(FileError::Long {
                            path: path.absolute(),
                            limit: MAX_ENTRIES,
                        });
                    }
                    let mut below = parts.clone();
                    below.push(String::from_utf8_lossy(&name).into_owned());
                    all.push(self.entry(&below, attributes)?);
                    if attributes.is_directory() && level < depth {
                        directories.push((below, attributes.node, level + 1));
                    }
                }
                offset = next;
            }
        }
        all.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(all)
    }

    /// Removes a file, or a directory with its entries.
    pub fn remove(&mut self, path: &VolumePath) -> Result<(), FileError> {
        let (directory, name) = path.split().ok_or(FileError::Root)?;
        let parent = self.resolve(directory)?;
        let found = self.resolve(path.parts())?;
        let name = name.as_bytes().to_vec();
        // Entries to be removed: directory, name and attributes. A directory remains on the stack
        // until it is empty.
        let mut pending = vec![(parent.node, name, found)];
        while let Some((parent, name, found)) = pending.pop() {
            if !found.is_directory() {
                self.remove_entry(path, opcode::UNLINK, parent, &name)?;
                continue;
            }
            // Offset 0 each time: the entries before were removed.
            let (children, _) = self.children(path.parts(), found.node, 0)?;
            if children.is_empty() {
                self.remove_entry(path, opcode::RMDIR, parent, &name)?;
                continue;
            }
            let node = found.node;
            pending.push((parent, name, found));
            pending.extend(
                children
                    .into_iter()
                    .map(|(name, found)| (node, name, found)),
            );
        }
        Ok(())
    }

    /// Removes an entry of a directory. A missing entry is not an error.
    fn remove_entry(
        &mut self,
        path: &VolumePath,
        opcode: u32,
        parent: u64,
        name: &[u8],
    ) -> Result<(), FileError> {
        let reply = self.call(opcode, parent, |body| body.put_name(name))?;
        match reply.map(|_| ()) {
            // Another client removed the entry.
            Err(Errno::ENOENT | Errno::ESTALE) => Ok(()),
            other => at(path.parts(), other),
        }
    }
}

/// Returns the entries of a reply to READDIRPLUS except `.` and `..`, and the offset after them.
fn parse(reply: &[u8], mut offset: u64) -> Result<(Children, u64), Errno> {
    let (mut children, mut fields) = (Vec::new(), Fields(reply));
    while fields.0.len() > ENTRY_OUT {
        let attributes = Fields(fields.bytes(ENTRY_OUT)?).entry()?;
        let _node = fields.u64()?;
        offset = fields.u64()?;
        let length = fields.u32()? as usize;
        let _kind = fields.u32()?;
        // Entries are aligned to 8 bytes.
        let padding = (DIRENT + length).next_multiple_of(8) - DIRENT - length;
        let name = fields.bytes(length)?;
        fields.bytes(padding)?;
        if !matches!(name, b"." | b"..") {
            children.push((name.to_vec(), attributes));
        }
    }
    Ok((children, offset))
}
