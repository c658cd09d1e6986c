//! Merging of an upper unpacked layer into a lower layer. The result has the same meaning as both
//! layers on top of each other. Whiteouts of the upper layer delete files of the lower layer, and
//! are retained for the layers below both.
//!
//! Both directories were filled by [`super::unpack`] and are private. Their symbolic links are not
//! trusted and never followed.

use super::confined_dir::ConfinedDir;
use super::unpack::OVERLAY_OPAQUE;
use super::{LayerError, shown};
use rustix::fs::{
    self, AtFlags, CWD, Dir, FileType, Mode, OFlags, Timespec, Timestamps, XattrFlags,
};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

/// Moves all files of `upper` into `lower`. `upper` is empty afterwards. After an error both are
/// incomplete.
pub(crate) fn merge(upper: &Path, lower: &Path) -> Result<(), LayerError> {
    let open = |path: &Path| {
        let bytes = path.as_os_str().as_encoded_bytes();
        fs::openat(CWD, path, DIRECTORY, Mode::empty())
            .map_err(|errno| LayerError::write("open", bytes, errno))
    };
    directory(&open(upper)?, &open(lower)?, &mut Vec::new())
}

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Merges the directory `from` into the directory `onto`. Both have the path `path`.
fn directory(from: &OwnedFd, onto: &OwnedFd, path: &mut Vec<u8>) -> Result<(), LayerError> {
    let length = path.len();
    for name in names(from).map_err(|errno| LayerError::write("list", path, errno))? {
        if length > 0 {
            path.push(b'/');
        }
        path.extend_from_slice(&name);
        one(from, onto, &name, path)?;
        path.truncate(length);
    }
    // The times are set last, since changes in the directory modify them.
    like(from, onto).map_err(|errno| LayerError::write("own", path, errno))
}

fn one(from: &OwnedFd, onto: &OwnedFd, name: &[u8], path: &mut Vec<u8>) -> Result<(), LayerError> {
    let failed = |path: &[u8], errno| LayerError::write("put together", path, errno);
    let kind = |parent: &OwnedFd| ConfinedDir::kind(parent.as_fd(), name);
    let upper = kind(from).map_err(|e| failed(path, e))?;
    let lower = kind(onto).map_err(|e| failed(path, e))?;
    let is_directory = upper == Some(FileType::Directory);
    match lower {
        Some(FileType::Directory) if is_directory => {
            let open = |parent: &OwnedFd| fs::openat(parent, name, DIRECTORY, Mode::empty());
            let above = open(from).map_err(|e| failed(path, e))?;
            if !is_opaque(&above).map_err(|e| failed(path, e))? {
                let below = open(onto).map_err(|e| failed(path, e))?;
                return directory(&above, &below, path);
            }
            remove_tree(onto, name, path)?;
        }
        Some(FileType::Directory) => remove_tree(onto, name, path)?,
        Some(_) if is_directory => {
            // The removed file hid all layers below both, so the directory becomes opaque.
            let mark = |parent: &OwnedFd| {
                let fd = fs::openat(parent, name, DIRECTORY, Mode::empty())?;
                let found = fs::fstat(&fd)?;
                fs::fsetxattr(&fd, OVERLAY_OPAQUE, b"y", XattrFlags::empty())?;
                fs::futimens(&fd, &times(&found))
            };
            mark(from).map_err(|e| failed(path, e))?;
            fs::unlinkat(onto, name, AtFlags::empty()).map_err(|e| failed(path, e))?;
        }
        // The rename below replaces the file.
        _ => {}
    }
    fs::renameat(from, name, onto, name).map_err(|e| failed(path, e))
}

fn names(directory: &OwnedFd) -> Result<Vec<Vec<u8>>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(name.to_vec());
        }
    }
    Ok(names)
}

fn is_opaque(directory: &OwnedFd) -> Result<bool, Errno> {
    match fs::fgetxattr(directory, OVERLAY_OPAQUE, &mut [0_u8; 8][..]) {
        Ok(_) => Ok(true),
        Err(Errno::NODATA | Errno::NOTSUP) => Ok(false),
        Err(e) => Err(e),
    }
}

fn remove_tree(parent: &OwnedFd, name: &[u8], path: &[u8]) -> Result<(), LayerError> {
    use std::os::unix::ffi::OsStrExt;
    let name = std::ffi::OsStr::from_bytes(name);
    let place = Path::new("/proc/self/fd")
        .join(parent.as_raw_fd().to_string())
        .join(name);
    std::fs::remove_dir_all(place).map_err(|source| LayerError::Write {
        action: "remove",
        entry: shown(path),
        source,
    })
}

/// Copies owner, mode, attributes and times from `from`, except the opaque mark.
fn like(from: &OwnedFd, onto: &OwnedFd) -> Result<(), Errno> {
    for name in attributes(onto)? {
        fs::fremovexattr(onto, name.as_slice())?;
    }
    let found = fs::fstat(from)?;
    let owner = fs::Uid::from_raw(found.st_uid);
    let group = fs::Gid::from_raw(found.st_gid);
    fs::fchown(onto, Some(owner), Some(group))?;
    fs::fchmod(onto, Mode::from_raw_mode(found.st_mode))?;
    let mut value = vec![0; 64 << 10];
    for name in attributes(from)? {
        let length = fs::fgetxattr(from, name.as_slice(), &mut value[..])?;
        fs::fsetxattr(onto, name.as_slice(), &value[..length], XattrFlags::empty())?;
    }
    fs::futimens(onto, &times(&found))
}

/// Returns the names of the attributes except the opaque mark.
fn attributes(directory: &OwnedFd) -> Result<Vec<Vec<u8>>, Errno> {
    let mut list = vec![0; 64 << 10];
    let length = match fs::flistxattr(directory, &mut list[..]) {
        Err(Errno::NOTSUP) => 0,
        length => length?,
    };
    let names = list[..length]
        .split(|b| *b == 0)
        .filter(|n| super::unpack::is_allowed_attribute(n));
    Ok(names.map(<[u8]>::to_vec).collect())
}

// The integer type of nanoseconds depends on the backend of rustix.
#[allow(clippy::useless_conversion)]
fn times(found: &fs::Stat) -> Timestamps {
    let time = Timespec {
        tv_sec: found.st_mtime,
        tv_nsec: i64::try_from(found.st_mtime_nsec).unwrap_or(0),
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}
