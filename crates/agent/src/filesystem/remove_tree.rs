//! Removal of a directory with its contents, of any depth, in bounded memory.

use crate::workers::Progress;
use rustix::fs::{self, AtFlags, CWD, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Maximum number of directories that are open at the same time. Deeper directories are moved into
/// the top directory, and are removed there.
const MAX_OPEN: usize = 256;

/// Directory whose entries are being removed.
struct OpenDirectory {
    entries: Dir,
    fd: OwnedFd,
    /// Name in the parent directory.
    name: CString,
}

impl OpenDirectory {
    /// Opens the directory `name` of `parent`. Does not follow a symbolic link.
    fn open(parent: impl std::os::fd::AsFd, name: &CStr) -> Result<Self, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = fs::openat(parent, name, flags, Mode::empty())?;
        Ok(Self {
            entries: Dir::read_from(&fd)?,
            fd,
            name: name.to_owned(),
        })
    }
}

/// Removes the directory at `top`. Entries that other processes remove meanwhile are ignored.
pub fn remove_tree(top: &Path, progress: &Progress) -> io::Result<()> {
    let path = crate::sys::cpath(top)?;
    let mut moved = 0;
    loop {
        let removed = empty(&path, &mut moved, progress)?;
        match fs::unlinkat(CWD, &path, AtFlags::REMOVEDIR) {
            // Deep directories were moved here, or another process created entries.
            Err(Errno::NOTEMPTY | Errno::EXIST) if removed > 0 => {}
            other => return Ok(other?),
        }
    }
}

/// Removes the contents of `top`. Returns the number of removed and moved entries.
fn empty(top: &CStr, moved: &mut u64, progress: &Progress) -> io::Result<usize> {
    let mut removed = 0;
    let mut open = vec![OpenDirectory::open(CWD, top)?];
    while let Some(directory) = open.last_mut() {
        progress.advance();
        let Some(entry) = directory.entries.read().transpose()? else {
            let done = open.pop();
            if let (Some(done), Some(above)) = (done, open.last()) {
                match fs::unlinkat(&above.fd, &done.name, AtFlags::REMOVEDIR) {
                    Ok(()) | Err(Errno::NOENT) => removed += 1,
                    // The next pass removes entries that were added meanwhile. The failed removal
                    // is not counted, so that the passes end if the entries cannot be listed.
                    Err(Errno::NOTEMPTY | Errno::EXIST) => {}
                    Err(e) => return Err(e.into()),
                }
            }
            continue;
        };
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let is_directory = match entry.file_type() {
            FileType::Directory => true,
            FileType::Unknown => {
                let found = fs::statat(&directory.fd, name, AtFlags::SYMLINK_NOFOLLOW);
                found.is_ok_and(|f| FileType::from_raw_mode(f.st_mode) == FileType::Directory)
            }
            _ => false,
        };
        if !is_directory {
            match fs::unlinkat(&directory.fd, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => removed += 1,
                Err(e) => return Err(e.into()),
            }
            continue;
        }
        // A subdirectory is opened relative to the descriptor of its parent, so the length of its
        // path is not limited.
        if open.len() < MAX_OPEN {
            match open
                .last()
                .map(|above| OpenDirectory::open(&above.fd, name))
            {
                Some(Ok(below)) => open.push(below),
                // The entry was removed or replaced meanwhile.
                Some(Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP)) | None => {}
                Some(Err(e)) => return Err(e.into()),
            }
        } else if let (Some(above), Some(first)) = (open.last(), open.first()) {
            // The number makes the name unique within this removal.
            let new_name = format!(".removed-{}-{moved}", std::process::id());
            match fs::renameat(&above.fd, name, &first.fd, &*new_name) {
                Ok(()) => removed += 1,
                Err(Errno::NOENT) => {}
                Err(e) => return Err(e.into()),
            }
            *moved += 1;
        }
    }
    Ok(removed)
}
