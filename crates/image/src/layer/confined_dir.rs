//! A directory that no path can leave.
//!
//! The parent of every entry is opened with `openat2`, relative to the directory's descriptor.
//! `openat2` follows no symbolic link and never leaves the directory. The entry is then created by
//! its last path component, relative to the opened parent.

use super::limits::UnpackLimits;
use super::{EntryProblem, LayerError};
use rustix::fs::{self, AtFlags, CWD, FileType, Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// Forbids paths to directories above, through symbolic links, and into other file systems.
const RESOLVE_CONFINED: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);

/// Normalized path in the directory: components joined by `/`. No component is empty, `.` or `..`.
/// The path of the directory itself is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LayerPath(Vec<u8>);

impl LayerPath {
    /// Parses the name of an archive entry. Absolute names are relative to the root of the layer.
    pub(super) fn of(path: &[u8], limits: &UnpackLimits) -> Result<Self, EntryProblem> {
        if path.contains(&0) {
            return Err(EntryProblem::ZeroByte);
        }
        let names = path.split(|b| *b == b'/');
        let names: Vec<&[u8]> = names.filter(|n| !n.is_empty() && *n != b".").collect();
        if names.contains(&&b".."[..]) {
            return Err(EntryProblem::Outside);
        }
        let joined = names.join(&b'/');
        let long = joined.len() > limits.path || names.len() > limits.depth;
        // 255 bytes is the maximum length of a file name on Linux (`NAME_MAX`).
        if long || names.iter().any(|name| name.len() > 255) {
            return Err(EntryProblem::Path);
        }
        Ok(Self(joined))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the path of the parent directory, and the name in it.
    pub(super) fn split(&self) -> (&[u8], &[u8]) {
        match self.0.iter().rposition(|b| *b == b'/') {
            Some(slash) => (&self.0[..slash], &self.0[slash + 1..]),
            None => (b"", &self.0),
        }
    }
}

/// A directory that no path of an archive can leave.
pub(super) struct ConfinedDir {
    root: OwnedFd,
    /// Parent of the last entry. It is cached, since archives list entries by directory.
    last: Option<(Vec<u8>, OwnedFd)>,
    /// Created parent directories for which the archive has had no entry so far.
    pub(super) implied: Vec<Vec<u8>>,
}

impl ConfinedDir {
    /// Opens the directory at `path`.
    pub(super) fn open(path: &Path) -> Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let root = fs::openat(CWD, path, flags, Mode::empty())?;
        Ok(Self {
            root,
            last: None,
            implied: Vec::new(),
        })
    }

    /// Opens the existing directory `path`.
    pub(super) fn directory(&self, path: &[u8]) -> Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        self.confined(path, flags)
    }

    /// Opens the directory `path` for changes of its attributes.
    pub(super) fn open_directory(&self, path: &[u8]) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        self.confined(path, flags)
    }

    fn confined(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
        // The system call does not accept an empty path.
        let path = if path.is_empty() { b"." } else { path };
        fs::openat2(&self.root, path, flags, Mode::empty(), RESOLVE_CONFINED)
    }

    /// Returns the parent directory of `path`, and the name in it. Creates missing parents with
    /// mode 0755 and the owner root.
    pub(super) fn parent<'p>(
        &mut self,
        path: &'p LayerPath,
    ) -> Result<(BorrowedFd<'_>, &'p [u8]), LayerError> {
        let (parent, name) = path.split();
        // The cached descriptor stays valid: entries never replace or remove a directory.
        if self.last.as_ref().is_none_or(|(known, _)| known != parent) {
            let fd = match self.directory(parent) {
                Err(Errno::NOENT) => self.make_directories(parent),
                opened => opened,
            };
            let fd = fd.map_err(|errno| match errno {
                // `RESOLVE_NO_SYMLINKS` reports a symbolic link in the path as ELOOP.
                Errno::LOOP | Errno::NOTDIR => {
                    LayerError::entry(path.bytes(), EntryProblem::Through)
                }
                errno => LayerError::write("open the directory of", path.bytes(), errno),
            })?;
            self.last = Some((parent.to_vec(), fd));
        }
        match &self.last {
            Some((_, fd)) => Ok((fd.as_fd(), name)),
            None => Err(LayerError::write("open", path.bytes(), Errno::NOENT)),
        }
    }

    /// Creates the missing directories of `path`, one component after the other.
    fn make_directories(&mut self, path: &[u8]) -> Result<OwnedFd, Errno> {
        let mut ends = (0..path.len())
            .filter(|i| path[*i] == b'/')
            .collect::<Vec<_>>();
        ends.push(path.len());
        let mut above = self.directory(b"")?;
        let mut start = 0;
        for end in ends {
            let name = &path[start..end];
            match fs::mkdirat(&above, name, Mode::from_raw_mode(0o755)) {
                Ok(()) => {
                    // The mode is set explicitly, independent of the umask. The owner is root, as
                    // in other programs that unpack layers, and not the user of this process.
                    let made = self.open_directory(&path[..end])?;
                    fs::fchown(&made, Some(Uid::ROOT), Some(Gid::ROOT))?;
                    fs::fchmod(made, Mode::from_raw_mode(0o755))?;
                    self.implied.push(path[..end].to_vec());
                }
                // The entry may be a file or a link, which the call below rejects.
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
            above = self.directory(&path[..end])?;
            start = end + 1;
        }
        Ok(above)
    }

    /// Returns the type of `name` in `parent`, or `None` if it does not exist.
    pub(super) fn kind(parent: BorrowedFd<'_>, name: &[u8]) -> Result<Option<FileType>, Errno> {
        match fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) => Ok(Some(FileType::from_raw_mode(found.st_mode))),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Flushes the file system of the directory.
    pub(super) fn sync(&self) -> Result<(), Errno> {
        fs::syncfs(self.open_directory(b"")?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_inside() {
        let limits = UnpackLimits::default();
        let inside = |path: &str| LayerPath::of(path.as_bytes(), &limits).map(|p| p.0);
        assert_eq!(inside("/etc//./passwd").unwrap(), b"etc/passwd");
        assert_eq!(inside("./").unwrap(), b"");
        assert_eq!(inside("..a/b..").unwrap(), b"..a/b..");
        for bad in ["..", "a/../b", "/..", "a/.."] {
            assert_eq!(inside(bad), Err(EntryProblem::Outside), "{bad}");
        }
        assert_eq!(inside(&"a/".repeat(257)), Err(EntryProblem::Path));
        assert_eq!(inside(&"a".repeat(256)), Err(EntryProblem::Path));
        assert!(inside("a\0b").is_err());
    }
}
