//! Unpacks archives below a directory.

use crate::entry::{ArchiveEntry, ArchiveEntryKind};
use crate::error::{ArchiveError, shown};
use crate::mode::set_mode;
use crate::read::ArchiveReader;
use crate::target_dir::{EntryPath, TargetDir, own};
use crate::whiteout::{self, Mark};
use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

const BUFFER: usize = 64 << 10;
/// Maximum number of bytes read after the end mark. Archives are padded, often to 10 KiB.
const PADDING: u64 = 1 << 20;

/// Owner of the unpacked files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnpackOwner {
    /// Owner as recorded in the archive.
    Archive,
    /// The given user and group.
    Fixed(u32, u32),
    /// The user of the unpacking process.
    Process,
}

/// Options of unpacking.
#[derive(Debug, Clone)]
pub struct UnpackOptions {
    /// Owner of the files.
    pub owner: UnpackOwner,
    /// Permissions of all files and directories. Defaults to the permissions in the archive.
    pub mode: Option<u32>,
    /// True for an untrusted archive: devices, named pipes, set-user-id bits and attributes are not
    /// unpacked, and symbolic links are not followed.
    pub confined: bool,
    /// Replacement for the first component of every path.
    pub rename: Option<Vec<u8>>,
    /// Maximum total size of the files in bytes, including holes.
    pub max_bytes: Option<u64>,
    /// Maximum number of files and directories, including implicitly created directories.
    pub max_entries: Option<u64>,
    /// True for a layer of an OCI image: its marks delete existing files, and a directory and
    /// another kind of file replace each other.
    pub layer: bool,
}

/// Result of unpacking.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnpackStats {
    /// Number of unpacked entries.
    pub entries: u64,
    /// Bytes of the files, excluding holes.
    pub bytes: u64,
    /// Number of devices, named pipes and hard links to them that were skipped because the archive
    /// is untrusted.
    pub skipped: u64,
    /// Name of the first skipped entry, for display.
    pub first_skipped: Option<String>,
}

/// Unpacks an archive into the open directory `root`.
///
/// Files replace existing files. Existing directories are retained, and so are links to directories
/// unless the archive is untrusted. A directory and another kind of file replace each other only in
/// layers.
pub fn unpack(
    input: impl Read,
    root: BorrowedFd<'_>,
    rules: &UnpackOptions,
) -> Result<UnpackStats, ArchiveError> {
    let owner = match rules.owner {
        UnpackOwner::Fixed(uid, gid) => Some((uid, gid)),
        _ => None,
    };
    let mut work = Unpacker {
        reader: ArchiveReader::new(input),
        target: TargetDir::new(root, rules.confined, owner, rules.max_entries),
        rules,
        open: Vec::new(),
        buffer: vec![0; BUFFER],
        size: 0,
        done: UnpackStats::default(),
    };
    let outcome = work.run();
    // Set the permissions of unfinished directories even after an error.
    let finished = work.finish_directories(None);
    outcome.and(finished).map(|()| work.done)
}

/// Directory whose permissions and times are set after its content.
struct PendingDir {
    path: EntryPath,
    fd: OwnedFd,
    mode: u32,
    /// Modification time in seconds and nanoseconds, which is set when the directory is complete.
    mtime: (i64, u32),
}

/// State of the unpacking of one archive.
struct Unpacker<'a, R> {
    reader: ArchiveReader<R>,
    target: TargetDir<'a>,
    rules: &'a UnpackOptions,
    /// Open directories, innermost last.
    open: Vec<PendingDir>,
    buffer: Vec<u8>,
    /// Total size of the files so far, including holes.
    size: u64,
    done: UnpackStats,
}

impl<R: Read> Unpacker<'_, R> {
    /// Unpacks all entries. The first error ends the unpacking.
    fn run(&mut self) -> Result<(), ArchiveError> {
        while let Some(entry) = self.reader.next_entry()? {
            let path = self.inside(&entry.path)?;
            // Archives list the content of a directory directly after it.
            self.finish_directories(Some(&path))?;
            // The size is checked before the content is read.
            self.size = self.size.saturating_add(entry.size);
            if self.rules.max_bytes.is_some_and(|max| self.size > max) {
                let problem = "exceeds the maximum total size";
                return Err(ArchiveError::entry(&entry.path, problem));
            }
            if self.rules.confined && is_special(entry.kind) {
                self.done.skipped += 1;
                let first = &mut self.done.first_skipped;
                first.get_or_insert_with(|| shown(&entry.path));
                continue;
            }
            if self.rules.layer && self.apply_mark(&path)? {
                continue;
            }
            if !path.is_root() {
                self.target.count_entry(&path)?;
            }
            match entry.kind {
                ArchiveEntryKind::Directory => self.directory(entry, path)?,
                _ if path.is_root() => {
                    return Err(ArchiveError::entry(&entry.path, "has no name"));
                }
                ArchiveEntryKind::File => self.file(&entry, &path)?,
                ArchiveEntryKind::Symlink => self.symlink(&entry, &path)?,
                ArchiveEntryKind::HardLink => self.hard_link(&entry, &path)?,
                ArchiveEntryKind::Fifo => self.node(&entry, &path, FileType::Fifo, 0)?,
                ArchiveEntryKind::Character(major, minor) => {
                    let device = fs::makedev(major, minor);
                    self.node(&entry, &path, FileType::CharacterDevice, device)?;
                }
                ArchiveEntryKind::Block(major, minor) => {
                    let device = fs::makedev(major, minor);
                    self.node(&entry, &path, FileType::BlockDevice, device)?;
                }
                ArchiveEntryKind::UnknownDevice => {
                    let problem = "is a device without a number";
                    return Err(ArchiveError::entry(&entry.path, problem));
                }
            }
            self.done.entries += 1;
        }
        // Read the remainder, so that the sender can receive the result.
        self.reader.drain(PADDING).map_err(ArchiveError::Read)
    }

    /// Deletes the files that a mark of a layer hides. Returns false if the entry is no mark.
    fn apply_mark(&mut self, path: &EntryPath) -> Result<bool, ArchiveError> {
        let Some(mark) = Mark::of(path.name()) else {
            return Ok(false);
        };
        let (parent, _) = self.target.parent(path)?;
        let removed = match mark {
            Mark::Deleted(name) => whiteout::remove_tree(parent, name),
            Mark::Opaque => whiteout::remove_content(parent),
            Mark::Invalid => {
                let problem = "is a mark of a deleted file without a name";
                return Err(ArchiveError::entry(path.bytes(), problem));
            }
        };
        removed.map_err(|errno| ArchiveError::file("apply the mark", path.bytes(), errno))?;
        Ok(true)
    }

    /// Returns the path of an entry in the target directory.
    fn inside(&self, path: &[u8]) -> Result<EntryPath, ArchiveError> {
        let inside = EntryPath::of(path)?;
        Ok(match &self.rules.rename {
            Some(name) => inside.renamed(name),
            None => inside,
        })
    }

    /// Returns the permissions that an entry receives.
    fn mode(&self, entry: &ArchiveEntry) -> u32 {
        let mask = if self.rules.confined { 0o777 } else { 0o7777 };
        self.rules.mode.unwrap_or(entry.mode) & mask
    }

    /// Returns the owner that an entry receives. `None` to leave it unchanged.
    fn owner(&self, entry: &ArchiveEntry) -> Option<(u32, u32)> {
        match self.rules.owner {
            UnpackOwner::Archive => Some((entry.uid, entry.gid)),
            UnpackOwner::Fixed(uid, gid) => Some((uid, gid)),
            UnpackOwner::Process => None,
        }
    }

    /// Sets permissions and times of the open directories that do not contain `next`. They are set
    /// last, because a read-only directory accepts no entries, and each entry changes the time.
    fn finish_directories(&mut self, next: Option<&EntryPath>) -> Result<(), ArchiveError> {
        while let Some(last) = (self.open)
            // A repeated entry of an open directory does not finish it: the directory must remain
            // writable for the entries after it.
            .pop_if(|pending| next.is_none_or(|n| !n.is_in(&pending.path) && *n != pending.path))
        {
            let failed =
                |errno| ArchiveError::file("set the mode and times of", last.path.bytes(), errno);
            fs::fchmod(&last.fd, Mode::from_raw_mode(last.mode)).map_err(failed)?;
            fs::futimens(&last.fd, &times(last.mtime)).map_err(failed)?;
        }
        Ok(())
    }

    /// Creates a directory, or uses an existing one. Its mode and times are set when its content is
    /// complete.
    fn directory(&mut self, entry: ArchiveEntry, path: EntryPath) -> Result<(), ArchiveError> {
        let (mode, owner, confined) = (self.mode(&entry), self.owner(&entry), self.rules.confined);
        let failed = |errno| ArchiveError::file("create the directory", path.bytes(), errno);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if path.is_root() {
            // The target directory retains its owner and permissions.
            return Ok(());
        }
        let layer = self.rules.layer;
        let (parent, name) = self.target.parent(&path)?;
        match fs::mkdirat(parent, name, Mode::RWXU) {
            Err(Errno::EXIST) if layer => replace_by_directory(parent, name).map_err(failed)?,
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(failed(e)),
        }
        let fd = match fs::openat(parent, name, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOTDIR | Errno::LOOP) => {
                // The existing entry is a link, or another kind of file.
                let target = fs::statat(parent, name, AtFlags::empty()).ok();
                let kind = target.map(|f| FileType::from_raw_mode(f.st_mode));
                if !confined && kind == Some(FileType::Directory) {
                    return Ok(());
                }
                let problem = "is a directory that would replace another kind of file";
                return Err(ArchiveError::entry(path.bytes(), problem));
            }
            Err(e) => return Err(failed(e)),
        };
        if let Some((uid, gid)) = owner {
            set_open_owner(&fd, uid, gid).map_err(failed)?;
        }
        if !confined {
            attributes(fd.as_fd(), &entry, &path)?;
        }
        // Mode and times are set when the content is complete.
        self.open.push(PendingDir {
            path,
            fd,
            mode,
            mtime: entry.mtime,
        });
        Ok(())
    }

    /// Creates a regular file in place of an existing entry. Holes are not written.
    fn file(&mut self, entry: &ArchiveEntry, path: &EntryPath) -> Result<(), ArchiveError> {
        let failed = |action| move |errno| ArchiveError::file(action, path.bytes(), errno);
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // `EXCL` guarantees that the file is new: an existing file could be a link, or be open
        // elsewhere.
        let fd = self.replacing(path, |parent, name| {
            fs::openat(parent, name, flags, Mode::RUSR | Mode::WUSR)
        })?;
        // Holes are not written, so the writes do not extend the file over a hole at its end.
        if entry.is_sparse() {
            fs::ftruncate(&fd, entry.size).map_err(failed("write"))?;
        }
        for run in &entry.runs {
            let (mut at, end) = (run.offset, run.offset + run.length);
            while at < end {
                // `read_content` may return fewer bytes than the buffer has.
                let length = usize::try_from(end - at).map_or(BUFFER, |rest| rest.min(BUFFER));
                let n = self.reader.read_content(&mut self.buffer[..length])?;
                write_at(&fd, &self.buffer[..n], at).map_err(failed("write"))?;
                at += n as u64;
                self.done.bytes += n as u64;
            }
        }
        if let Some((uid, gid)) = self.owner(entry) {
            set_open_owner(&fd, uid, gid).map_err(failed("set the owner of"))?;
        }
        // Set the mode after the owner, because changing the owner clears set-user-id bits and
        // capabilities.
        let mode = Mode::from_raw_mode(self.mode(entry));
        fs::fchmod(&fd, mode).map_err(failed("set the mode of"))?;
        if !self.rules.confined {
            attributes(fd.as_fd(), entry, path)?;
        }
        fs::futimens(&fd, &times(entry.mtime)).map_err(failed("set the times of"))
    }

    /// Creates a symbolic link. Its target is stored and not checked.
    fn symlink(&mut self, entry: &ArchiveEntry, path: &EntryPath) -> Result<(), ArchiveError> {
        if entry.link.is_empty() || entry.link.contains(&0) {
            return Err(ArchiveError::entry(path.bytes(), "is a link to nothing"));
        }
        self.replacing(path, |parent, name| {
            fs::symlinkat(entry.link.as_slice(), parent, name)
        })?;
        self.set_owner_and_time(entry, path)
    }

    /// Creates a hard link. Its target must be an unpacked file below the same directory.
    fn hard_link(&mut self, entry: &ArchiveEntry, path: &EntryPath) -> Result<(), ArchiveError> {
        let target = self.inside(&entry.link)?;
        if target == *path {
            return Ok(());
        }
        let missing = "is a hard link to a file that does not exist";
        let (target_parent, target_name) = match self.target.existing(&target) {
            Ok(parent) if !target.is_root() => parent,
            _ => return Err(ArchiveError::entry(path.bytes(), missing)),
        };
        // Check the target before removing an existing file.
        match fs::statat(&target_parent, target_name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => {}
            // Another hard link to a skipped entry. The first name was skipped, so the target is
            // missing.
            Err(Errno::NOENT) if self.done.skipped > 0 => {
                self.done.skipped += 1;
                return Ok(());
            }
            Err(_) => return Err(ArchiveError::entry(path.bytes(), missing)),
        }
        self.replacing(path, |parent, name| {
            fs::linkat(&target_parent, target_name, parent, name, AtFlags::empty())
        })
    }

    /// Creates a device or a pipe.
    fn node(
        &mut self,
        entry: &ArchiveEntry,
        path: &EntryPath,
        kind: FileType,
        device: u64,
    ) -> Result<(), ArchiveError> {
        let mode = Mode::from_raw_mode(self.mode(entry));
        self.replacing(path, |parent, name| {
            fs::mknodat(parent, name, kind, Mode::empty(), device)
        })?;
        self.set_owner_and_time(entry, path)?;
        let (parent, name) = self.target.parent(path)?;
        set_mode(parent, name, mode)
            .map_err(|errno| ArchiveError::file("set the mode of", path.bytes(), errno))
    }

    /// Creates a file after removing an existing file with the same name.
    fn replacing<T>(
        &mut self,
        path: &EntryPath,
        create: impl Fn(BorrowedFd<'_>, &[u8]) -> Result<T, Errno>,
    ) -> Result<T, ArchiveError> {
        let layer = self.rules.layer;
        let (parent, name) = self.target.parent(path)?;
        let failed = |errno| match errno {
            Errno::ISDIR | Errno::NOTEMPTY => {
                ArchiveError::entry(path.bytes(), "would replace a directory")
            }
            errno => ArchiveError::file("create", path.bytes(), errno),
        };
        // Try to create the file before any removal. Usually no file has this name, so that this
        // attempt saves the system call for the removal.
        match create(parent, name) {
            Err(Errno::EXIST) => {}
            outcome => return outcome.map_err(failed),
        }
        match fs::unlinkat(parent, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR) if layer => whiteout::remove_tree(parent, name).map_err(failed)?,
            Err(e) => return Err(failed(e)),
        }
        create(parent, name).map_err(failed)
    }

    /// Sets owner and time of a file that cannot be opened.
    fn set_owner_and_time(
        &mut self,
        entry: &ArchiveEntry,
        path: &EntryPath,
    ) -> Result<(), ArchiveError> {
        let owner = self.owner(entry);
        let (parent, name) = self.target.parent(path)?;
        let failed = |errno| ArchiveError::file("set the owner of", path.bytes(), errno);
        if let Some((uid, gid)) = owner {
            own(parent, name, uid, gid).map_err(failed)?;
        }
        let times = times(entry.mtime);
        fs::utimensat(parent, name, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)
    }
}

/// Replaces a link or another file by a directory. Retains an existing directory.
fn replace_by_directory(parent: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
    let found = fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(found.st_mode) == FileType::Directory {
        return Ok(());
    }
    fs::unlinkat(parent, name, AtFlags::empty())?;
    fs::mkdirat(parent, name, Mode::RWXU)
}

/// Returns whether an entry is neither a file nor a directory nor a link.
fn is_special(kind: ArchiveEntryKind) -> bool {
    use ArchiveEntryKind::{Directory, File, HardLink, Symlink};
    !matches!(kind, File | Directory | Symlink | HardLink)
}

/// Sets the owner of an open file.
fn set_open_owner(fd: &OwnedFd, uid: u32, gid: u32) -> Result<(), Errno> {
    let (uid, gid) = (fs::Uid::from_raw(uid), fs::Gid::from_raw(gid));
    match fs::fchown(fd, Some(uid), Some(gid)) {
        // Without the privilege, the owner is not changed.
        Err(Errno::PERM) => Ok(()),
        outcome => outcome,
    }
}

/// Writes all bytes to a file at an offset.
fn write_at(fd: &OwnedFd, mut bytes: &[u8], mut at: u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(fd, bytes, at) {
            // A write without progress would be repeated forever.
            Ok(0) => return Err(Errno::IO),
            Ok(n) => {
                bytes = &bytes[n..];
                at += n as u64;
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Sets the attributes that the file system supports and the process may set.
fn attributes(
    fd: BorrowedFd<'_>,
    entry: &ArchiveEntry,
    path: &EntryPath,
) -> Result<(), ArchiveError> {
    for (name, value) in &entry.xattrs {
        // Overlay attributes refer to the location of a file and are invalid elsewhere.
        if name.starts_with(b"trusted.overlay.") || name.contains(&0) {
            continue;
        }
        match fs::fsetxattr(fd, name.as_slice(), value, XattrFlags::empty()) {
            // The file system has no attributes, or the process may not set this one.
            Ok(()) | Err(Errno::NOTSUP | Errno::PERM) => {}
            Err(e) => {
                return Err(ArchiveError::file("set an attribute of", path.bytes(), e));
            }
        }
    }
    Ok(())
}

/// Returns one time for the access time and the modification time.
fn times((seconds, ns): (i64, u32)) -> Timestamps {
    let time = Timespec {
        tv_sec: seconds,
        tv_nsec: ns.into(),
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}
