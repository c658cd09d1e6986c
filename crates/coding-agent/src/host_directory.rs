//! Project directory on the host. No operation leaves it: paths are resolved below its descriptor
//! without symbolic links.

use crate::tree::{LinkTarget, ListedFile, ListedKind, MODE_BITS, Stamp};
use crate::tree_path::TreePath;
use anyhow::Context;
use jiffy_archive::target_dir::{EntryPath, TargetDir};
use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Stat};
use rustix::fs::{Timespec, Timestamps};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Resolution never leaves the directory and never follows a link.
const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS);
/// Size of the buffer for copies in bytes.
const BUFFER: usize = 256 << 10;

/// Result of a replacement of a file.
#[derive(Debug, PartialEq, Eq)]
pub enum Replacement {
    /// The file was replaced.
    Done,
    /// The existing file is not the expected one, and was not changed.
    Changed,
}

/// New content of a file.
pub enum NewFile<'a> {
    /// Regular file with the content of an open file.
    File {
        /// Open file.
        content: &'a mut File,
        /// Permission bits.
        mode: u32,
        /// Time of modification.
        mtime: (i64, u32),
    },
    /// Symbolic link.
    Symlink(&'a [u8]),
}

/// Open project directory.
pub struct HostDirectory {
    fd: OwnedFd,
    path: PathBuf,
}

/// Converts the metadata of a file. `None` for devices, pipes and sockets.
fn listed(stat: &Stat, target: impl FnOnce() -> Option<Vec<u8>>) -> Option<ListedFile> {
    let ns = |ns| u32::try_from(ns).unwrap_or(0);
    let (kind, mode) = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => (ListedKind::File, stat.st_mode & MODE_BITS),
        FileType::Directory => (ListedKind::Directory, stat.st_mode & MODE_BITS),
        FileType::Symlink => (ListedKind::Symlink(LinkTarget(target()?)), 0),
        _ => return None,
    };
    Some(ListedFile {
        kind,
        mode,
        stamp: Stamp {
            size: stat.st_size.unsigned_abs(),
            mtime: (stat.st_mtime, ns(stat.st_mtime_nsec)),
            ctime: (stat.st_ctime, ns(stat.st_ctime_nsec)),
            inode: stat.st_ino,
        },
    })
}

impl HostDirectory {
    /// Opens the directory.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = fs::open(path, flags, Mode::empty())
            .with_context(|| format!("cannot open the project directory {}", path.display()))?;
        let path = path.to_owned();
        Ok(Self { fd, path })
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a path below the directory without following symbolic links.
    fn open_at(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
        // Opening a pipe would block. The flag is invalid for descriptors of paths.
        let wait = if flags.contains(OFlags::PATH) {
            OFlags::empty()
        } else {
            OFlags::NONBLOCK
        };
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | wait;
        let path = if path.is_empty() { b"." } else { path };
        loop {
            match fs::openat2(&self.fd, path, flags, Mode::empty(), BENEATH) {
                // A concurrent rename: try again (openat2(2)).
                Err(Errno::AGAIN) => {}
                result => return result,
            }
        }
    }

    /// Returns the descriptor of the parent of `path`.
    fn parent(&self, path: &TreePath) -> Result<OwnedFd, Errno> {
        let parent = path.parent();
        let parent = parent.as_ref().map_or(&b""[..], TreePath::bytes);
        self.open_at(parent, OFlags::PATH | OFlags::DIRECTORY)
    }

    /// Returns the names in a directory. `None` stands for the project directory. A directory that
    /// was removed has no names.
    pub fn names(&self, path: Option<&TreePath>) -> io::Result<Vec<Vec<u8>>> {
        let bytes = path.map_or(&b""[..], TreePath::bytes);
        let fd = match self.open_at(bytes, OFlags::RDONLY | OFlags::DIRECTORY) {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(Vec::new()),
            result => result?,
        };
        let mut names = Vec::new();
        for entry in Dir::read_from(fd)? {
            let name = entry?.file_name().to_bytes().to_vec();
            if name != b"." && name != b".." {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// Returns the metadata of a file. `None` if it does not exist, or is a device, a pipe or a
    /// socket.
    pub fn stat(&self, path: &TreePath) -> io::Result<Option<ListedFile>> {
        let found = self.parent(path).and_then(|parent| {
            let stat = fs::statat(&parent, path.name(), AtFlags::SYMLINK_NOFOLLOW)?;
            let target = || fs::readlinkat(&parent, path.name(), Vec::new()).ok();
            Ok(listed(&stat, || Some(target()?.into_bytes())))
        });
        match found {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
            result => Ok(result?),
        }
    }

    /// Opens a regular file for reading, and returns its metadata. `None` if it does not exist or
    /// is not a regular file.
    pub fn read(&self, path: &TreePath) -> io::Result<Option<(File, ListedFile)>> {
        let fd = match self.open_at(path.bytes(), OFlags::RDONLY) {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NXIO) => return Ok(None),
            result => result?,
        };
        let found = listed(&fs::fstat(&fd)?, || None);
        let found = found.filter(|file| file.kind == ListedKind::File);
        Ok(found.map(|file| (File::from(fd), file)))
    }

    /// Reads at most `limit` bytes from the start of a file. `None` if it is not a regular file.
    pub fn read_start(&self, path: &TreePath, limit: u64) -> io::Result<Option<Vec<u8>>> {
        let Some((file, _)) = self.read(path)? else {
            return Ok(None);
        };
        let mut bytes = Vec::new();
        file.take(limit).read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    /// Creates or replaces a file. `expected` is the metadata of the existing file, which must not
    /// have changed. Missing parents are created.
    pub fn replace(
        &self,
        path: &TreePath,
        expected: Option<&ListedFile>,
        new: NewFile<'_>,
    ) -> anyhow::Result<Replacement> {
        let failed = || format!("cannot write {} on the host", self.shown(path));
        let entry = EntryPath::of(path.bytes())?;
        let mut target = TargetDir::new(self.fd.as_fd(), true, None, None);
        let (parent, name) = target.parent(&entry)?;
        let number = getrandom::u64().with_context(failed)?;
        let temporary = format!(".jiffy-{number:016x}");
        let created = create(parent.as_fd(), temporary.as_bytes(), new);
        let replaced = created.and_then(|()| match expected {
            None => match rename(parent.as_fd(), &temporary, name, RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => Ok(Replacement::Changed),
                result => result.map(|()| Replacement::Done).map_err(io::Error::from),
            },
            Some(expected) => exchange(parent.as_fd(), &temporary, name, expected),
        });
        // Ignore the error: the file does not exist if it was renamed.
        let _ = fs::unlinkat(parent, &temporary, AtFlags::empty());
        replaced.with_context(failed)
    }

    /// Removes a file or an empty directory. `expected` is its metadata, which must not have
    /// changed.
    pub fn remove(&self, path: &TreePath, expected: &ListedFile) -> anyhow::Result<Replacement> {
        let failed = || format!("cannot remove {} on the host", self.shown(path));
        let Some(found) = self.stat(path).with_context(failed)? else {
            return Ok(Replacement::Done);
        };
        let is_directory = expected.kind == ListedKind::Directory;
        let is_same = if is_directory {
            found.kind == ListedKind::Directory
        } else {
            found == *expected
        };
        if !is_same {
            return Ok(Replacement::Changed);
        }
        let flags = if is_directory {
            AtFlags::REMOVEDIR
        } else {
            AtFlags::empty()
        };
        let parent = self.parent(path).map_err(io::Error::from);
        let parent = parent.with_context(failed)?;
        match fs::unlinkat(&parent, path.name(), flags) {
            Ok(()) | Err(Errno::NOENT) => Ok(Replacement::Done),
            // The directory has files that are not synchronised.
            Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(Replacement::Changed),
            Err(e) => Err(io::Error::from(e)).with_context(failed),
        }
    }

    /// Creates a directory if it does not exist. Its permissions are set by [`Self::set_mode`].
    pub fn make_directory(&self, path: &TreePath) -> anyhow::Result<Replacement> {
        let failed = || {
            format!(
                "cannot create the directory {} on the host",
                self.shown(path)
            )
        };
        let entry = EntryPath::of(path.bytes())?;
        let mut target = TargetDir::new(self.fd.as_fd(), true, None, None);
        let (parent, name) = target.parent(&entry)?;
        match fs::mkdirat(parent, name, Mode::RWXU) {
            Ok(()) => return Ok(Replacement::Done),
            Err(Errno::EXIST) => {}
            Err(e) => return Err(io::Error::from(e)).with_context(failed),
        }
        let found = self.stat(path).with_context(failed)?;
        let is_directory = found.is_some_and(|file| file.kind == ListedKind::Directory);
        Ok(if is_directory {
            Replacement::Done
        } else {
            Replacement::Changed
        })
    }

    /// Sets the permissions of a directory.
    pub fn set_mode(&self, path: &TreePath, mode: u32) -> anyhow::Result<()> {
        let fd = self.open_at(path.bytes(), OFlags::RDONLY | OFlags::DIRECTORY);
        let set = fd.and_then(|fd| fs::fchmod(fd, Mode::from_raw_mode(mode & MODE_BITS)));
        set.map_err(io::Error::from)
            .with_context(|| format!("cannot set the permissions of {}", self.shown(path)))
    }

    /// Returns a path for messages.
    pub fn shown(&self, path: &TreePath) -> String {
        format!("{}/{path}", self.path.display())
    }
}

/// Creates the file `name` in `parent`, which must not exist.
fn create(parent: impl AsFd, name: &[u8], new: NewFile<'_>) -> io::Result<()> {
    match new {
        NewFile::Symlink(target) => Ok(fs::symlinkat(target, parent, name)?),
        NewFile::File {
            content,
            mode,
            mtime,
        } => {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
            let fd = fs::openat(
                parent,
                name,
                flags | OFlags::CLOEXEC,
                Mode::RUSR | Mode::WUSR,
            )?;
            let mut file = File::from(fd);
            let mut buffer = vec![0; BUFFER];
            loop {
                let n = content.read(&mut buffer)?;
                if n == 0 {
                    break;
                }
                file.write_all(&buffer[..n])?;
            }
            fs::fchmod(&file, Mode::from_raw_mode(mode & MODE_BITS))?;
            let time = Timespec {
                tv_sec: mtime.0,
                tv_nsec: mtime.1.into(),
            };
            let times = Timestamps {
                last_access: time,
                last_modification: time,
            };
            // Ignore the error: the time is not part of the content.
            let _ = fs::futimens(&file, &times);
            Ok(())
        }
    }
}

/// Renames a file, also on file systems that do not support `RENAME_NOREPLACE`. There another
/// process can create the target in between.
fn rename(parent: impl AsFd, from: &str, to: &[u8], flags: RenameFlags) -> Result<(), Errno> {
    match fs::renameat_with(&parent, from, &parent, to, flags) {
        // The file system does not support the flag.
        Err(Errno::INVAL | Errno::NOSYS) if flags == RenameFlags::NOREPLACE => {
            match fs::statat(&parent, to, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => fs::renameat(&parent, from, &parent, to),
                Ok(_) => Err(Errno::EXIST),
                Err(e) => Err(e),
            }
        }
        result => result,
    }
}

/// Exchanges `temporary` with `name` if the file `name` is the expected one. Afterwards, the caller
/// removes `temporary`. The exchange makes the check free of races with other programs.
fn exchange(
    parent: impl AsFd,
    temporary: &str,
    name: &[u8],
    expected: &ListedFile,
) -> io::Result<Replacement> {
    let is_expected = |name: &[u8], is_renamed: bool| -> io::Result<bool> {
        let stat = match fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(false),
            result => result?,
        };
        let target = fs::readlinkat(&parent, name, Vec::new()).ok();
        let found = listed(&stat, || target.map(|target| target.into_bytes()));
        // A rename changes the time of the last change.
        Ok(found.is_some_and(|mut file| {
            if is_renamed {
                file.stamp.ctime = expected.stamp.ctime;
            }
            file == *expected
        }))
    };
    if !is_expected(name, false)? {
        return Ok(Replacement::Changed);
    }
    match rename(&parent, temporary, name, RenameFlags::EXCHANGE) {
        Ok(()) => {}
        // The file system does not support the exchange. The rename may overwrite a change by
        // another program since the check.
        Err(Errno::INVAL | Errno::NOSYS) => {
            fs::renameat(&parent, temporary, &parent, name)?;
            return Ok(Replacement::Done);
        }
        Err(Errno::NOENT) => return Ok(Replacement::Changed),
        Err(e) => return Err(e.into()),
    }
    if is_expected(temporary.as_bytes(), true)? {
        return Ok(Replacement::Done);
    }
    // Another program replaced the file meanwhile.
    rename(&parent, temporary, name, RenameFlags::EXCHANGE)?;
    Ok(Replacement::Changed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs as std_fs;
    use std::io::Seek;
    use std::os::unix::fs::symlink;

    fn path(text: &str) -> TreePath {
        TreePath::new(text.as_bytes()).unwrap()
    }

    fn content(text: &str) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.rewind().unwrap();
        file
    }

    /// Replaces the file `name`, or creates it.
    fn write(directory: &HostDirectory, name: &str, text: &str) -> anyhow::Result<Replacement> {
        let path = path(name);
        let expected = directory.stat(&path).unwrap();
        let new = NewFile::File {
            content: &mut content(text),
            mode: 0o640,
            mtime: (5, 7),
        };
        directory.replace(&path, expected.as_ref(), new)
    }

    #[test]
    fn links_in_the_project_do_not_lead_writes_out_of_it() {
        let (project, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let victim = outside.path().join("f");
        std_fs::write(&victim, "mine").unwrap();
        symlink(outside.path(), project.path().join("d")).unwrap();
        symlink(&victim, project.path().join("l")).unwrap();
        let directory = HostDirectory::open(project.path()).unwrap();
        assert!(write(&directory, "d/f", "theirs").is_err());
        assert!(write(&directory, "d/new", "theirs").is_err());
        assert!(directory.make_directory(&path("d/sub")).is_err());
        assert_eq!(directory.read(&path("d/f")).unwrap().map(drop), None);
        // The link itself is replaced.
        assert_eq!(write(&directory, "l", "new").unwrap(), Replacement::Done);
        assert_eq!(std_fs::read(&victim).unwrap(), b"mine");
        assert_eq!(std_fs::read(project.path().join("l")).unwrap(), b"new");
        assert_eq!(std_fs::read_dir(outside.path()).unwrap().count(), 1);
    }

    #[test]
    fn files_that_another_program_changed_are_not_replaced_or_removed() {
        let project = tempfile::tempdir().unwrap();
        let directory = HostDirectory::open(project.path()).unwrap();
        let (file, name) = (path("a/f"), project.path().join("a/f"));
        assert_eq!(write(&directory, "a/f", "one").unwrap(), Replacement::Done);
        let old = directory.stat(&file).unwrap().unwrap();
        assert_eq!((old.mode, old.stamp.mtime), (0o640, (5, 7)));
        std_fs::write(&name, "two").unwrap();
        let new = || NewFile::Symlink(b"x");
        let replaced = directory.replace(&file, Some(&old), new()).unwrap();
        assert_eq!(replaced, Replacement::Changed);
        assert_eq!(
            directory.replace(&file, None, new()).unwrap(),
            Replacement::Changed
        );
        assert_eq!(directory.remove(&file, &old).unwrap(), Replacement::Changed);
        assert_eq!(std_fs::read(&name).unwrap(), b"two");
        // No temporary file remains.
        assert_eq!(directory.names(Some(&path("a"))).unwrap().len(), 1);
        let parent = directory.stat(&path("a")).unwrap().unwrap();
        let removed = directory.remove(&path("a"), &parent).unwrap();
        assert_eq!(removed, Replacement::Changed);
    }
}
