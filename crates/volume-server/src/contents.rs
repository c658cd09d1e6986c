//! Contents of files: one file of the host per node, named by the number of the node.
//!
//! A node is a file or directory of the volume. The catalog of the volume has the names and
//! attributes of the nodes, and this module has the bytes of files only.

use crate::VolumeError;
use nix::errno::Errno;
use nix::libc;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Number of directories over which files are spread.
const DIRECTORIES: u64 = 256;

/// Directory with the contents of files.
#[derive(Debug)]
pub(crate) struct Contents(PathBuf);

/// Length, blocks and times of a content.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ContentState {
    pub(crate) length: u64,
    pub(crate) blocks: u64,
    pub(crate) modified_ns: i64,
    pub(crate) accessed_ns: i64,
}

/// Returns the error number of an I/O error.
pub(crate) fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

impl Contents {
    /// Opens the directory of the contents and creates its subdirectories, named `00`, `01` and so
    /// on.
    pub(crate) fn open(path: PathBuf) -> Result<Self, VolumeError> {
        for number in 0..DIRECTORIES {
            let directory = path.join(format!("{number:02x}"));
            fs::create_dir_all(&directory).map_err(|source| VolumeError::File {
                path: directory,
                source,
            })?;
        }
        Ok(Self(path))
    }

    fn directory(&self, node: u64) -> PathBuf {
        self.0.join(format!("{:02x}", node % DIRECTORIES))
    }

    /// Returns the path of a content.
    pub(crate) fn path(&self, node: u64) -> PathBuf {
        self.directory(node).join(format!("{node:016x}"))
    }

    /// Creates the empty content of a new node.
    pub(crate) fn create(&self, node: u64) -> Result<(), Errno> {
        let mut options = OpenOptions::new();
        let options = options.create_new(true).write(true).mode(0o600);
        options.open(self.path(node)).map_err(|e| errno(&e))?;
        Ok(())
    }

    /// Opens the content of a node. A content that a power failure removed is empty. With
    /// `is_write`, the file is opened for writing.
    pub(crate) fn file(&self, node: u64, is_write: bool) -> Result<File, Errno> {
        let mut options = OpenOptions::new();
        let options = options.read(true).write(is_write).mode(0o600);
        match options.open(self.path(node)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                options.write(true).create(true).open(self.path(node))
            }
            other => other,
        }
        .map_err(|e| errno(&e))
    }

    /// Removes the content of a node. Returns its length.
    pub(crate) fn remove(&self, node: u64) -> u64 {
        let path = self.path(node);
        let length = fs::metadata(&path).map_or(0, |found| found.len());
        if let Err(e) = fs::remove_file(&path)
            && e.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(node, error = %e, "cannot remove the content of a file");
        }
        length
    }

    /// Returns the state of a content.
    pub(crate) fn state(&self, node: u64) -> Result<Option<ContentState>, Errno> {
        match fs::metadata(self.path(node)) {
            Ok(found) => Ok(Some(ContentState {
                length: found.len(),
                blocks: found.blocks(),
                modified_ns: time_ns(found.mtime(), found.mtime_nsec()),
                accessed_ns: time_ns(found.atime(), found.atime_nsec()),
            })),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(errno(&e)),
        }
    }

    /// Writes a content and its name to the disk.
    pub(crate) fn sync(&self, node: u64) -> Result<(), Errno> {
        self.file(node, true)?.sync_data().map_err(|e| errno(&e))?;
        let directory = File::open(self.directory(node)).map_err(|e| errno(&e))?;
        directory.sync_all().map_err(|e| errno(&e))
    }

    /// Sets the times of a content.
    pub(crate) fn set_times(&self, node: u64, times: fs::FileTimes) -> Result<(), Errno> {
        let file = self.file(node, true)?;
        file.set_times(times).map_err(|e| errno(&e))
    }

    /// Calls `each` with the node and the length of every content.
    pub(crate) fn for_each(&self, mut each: impl FnMut(u64, u64)) -> io::Result<()> {
        for number in 0..DIRECTORIES {
            for entry in fs::read_dir(self.0.join(format!("{number:02x}")))? {
                let entry = entry?;
                let name = entry.file_name();
                let node = name
                    .to_str()
                    .and_then(|name| u64::from_str_radix(name, 16).ok());
                if let Some(node) = node {
                    each(node, entry.metadata()?.len());
                }
            }
        }
        Ok(())
    }
}

fn time_ns(seconds: i64, nanoseconds: i64) -> i64 {
    seconds
        .saturating_mul(1_000_000_000)
        .saturating_add(nanoseconds)
}

/// Reads at most `buffer.len()` bytes at `offset`. Returns fewer at the end of the file only.
pub(crate) fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let mut length = 0;
    while let Some(rest) = buffer.get_mut(length..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, offset.saturating_add(length as u64)) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(errno(&e)),
        }
    }
    Ok(length)
}

/// Removes the blocks of a range of a file without changing its length.
pub(crate) fn punch_hole(file: &File, offset: i64, length: i64) -> Result<(), Errno> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: the call takes no pointers.
    Errno::result(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, length) }).map(|_| ())
}

/// Returns the path of a database's write-ahead log.
pub(crate) fn log_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push("-wal");
    name.into()
}
