//! From an archive to files beneath a directory.

use crate::entry::{Entry, Kind};
use crate::error::ArchiveError;
use crate::place::{Inside, Place, own};
use crate::read::Reader;
use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

const BUFFER: usize = 64 << 10;
/// How much of what follows the end mark is read: archives are padded, often to 10 KiB.
const PADDING: u64 = 1 << 20;

/// Whose files are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// Whose the archive says.
    Archive,
    /// This user's and group's.
    Fixed(u32, u32),
    /// Whoever unpacks.
    Ours,
}

/// How an archive is unpacked.
#[derive(Debug, Clone)]
pub struct Rules {
    /// Whose files are made.
    pub owner: Owner,
    /// Permissions of everything, in place of the archive's.
    pub mode: Option<u32>,
    /// Whether the archive is a stranger's: no devices, no setuid, no attributes, and no way through symbolic links.
    pub confined: bool,
    /// Instead of the first name of every path.
    pub rename: Option<Vec<u8>>,
    /// Bytes that all files together may have, holes counted.
    pub max_bytes: Option<u64>,
}

/// What was unpacked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unpacked {
    /// Entries.
    pub entries: u64,
    /// Bytes of files, holes left out.
    pub bytes: u64,
}

/// Unpacks an archive into the directory that is open as `root`.
///
/// Files replace files; a directory that is there stays, and so does a link to one unless the archive is a stranger's. A directory
/// is not replaced by something else, nor the other way round.
pub fn unpack(
    input: impl Read,
    root: BorrowedFd<'_>,
    rules: &Rules,
) -> Result<Unpacked, ArchiveError> {
    let owner = match rules.owner {
        Owner::Fixed(uid, gid) => Some((uid, gid)),
        _ => None,
    };
    let mut work = Work {
        reader: Reader::new(input),
        place: Place::new(root, rules.confined, owner),
        rules,
        open: Vec::new(),
        buffer: vec![0; BUFFER],
        size: 0,
        done: Unpacked::default(),
    };
    let outcome = work.run();
    // What was begun gets its permissions also when the rest is missing.
    let settled = work.settle(None);
    outcome.and(settled).map(|()| work.done)
}

/// A directory whose permissions and time wait until all in it is there.
struct Pending {
    path: Inside,
    fd: OwnedFd,
    mode: u32,
    mtime: (i64, u32),
}

struct Work<'a, R> {
    reader: Reader<R>,
    place: Place<'a>,
    rules: &'a Rules,
    /// Directories within each other, the innermost last.
    open: Vec<Pending>,
    buffer: Vec<u8>,
    /// Of all files so far, holes counted.
    size: u64,
    done: Unpacked,
}

impl<R: Read> Work<'_, R> {
    fn run(&mut self) -> Result<(), ArchiveError> {
        while let Some(entry) = self.reader.next_entry()? {
            let path = self.inside(&entry.path)?;
            self.settle(Some(&path))?;
            // Before it is read: what is refused need not come.
            self.size = self.size.saturating_add(entry.size);
            if self.rules.max_bytes.is_some_and(|max| self.size > max) {
                let problem = "is more than may be unpacked";
                return Err(ArchiveError::entry(&entry.path, problem));
            }
            match entry.kind {
                Kind::Directory => self.directory(entry, path)?,
                _ if path.is_place() => {
                    return Err(ArchiveError::entry(&entry.path, "has no name"));
                }
                Kind::File => self.file(&entry, &path)?,
                Kind::Symlink => self.symlink(&entry, &path)?,
                Kind::HardLink => self.hard_link(&entry, &path)?,
                Kind::Fifo => self.node(&entry, &path, FileType::Fifo, 0)?,
                // Nothing that a stranger's archive brings opens the way to hardware.
                _ if self.rules.confined => continue,
                Kind::Character(major, minor) => {
                    let device = fs::makedev(major, minor);
                    self.node(&entry, &path, FileType::CharacterDevice, device)?;
                }
                Kind::Block(major, minor) => {
                    let device = fs::makedev(major, minor);
                    self.node(&entry, &path, FileType::BlockDevice, device)?;
                }
                Kind::UnknownDevice => {
                    let problem = "is a device without a number";
                    return Err(ArchiveError::entry(&entry.path, problem));
                }
            }
            self.done.entries += 1;
        }
        // A sender that is cut off here could not hear how it went.
        self.reader.drain(PADDING).map_err(ArchiveError::Read)
    }

    fn inside(&self, path: &[u8]) -> Result<Inside, ArchiveError> {
        let inside = Inside::of(path)?;
        Ok(match &self.rules.rename {
            Some(name) => inside.renamed(name),
            None => inside,
        })
    }

    fn mode(&self, entry: &Entry) -> u32 {
        let mask = if self.rules.confined { 0o777 } else { 0o7777 };
        self.rules.mode.unwrap_or(entry.mode) & mask
    }

    fn owner(&self, entry: &Entry) -> Option<(u32, u32)> {
        match self.rules.owner {
            Owner::Archive => Some((entry.uid, entry.gid)),
            Owner::Fixed(uid, gid) => Some((uid, gid)),
            Owner::Ours => None,
        }
    }

    /// Gives directories that `next` is not in their permissions and times.
    fn settle(&mut self, next: Option<&Inside>) -> Result<(), ArchiveError> {
        while let Some(last) = (self.open)
            .pop_if(|pending| next.is_none_or(|n| !n.is_in(&pending.path) && *n != pending.path))
        {
            let failed = |errno| ArchiveError::file("protect", last.path.bytes(), errno);
            fs::fchmod(&last.fd, Mode::from_raw_mode(last.mode)).map_err(failed)?;
            fs::futimens(&last.fd, &times(last.mtime)).map_err(failed)?;
        }
        Ok(())
    }

    fn directory(&mut self, entry: Entry, path: Inside) -> Result<(), ArchiveError> {
        let (mode, owner, confined) = (self.mode(&entry), self.owner(&entry), self.rules.confined);
        let failed = |errno| ArchiveError::file("make the directory", path.bytes(), errno);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if path.is_place() {
            // Made before the archive came; its owner and permissions are whoever's that made it.
            return Ok(());
        }
        let (parent, name) = self.place.parent(&path)?;
        match fs::mkdirat(parent, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(failed(e)),
        }
        let fd = match fs::openat(parent, name, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOTDIR | Errno::LOOP) => {
                let found = fs::statat(parent, name, AtFlags::empty()).ok();
                let leads = found.map(|f| FileType::from_raw_mode(f.st_mode));
                if !confined && leads == Some(FileType::Directory) {
                    return Ok(());
                }
                let problem = "is a directory, and something else is there";
                return Err(ArchiveError::entry(path.bytes(), problem));
            }
            Err(e) => return Err(failed(e)),
        };
        if let Some((uid, gid)) = owner {
            own_open(&fd, uid, gid).map_err(failed)?;
        }
        if !confined {
            attributes(fd.as_fd(), &entry, &path)?;
        }
        self.open.push(Pending {
            path,
            fd,
            mode,
            mtime: entry.mtime,
        });
        Ok(())
    }

    fn file(&mut self, entry: &Entry, path: &Inside) -> Result<(), ArchiveError> {
        let failed = |action| move |errno| ArchiveError::file(action, path.bytes(), errno);
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = self.replacing(path, |parent, name| {
            fs::openat(parent, name, flags, Mode::RUSR | Mode::WUSR)
        })?;
        if entry.is_sparse() {
            fs::ftruncate(&fd, entry.size).map_err(failed("write"))?;
        }
        for run in &entry.runs {
            let (mut at, end) = (run.offset, run.offset + run.length);
            while at < end {
                let most = usize::try_from(end - at).map_or(BUFFER, |left| left.min(BUFFER));
                let n = self.reader.read_content(&mut self.buffer[..most])?;
                write_at(&fd, &self.buffer[..n], at).map_err(failed("write"))?;
                at += n as u64;
                self.done.bytes += n as u64;
            }
        }
        if let Some((uid, gid)) = self.owner(entry) {
            own_open(&fd, uid, gid).map_err(failed("own"))?;
        }
        // After the owner, whose change takes setuid and capabilities away.
        let mode = Mode::from_raw_mode(self.mode(entry));
        fs::fchmod(&fd, mode).map_err(failed("protect"))?;
        if !self.rules.confined {
            attributes(fd.as_fd(), entry, path)?;
        }
        fs::futimens(&fd, &times(entry.mtime)).map_err(failed("date"))
    }

    fn symlink(&mut self, entry: &Entry, path: &Inside) -> Result<(), ArchiveError> {
        if entry.link.is_empty() || entry.link.contains(&0) {
            return Err(ArchiveError::entry(path.bytes(), "is a link to nothing"));
        }
        self.replacing(path, |parent, name| {
            fs::symlinkat(entry.link.as_slice(), parent, name)
        })?;
        self.own_and_date(entry, path)
    }

    fn hard_link(&mut self, entry: &Entry, path: &Inside) -> Result<(), ArchiveError> {
        let target = self.inside(&entry.link)?;
        if target == *path {
            return Ok(());
        }
        let missing = "is a hard link to something that is not there";
        let (target_parent, target_name) = match self.place.existing(&target) {
            Ok(found) if !target.is_place() => found,
            _ => return Err(ArchiveError::entry(path.bytes(), missing)),
        };
        // Before what is in the way is removed.
        fs::statat(&target_parent, target_name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|_| ArchiveError::entry(path.bytes(), missing))?;
        self.replacing(path, |parent, name| {
            fs::linkat(&target_parent, target_name, parent, name, AtFlags::empty())
        })
    }

    fn node(
        &mut self,
        entry: &Entry,
        path: &Inside,
        kind: FileType,
        device: u64,
    ) -> Result<(), ArchiveError> {
        let mode = Mode::from_raw_mode(self.mode(entry));
        self.replacing(path, |parent, name| {
            fs::mknodat(parent, name, kind, Mode::empty(), device)
        })?;
        self.own_and_date(entry, path)?;
        let (parent, name) = self.place.parent(path)?;
        fs::chmodat(parent, name, mode, AtFlags::empty())
            .map_err(|errno| ArchiveError::file("protect", path.bytes(), errno))
    }

    /// Makes something new, after removing what is there under its name.
    fn replacing<T>(
        &mut self,
        path: &Inside,
        make: impl Fn(BorrowedFd<'_>, &[u8]) -> Result<T, Errno>,
    ) -> Result<T, ArchiveError> {
        let (parent, name) = self.place.parent(path)?;
        let failed = |errno| match errno {
            Errno::ISDIR | Errno::NOTEMPTY => {
                ArchiveError::entry(path.bytes(), "would replace a directory")
            }
            errno => ArchiveError::file("make", path.bytes(), errno),
        };
        match make(parent, name) {
            Err(Errno::EXIST) => {}
            outcome => return outcome.map_err(failed),
        }
        match fs::unlinkat(parent, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(e) => return Err(failed(e)),
        }
        make(parent, name).map_err(failed)
    }

    /// Owner and time of what cannot be opened.
    fn own_and_date(&mut self, entry: &Entry, path: &Inside) -> Result<(), ArchiveError> {
        let owner = self.owner(entry);
        let (parent, name) = self.place.parent(path)?;
        let failed = |errno| ArchiveError::file("own", path.bytes(), errno);
        if let Some((uid, gid)) = owner {
            own(parent, name, uid, gid).map_err(failed)?;
        }
        let times = times(entry.mtime);
        fs::utimensat(parent, name, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)
    }
}

fn own_open(fd: &OwnedFd, uid: u32, gid: u32) -> Result<(), Errno> {
    let (uid, gid) = (fs::Uid::from_raw(uid), fs::Gid::from_raw(gid));
    match fs::fchown(fd, Some(uid), Some(gid)) {
        // Without the privilege to it things stay ours.
        Err(Errno::PERM) => Ok(()),
        outcome => outcome,
    }
}

fn write_at(fd: &OwnedFd, mut bytes: &[u8], mut at: u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(fd, bytes, at) {
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

/// Sets what attributes the file system can keep, and we may set.
fn attributes(fd: BorrowedFd<'_>, entry: &Entry, path: &Inside) -> Result<(), ArchiveError> {
    for (name, value) in &entry.xattrs {
        // They are the kernel's notes on where a file lies: in another place they are wrong.
        if name.starts_with(b"trusted.overlay.") || name.contains(&0) {
            continue;
        }
        match fs::fsetxattr(fd, name.as_slice(), value, XattrFlags::empty()) {
            Ok(()) | Err(Errno::NOTSUP | Errno::PERM) => {}
            Err(e) => {
                return Err(ArchiveError::file("set an attribute of", path.bytes(), e));
            }
        }
    }
    Ok(())
}

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
