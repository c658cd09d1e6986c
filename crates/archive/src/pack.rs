//! Packs file trees into archives. Files may change while they are packed; the archive stays valid.
//!
//! An *overlay* is a mount of overlayfs: an upper directory with changes, over lower directories. A
//! *whiteout* marks a deleted file in a layer of an OCI image. An *opaque* mark hides the content
//! that a directory has in the layers below. Both are the *marks* of layers.

use crate::entry::{ArchiveEntry, ArchiveEntryKind, ContentRange, whole};
use crate::error::ArchiveError;
use crate::write::ArchiveWriter;
use crate::xattr;
use rustix::fs::{self, AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, SeekFrom, Stat};
use rustix::io::Errno;
use std::collections::HashMap;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Maximum depth of directories. Each level holds two descriptors ([`OpenDir`]).
const MAX_DEPTH: usize = 1000;
/// Maximum number of ranges of a sparse file. If a file has more, holes are written as zeros.
const MAX_RUNS: usize = 10_000;
const BUFFER: usize = 64 << 10;

/// Attribute of a directory in the upper directory. It hides the content of the directory with the
/// same path in the lower directories.
const OPAQUE: &[u8] = b"trusted.overlay.opaque";
/// Attribute of a renamed directory in the upper directory. It contains the path in the lower
/// directories with the remaining content.
const REDIRECT: &[u8] = b"trusted.overlay.redirect";

/// Selection of the content of an archive.
#[derive(Clone, Copy)]
pub struct PackOptions {
    /// Predicate of the extended attributes to include.
    pub xattrs: fn(&[u8]) -> bool,
    /// Predicate of the paths (relative to the tree) to exclude, with all their descendants.
    pub leave_out: fn(&[u8]) -> bool,
    /// True if the tree is the upper directory of an overlay. It becomes a layer with OCI whiteouts
    /// for deletions.
    pub layer: bool,
}

impl PackOptions {
    /// Selects all files of a tree, with portable attributes.
    pub const TREE: Self = Self {
        xattrs: |name| name.starts_with(b"user.") || name == b"security.capability",
        leave_out: |_| false,
        layer: false,
    };
}

/// Writer of file trees.
pub struct Packer<W> {
    writer: ArchiveWriter<W>,
    contents: PackOptions,
    /// Root of the overlay, for directories whose content is not in the upper directory alone.
    overlay: Option<OwnedFd>,
    /// Files with further hard links, by device and inode: the first name and the number of links
    /// to come.
    links: HashMap<(u64, u64), (Vec<u8>, u64)>,
    buffer: Vec<u8>,
}

/// Directory that is being read. The packer holds a stack of them instead of using recursion.
struct OpenDir {
    dir: Dir,
    fd: OwnedFd,
    device: u64,
    /// Length in bytes of the directory's path in the archive.
    path: usize,
    /// True if the directory is read from the root of the overlay instead of the upper directory.
    merged: bool,
}

impl<W: Write> Packer<W> {
    /// Creates a packer that writes to `out`.
    pub fn new(out: W, contents: PackOptions) -> Self {
        Self {
            writer: ArchiveWriter::new(out),
            contents,
            overlay: None,
            links: HashMap::new(),
            buffer: vec![0; BUFFER],
        }
    }

    /// Sets the root of the overlay whose upper directory is packed as a layer. Renamed directories
    /// are packed from it completely. Without it, packing a renamed directory fails.
    pub fn set_overlay(&mut self, root: OwnedFd) {
        self.overlay = Some(root);
    }

    /// Adds the file at `path` as `name`. Follows a symbolic link at `path`.
    pub fn add(&mut self, path: &Path, name: &[u8]) -> Result<(), ArchiveError> {
        let bytes = path.as_os_str().as_bytes();
        let failed = |errno| ArchiveError::file("read", bytes, errno);
        let stat = fs::stat(path).map_err(failed)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let fd = fs::openat(CWD, path, flags, Mode::empty()).map_err(failed)?;
                self.tree(fd, name)
            }
            _ => {
                let real = std::fs::canonicalize(path).map_err(|source| ArchiveError::File {
                    action: "read",
                    entry: crate::error::shown(bytes),
                    source,
                })?;
                self.add_non_directory(CWD, real.as_os_str().as_bytes(), name, &stat)
            }
        }
    }

    /// Adds a directory as `name` with its content. If `name` is empty, adds only the content.
    pub fn tree(&mut self, top: OwnedFd, name: &[u8]) -> Result<(), ArchiveError> {
        let mut path = name.to_vec();
        let mut open = Vec::new();
        let (above, merged) = (None, false);
        if let Some(top) = self.add_directory(top, &path, above, merged)? {
            open.push(top);
        }
        while let Some(directory) = open.last_mut() {
            path.truncate(directory.path);
            // A directory is read until its end, and then its parent continues.
            let next = directory.dir.read().transpose();
            let failed = |errno| ArchiveError::file("read the directory", &path, errno);
            let Some(next) = next.map_err(failed)? else {
                open.pop();
                continue;
            };
            let file = next.file_name().to_bytes();
            if file == b"." || file == b".." {
                continue;
            }
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(file);
            // An excluded directory is not opened, so its descendants are excluded as well.
            if (self.contents.leave_out)(&path) {
                continue;
            }
            let (parent, device) = (directory.fd.as_fd(), directory.device);
            let merged = directory.merged;
            let stat = match fs::statat(parent, file, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                // The entry was removed concurrently.
                Err(Errno::NOENT) => continue,
                Err(e) => return Err(ArchiveError::file("read", &path, e)),
            };
            if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
                self.add_non_directory(parent, file, &path, &stat)?;
                continue;
            }
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let below = match fs::openat(parent, file, flags, Mode::empty()) {
                Ok(fd) => self.add_directory(fd, &path, Some(device), merged)?,
                // The entry was removed or replaced concurrently.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                Err(e) => return Err(ArchiveError::file("read the directory", &path, e)),
            };
            if open.len() == MAX_DEPTH {
                return Err(ArchiveError::entry(&path, "is too deep within directories"));
            }
            open.extend(below);
        }
        Ok(())
    }

    /// Ends the archive.
    pub fn finish(self) -> Result<W, ArchiveError> {
        self.writer.finish().map_err(ArchiveError::Send)
    }

    /// Writes the entry of a directory. `above` is the device of its parent, and `None` for the top
    /// directory. Returns the opened directory, or `None` if the content of the directory is not
    /// packed. Kernel file systems are not packed, and file systems mounted in a merged directory
    /// do not belong to the layer. `merged` states that overlayfs shows the directory, so that the
    /// marks of layers are applied already.
    fn add_directory(
        &mut self,
        mut fd: OwnedFd,
        path: &[u8],
        mut above: Option<u64>,
        mut merged: bool,
    ) -> Result<Option<OpenDir>, ArchiveError> {
        let failed = |errno| ArchiveError::file("read the directory", path, errno);
        let mut found = fs::fstat(&fd).map_err(failed)?;
        if !path.is_empty() {
            let mut entry = entry_of(ArchiveEntryKind::Directory, path, &found);
            entry.xattrs = xattr::of(fd.as_fd(), self.contents.xattrs).map_err(failed)?;
            self.add_empty(&entry)?;
            // In a merged directory, the marks have been applied by overlayfs already.
            let layer = self.contents.layer && !merged;
            let has = |name| Ok(layer && xattr::value(fd.as_fd(), name).map_err(failed)?.is_some());
            let is_renamed = has(REDIRECT)?;
            // An opaque mark must follow its directory and precede the content.
            if is_renamed || has(OPAQUE)? {
                let mark = [path, b"/.wh..wh..opq"].concat();
                self.add_empty(&ArchiveEntry::new(ArchiveEntryKind::File, mark, 0o644))?;
            }
            if is_renamed {
                let Some(overlay) = &self.overlay else {
                    return Err(ArchiveError::entry(path, "was renamed on an overlay"));
                };
                // overlayfs shows the complete content of a renamed directory.
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let within =
                    ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
                fd = fs::openat2(overlay, path, flags, Mode::empty(), within).map_err(failed)?;
                found = fs::fstat(&fd).map_err(failed)?;
                above = Some(found.st_dev);
                merged = true;
            }
        }
        // The top directory has no parent, so it counts as a mount.
        let is_mount = above != Some(found.st_dev);
        if is_mount && (merged || is_kernels(&fd).map_err(failed)?) {
            return Ok(None);
        }
        Ok(Some(OpenDir {
            dir: Dir::read_from(&fd).map_err(failed)?,
            fd,
            device: found.st_dev,
            path: path.len(),
            merged,
        }))
    }

    /// Adds `file`, a non-directory in `parent`.
    fn add_non_directory(
        &mut self,
        parent: BorrowedFd<'_>,
        file: &[u8],
        path: &[u8],
        found: &Stat,
    ) -> Result<(), ArchiveError> {
        let device = (fs::major(found.st_rdev), fs::minor(found.st_rdev));
        let name = path.rsplit(|b| *b == b'/').next().unwrap_or(path);
        if self.contents.layer && name.starts_with(b".wh.") {
            // In a layer, this name would mark another file as deleted.
            return Ok(());
        }
        let kind = match FileType::from_raw_mode(found.st_mode) {
            FileType::RegularFile => return self.file(parent, file, path),
            // A character device with the number 0/0 is the mark of overlayfs for a deleted file.
            FileType::CharacterDevice if self.contents.layer && device == (0, 0) => {
                let above = &path[..path.len() - name.len()];
                let mark = [above, b".wh.", name].concat();
                return self.add_empty(&ArchiveEntry::new(ArchiveEntryKind::File, mark, 0o644));
            }
            FileType::Symlink => ArchiveEntryKind::Symlink,
            FileType::Fifo => ArchiveEntryKind::Fifo,
            FileType::CharacterDevice => ArchiveEntryKind::Character(device.0, device.1),
            FileType::BlockDevice => ArchiveEntryKind::Block(device.0, device.1),
            // Skip sockets: they are useless without their servers.
            _ => return Ok(()),
        };
        // Symbolic links and devices can have several names, like regular files.
        if self.add_hard_link(path, found)? {
            return Ok(());
        }
        let mut entry = entry_of(kind, path, found);
        if kind == ArchiveEntryKind::Symlink {
            entry.link = match fs::readlinkat(parent, file, Vec::new()) {
                Ok(target) => target.into_bytes(),
                // The link was removed or replaced concurrently.
                Err(Errno::NOENT | Errno::INVAL) => return Ok(()),
                Err(e) => return Err(ArchiveError::file("read the link", path, e)),
            };
        }
        self.add_empty(&entry)
    }

    /// Adds a regular file. Its size is determined at the start, so that the archive remains valid
    /// if the file changes. A file that shrinks is padded with zeros, and a file that grows is
    /// truncated.
    fn file(
        &mut self,
        parent: BorrowedFd<'_>,
        file: &[u8],
        path: &[u8],
    ) -> Result<(), ArchiveError> {
        let failed = |errno| ArchiveError::file("read", path, errno);
        // Opening a FIFO would block without `NONBLOCK`.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = match fs::openat(parent, file, flags, Mode::empty()) {
            Ok(fd) => fd,
            // The file was removed or replaced concurrently.
            Err(Errno::NOENT | Errno::LOOP) => return Ok(()),
            Err(e) => return Err(failed(e)),
        };
        let found = fs::fstat(&fd).map_err(failed)?;
        // The file was replaced between `statat` and `openat`.
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Ok(());
        }
        if self.add_hard_link(path, &found)? {
            return Ok(());
        }
        let mut entry = entry_of(ArchiveEntryKind::File, path, &found);
        entry.size = found.st_size.unsigned_abs();
        entry.runs = runs_of(&fd, &found).map_err(failed)?;
        entry.xattrs = xattr::of(fd.as_fd(), self.contents.xattrs).map_err(failed)?;
        self.writer.begin(&entry).map_err(ArchiveError::Send)?;
        for run in &entry.runs {
            self.copy(&fd, *run).map_err(|e| match e {
                Failed::Read(errno) => failed(errno),
                Failed::Send(e) => ArchiveError::Send(e),
            })?;
        }
        self.writer.end().map_err(ArchiveError::Send)
    }

    /// Copies a range of a file to the archive. If the file has shrunk, fills the range with
    /// zeroes.
    fn copy(&mut self, fd: &OwnedFd, run: ContentRange) -> Result<(), Failed> {
        let (mut at, end) = (run.offset, run.offset + run.length);
        while at < end {
            let length = usize::try_from(end - at).map_or(BUFFER, |rest| rest.min(BUFFER));
            let piece = &mut self.buffer[..length];
            let n = match rustix::io::pread(fd, &mut *piece, at) {
                // The file has shrunk.
                Ok(0) => {
                    piece.fill(0);
                    length
                }
                Ok(n) => n,
                Err(Errno::INTR) => continue,
                Err(e) => return Err(Failed::Read(e)),
            };
            (self.writer.write_all(&self.buffer[..n])).map_err(Failed::Send)?;
            at += n as u64;
        }
        Ok(())
    }

    /// Writes a hard link if the file was already added under another name. Returns true if so.
    fn add_hard_link(&mut self, path: &[u8], found: &Stat) -> Result<bool, ArchiveError> {
        #[allow(clippy::unnecessary_cast, reason = "its type differs between targets")]
        let names = found.st_nlink as u64;
        if names < 2 {
            return Ok(false);
        }
        let key = (found.st_dev, found.st_ino);
        let Some((first, remaining)) = self.links.get_mut(&key) else {
            // The first name receives the content.
            self.links.insert(key, (path.to_vec(), names - 1));
            return Ok(false);
        };
        let mut entry = entry_of(ArchiveEntryKind::HardLink, path, found);
        entry.link = first.clone();
        *remaining = remaining.saturating_sub(1);
        // All names of the file were found, so the memory can be released.
        if *remaining == 0 {
            self.links.remove(&key);
        }
        self.add_empty(&entry)?;
        Ok(true)
    }

    /// Writes an entry without content.
    fn add_empty(&mut self, entry: &ArchiveEntry) -> Result<(), ArchiveError> {
        self.writer.add(entry, b"").map_err(ArchiveError::Send)
    }
}

/// Failed side of a copy.
enum Failed {
    Read(Errno),
    Send(std::io::Error),
}

fn entry_of(kind: ArchiveEntryKind, path: &[u8], found: &Stat) -> ArchiveEntry {
    let mut entry = ArchiveEntry::new(kind, path, found.st_mode & 0o7777);
    (entry.uid, entry.gid) = (found.st_uid, found.st_gid);
    let ns = u32::try_from(found.st_mtime_nsec).unwrap_or(0);
    entry.mtime = (found.st_mtime, ns);
    entry
}

/// Returns the ranges of a file that have content. Searches for holes only if the allocated blocks
/// are smaller in total than the file.
fn runs_of(fd: &OwnedFd, found: &Stat) -> Result<Vec<ContentRange>, Errno> {
    let size = found.st_size.unsigned_abs();
    if found.st_blocks.unsigned_abs().saturating_mul(512) >= size {
        return Ok(whole(size));
    }
    let mut runs = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match fs::seek(fd, SeekFrom::Data(at)) {
            Ok(start) => start,
            // The remainder is a hole.
            Err(Errno::NXIO) => break,
            // The file system does not support the search for holes.
            Err(Errno::INVAL) => return Ok(whole(size)),
            Err(e) => return Err(e),
        };
        // The file has grown, and the additional content is not packed.
        if start >= size {
            break;
        }
        let end = match fs::seek(fd, SeekFrom::Hole(start)) {
            Ok(end) => end.min(size),
            // The file has shrunk.
            Err(Errno::NXIO) => break,
            Err(e) => return Err(e),
        };
        // A file system that reports no progress would cause an endless loop.
        if runs.len() == MAX_RUNS || end <= start {
            return Ok(whole(size));
        }
        runs.push(ContentRange {
            offset: start,
            length: end - start,
        });
        at = end;
    }
    Ok(runs)
}

/// Returns true if a file system exposes kernel state: reading its files is useless or has side
/// effects.
fn is_kernels(fd: &OwnedFd) -> Result<bool, Errno> {
    /// proc, sysfs, cgroup, cgroup2, devpts, debugfs, tracefs, securityfs, bpf, pstore, configfs,
    /// efivarfs (`linux/magic.h`).
    const MAGIC: [u64; 12] = [
        0x9fa0,
        0x6265_6572,
        0x0027_e0eb,
        0x6367_7270,
        0x1cd1,
        0x6462_6720,
        0x7472_6163,
        0x7363_6673,
        0xcafe_4a11,
        0x6165_676c,
        0x6265_6570,
        0xde5e_81e4,
    ];
    #[allow(clippy::unnecessary_cast, reason = "its type differs between targets")]
    let kind = fs::fstatfs(fd)?.f_type as u64;
    Ok(MAGIC.contains(&kind))
}
