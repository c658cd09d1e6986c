//! Marks of deleted files in layers of OCI images, and the removal of the files that they hide.

use rustix::fs::{self, AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd};

/// Name of the mark that hides the content of its directory in the layers below.
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Prefix of a mark. The name of a deleted file follows.
const PREFIX: &[u8] = b".wh.";
/// Maximum depth of a removed directory, which bounds the recursion.
const MAX_DEPTH: usize = 512;

/// Mark in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark<'n> {
    /// The file with this name is deleted.
    Deleted(&'n [u8]),
    /// All files of the directory in the layers below are deleted.
    Opaque,
    /// The name has the form of a mark, but denotes no file.
    Invalid,
}

impl<'n> Mark<'n> {
    /// Parses the name of an entry without its directory. `None` if the entry is an ordinary file.
    pub fn of(name: &'n [u8]) -> Option<Self> {
        if name == OPAQUE {
            return Some(Self::Opaque);
        }
        let hidden = name.strip_prefix(PREFIX)?;
        if matches!(hidden, b"" | b"." | b"..") || hidden.starts_with(PREFIX) {
            return Some(Self::Invalid);
        }
        Some(Self::Deleted(hidden))
    }
}

/// Removes a file, or a directory with its content, if it exists. Links are not followed.
pub fn remove_tree(parent: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
    remove_at(parent, name, 0)
}

/// Removes the content of a directory.
pub fn remove_content(directory: BorrowedFd<'_>) -> Result<(), Errno> {
    remove_content_at(directory, 0)
}

fn remove_at(parent: BorrowedFd<'_>, name: &[u8], depth: usize) -> Result<(), Errno> {
    match fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR) => {}
        Err(e) => return Err(e),
    }
    if depth == MAX_DEPTH {
        return Err(Errno::NAMETOOLONG);
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = fs::openat(parent, name, flags, Mode::empty())?;
    remove_content_at(directory.as_fd(), depth + 1)?;
    fs::unlinkat(parent, name, AtFlags::REMOVEDIR)
}

fn remove_content_at(directory: BorrowedFd<'_>, depth: usize) -> Result<(), Errno> {
    // The names are read before the first removal, because removals may confuse the order of a
    // directory that is being read.
    let mut names = Vec::new();
    // The caller's descriptor may only denote the directory (`O_PATH`), and cannot be read.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    for entry in Dir::new(fs::openat(directory, c".", flags, Mode::empty())?)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if !matches!(&name[..], b"." | b"..") {
            names.push(name);
        }
    }
    names
        .iter()
        .try_for_each(|name| remove_at(directory, name, depth))
}
