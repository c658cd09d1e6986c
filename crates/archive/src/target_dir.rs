//! Target directory of an unpacked archive. No path of an untrusted archive leads out of it.
//!
//! The parent of every entry is opened relative to the directory's descriptor. The entry is then
//! created in the parent by a single path component.

use crate::error::ArchiveError;
use rustix::fs::{self, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Maximum number of path components. Unpacking holds a descriptor for each.
const MAX_DEPTH: usize = 256;
/// Maximum length of a path in bytes, as in the kernel.
const MAX_PATH: usize = 4095;
/// Maximum length of a file name in bytes, as in the kernel.
const MAX_NAME: usize = 255;

/// Resolution never leaves the directory and never follows a link.
const RESOLVE_CONFINED: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS);

/// Normalised path in the directory: components joined by `/`, none of them empty, `.` or `..`.
/// Empty for the directory itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryPath(Vec<u8>);

impl EntryPath {
    /// Parses the name of an entry. Absolute names are relative to the directory, as in tar.
    pub fn of(path: &[u8]) -> Result<Self, ArchiveError> {
        let bad = |problem| Err(ArchiveError::entry(path, problem));
        if path.contains(&0) {
            return bad("has a zero byte in its name");
        }
        // Empty components and `.` do not change the meaning of a path.
        let names = path.split(|b| *b == b'/');
        let names: Vec<&[u8]> = names.filter(|n| !n.is_empty() && *n != b".").collect();
        if names.contains(&&b".."[..]) {
            return bad("leads out of the directory with '..'");
        }
        let joined = names.join(&b'/');
        let long = joined.len() > MAX_PATH || names.len() > MAX_DEPTH;
        if long || names.iter().any(|name| name.len() > MAX_NAME) {
            return bad("has a name that is too long or too deep");
        }
        Ok(Self(joined))
    }

    /// Replaces the first component, if there is one.
    pub fn renamed(self, first: &[u8]) -> Self {
        if self.is_root() {
            return self;
        }
        let rest = self.0.iter().position(|b| *b == b'/');
        let rest = rest.map_or(&b""[..], |slash| &self.0[slash..]);
        Self([first, rest].concat())
    }

    /// Returns the bytes of the path.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns true if the path is the directory itself.
    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if the path is below `above`, at any depth.
    pub fn is_in(&self, above: &Self) -> bool {
        above.is_root()
            || self.0.len() > above.0.len()
                && self.0.starts_with(&above.0)
                && self.0[above.0.len()] == b'/'
    }

    /// Returns the last component. Empty for the directory itself.
    pub fn name(&self) -> &[u8] {
        self.split().1
    }

    /// Splits the path into the parent directory and the name in it.
    fn split(&self) -> (&[u8], &[u8]) {
        match self.0.iter().rposition(|b| *b == b'/') {
            Some(slash) => (&self.0[..slash], &self.0[slash + 1..]),
            None => (b"", &self.0),
        }
    }
}

/// Target directory. All methods resolve paths in it.
pub struct TargetDir<'a> {
    root: BorrowedFd<'a>,
    resolve: ResolveFlags,
    owner: Option<(u32, u32)>,
    /// Number of entries that may still be created. `None` if unlimited.
    entries_left: Option<u64>,
    /// Parent of the last entry, cached because archives list entries by directory.
    last: Option<(Vec<u8>, OwnedFd)>,
}

impl<'a> TargetDir<'a> {
    /// Uses the open directory `root`. If `confined`, symbolic links are not followed. Implicitly
    /// created directories belong to `owner`. At most `max_entries` entries are created.
    pub fn new(
        root: BorrowedFd<'a>,
        confined: bool,
        owner: Option<(u32, u32)>,
        max_entries: Option<u64>,
    ) -> Self {
        let resolve = if confined {
            RESOLVE_CONFINED
        } else {
            ResolveFlags::NO_MAGICLINKS
        };
        Self {
            root,
            resolve,
            owner,
            entries_left: max_entries,
            last: None,
        }
    }

    /// Counts an entry before its creation. Fails if the limit is exceeded.
    pub fn count_entry(&mut self, path: &EntryPath) -> Result<(), ArchiveError> {
        let Some(remaining) = &mut self.entries_left else {
            return Ok(());
        };
        let problem = "exceeds the maximum number of entries";
        let too_many = || ArchiveError::entry(path.bytes(), problem);
        *remaining = remaining.checked_sub(1).ok_or_else(too_many)?;
        Ok(())
    }

    /// Returns the descriptor of the directory.
    pub fn itself(&self) -> BorrowedFd<'a> {
        self.root
    }

    /// Returns the parent directory of `path`, and the name in it. Creates missing parents.
    pub fn parent<'p>(
        &mut self,
        path: &'p EntryPath,
    ) -> Result<(BorrowedFd<'_>, &'p [u8]), ArchiveError> {
        // The cache is taken out: an error below leaves no wrong entry.
        let (parent, name) = path.split();
        let fd = match self.last.take() {
            Some((cached, fd)) if cached == parent => fd,
            _ => match self.open(parent) {
                Err(Errno::NOENT) => self.make(parent, path)?,
                opened => opened.map_err(|errno| failed(path, errno))?,
            },
        };
        let last = self.last.insert((parent.to_vec(), fd));
        Ok((last.1.as_fd(), name))
    }

    /// Returns the existing parent directory of `path`, and the name in it.
    pub fn existing<'p>(&self, path: &'p EntryPath) -> Result<(OwnedFd, &'p [u8]), Errno> {
        let (parent, name) = path.split();
        Ok((self.open(parent)?, name))
    }

    /// Opens a directory below the root. The kernel resolves the path with the restrictions that
    /// `resolve` selects.
    fn open(&self, path: &[u8]) -> Result<OwnedFd, Errno> {
        // The system call does not accept an empty path.
        let path = if path.is_empty() { b"." } else { path };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        loop {
            match fs::openat2(self.root, path, flags, Mode::empty(), self.resolve) {
                // A concurrent rename: try again (openat2(2)).
                Err(Errno::AGAIN) => {}
                outcome => return outcome,
            }
        }
    }

    /// Creates the directory `path`, a parent of `entry`.
    fn make(&mut self, path: &[u8], entry: &EntryPath) -> Result<OwnedFd, ArchiveError> {
        let failed = |errno| failed(entry, errno);
        // Ends of the prefixes to create, outermost first. The last one is the path itself.
        let ends = (path.iter().enumerate()).filter(|(_, b)| **b == b'/');
        let ends = ends.map(|(at, _)| at).chain([path.len()]);
        let mut above = self.open(b"").map_err(failed)?;
        let mut start = 0;
        for end in ends {
            let name = &path[start..end];
            start = end + 1;
            above = match self.open(&path[..end]) {
                Err(Errno::NOENT) => {
                    // Parents count as well: a long path would otherwise create many directories.
                    self.count_entry(entry)?;
                    match fs::mkdirat(&above, name, Mode::from_raw_mode(0o755)) {
                        Ok(()) => {
                            if let Some((uid, gid)) = self.owner {
                                own(&above, name, uid, gid).map_err(failed)?;
                            }
                        }
                        // Another process created the directory at the same time.
                        Err(Errno::EXIST) => {}
                        Err(e) => return Err(failed(e)),
                    }
                    self.open(&path[..end]).map_err(failed)?
                }
                opened => opened.map_err(failed)?,
            };
        }
        Ok(above)
    }
}

/// Returns the error for a parent directory that cannot be opened.
fn failed(path: &EntryPath, errno: Errno) -> ArchiveError {
    match errno {
        Errno::LOOP => ArchiveError::entry(path.bytes(), "goes through a symbolic link"),
        Errno::NOTDIR => {
            let problem = "has a parent that is not a directory";
            ArchiveError::entry(path.bytes(), problem)
        }
        errno => ArchiveError::file("open the directory of", path.bytes(), errno),
    }
}

/// Changes the owner. Does nothing if the process lacks the privilege.
pub fn own(parent: impl AsFd, name: &[u8], uid: u32, gid: u32) -> Result<(), Errno> {
    let (uid, gid) = (fs::Uid::from_raw(uid), fs::Gid::from_raw(gid));
    match fs::chownat(
        parent,
        name,
        Some(uid),
        Some(gid),
        fs::AtFlags::SYMLINK_NOFOLLOW,
    ) {
        Err(Errno::PERM) => Ok(()),
        outcome => outcome,
    }
}
