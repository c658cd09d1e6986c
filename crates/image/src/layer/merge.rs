//! Merges an upper unpacked layer into the lower layer below it. The result has the same meaning as
//! both layers on top of each other.
//!
//! Whiteouts of the upper layer delete files of the lower layer. They are also retained, since they
//! hide files of the layers below both. A *whiteout* is a character device 0/0, which marks a file
//! as deleted.
//!
//! Both directories were filled by [`super::unpack`] and no other process can change them. Their
//! symbolic links are not trusted and never followed.

use super::confined_dir::ConfinedDir;
use super::unpack::OVERLAY_OPAQUE;
use super::{LayerError, shown};
use rustix::fs::{
    self, AtFlags, CWD, Dir, FileType, Mode, OFlags, Timespec, Timestamps, XattrFlags,
};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

/// Maximum size of an extended attribute (`XATTR_SIZE_MAX`) and of the list of names
/// (`XATTR_LIST_MAX`) in bytes. With buffers of this size, reads never fail with ERANGE.
const MAX_ATTRIBUTE_BYTES: usize = 64 << 10;

/// Moves all files of `upper` into `lower`. `upper` is empty afterwards. After an error both are
/// incomplete.
pub(crate) fn merge(upper: &Path, lower: &Path) -> Result<(), LayerError> {
    let open = |path: &Path| {
        let bytes = path.as_os_str().as_encoded_bytes();
        fs::openat(CWD, path, DIRECTORY, Mode::empty())
            .map_err(|errno| LayerError::write("open", bytes, errno))
    };
    merge_directory(&open(upper)?, &open(lower)?, &mut Vec::new())
}

/// Flags that open a directory, but not through a symbolic link.
const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Merges the directory `from` into the directory `onto`. Both have the path `path`.
fn merge_directory(from: &OwnedFd, onto: &OwnedFd, path: &mut Vec<u8>) -> Result<(), LayerError> {
    let length = path.len();
    // The names were read completely before the first rename, which would disturb `readdir`.
    for name in names(from).map_err(|errno| LayerError::write("list", path, errno))? {
        if length > 0 {
            path.push(b'/');
        }
        path.extend_from_slice(&name);
        merge_entry(from, onto, &name, path)?;
        path.truncate(length);
    }
    // The times are set last, since renames into the directory modify them.
    copy_attributes(from, onto)
        .map_err(|errno| LayerError::write("set the attributes of", path, errno))
}

/// Moves the entry `name` of `from` into `onto`, where it replaces an entry of the same name.
fn merge_entry(
    from: &OwnedFd,
    onto: &OwnedFd,
    name: &[u8],
    path: &mut Vec<u8>,
) -> Result<(), LayerError> {
    let failed = |path: &[u8], errno| LayerError::write("merge", path, errno);
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
                return merge_directory(&above, &below, path);
            }
            // An opaque directory hides the lower directory completely, so nothing is merged.
            remove_tree(onto, name, path)?;
        }
        // `renameat` cannot replace a directory with another type of file.
        Some(FileType::Directory) => remove_tree(onto, name, path)?,
        Some(_) if is_directory => {
            // The removed file hid all layers below both layers, so the directory becomes opaque.
            // The modification time is part of the image. A file system may change the time
            // together with the mark, so the time is set again.
            let mark = |parent: &OwnedFd| {
                let fd = fs::openat(parent, name, DIRECTORY, Mode::empty())?;
                let found = fs::fstat(&fd)?;
                fs::fsetxattr(&fd, OVERLAY_OPAQUE, b"y", XattrFlags::empty())?;
                fs::futimens(&fd, &times(&found))
            };
            mark(from).map_err(|e| failed(path, e))?;
            fs::unlinkat(onto, name, AtFlags::empty()).map_err(|e| failed(path, e))?;
        }
        // `renameat` below replaces a file, and whiteouts of the lower layer, atomically.
        _ => {}
    }
    fs::renameat(from, name, onto, name).map_err(|e| failed(path, e))
}

/// Returns the names in a directory.
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

/// Returns whether a directory has overlayfs's opaque mark.
fn is_opaque(directory: &OwnedFd) -> Result<bool, Errno> {
    match fs::fgetxattr(directory, OVERLAY_OPAQUE, &mut [0_u8; 8][..]) {
        Ok(_) => Ok(true),
        // NOTSUP: the file system stores no extended attributes, so no mark can exist.
        Err(Errno::NODATA | Errno::NOTSUP) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Removes the directory `name` of `parent` with its content.
fn remove_tree(parent: &OwnedFd, name: &[u8], path: &[u8]) -> Result<(), LayerError> {
    use std::os::unix::ffi::OsStrExt;
    let name = std::ffi::OsStr::from_bytes(name);
    // `remove_dir_all` takes a path. The path through the descriptor cannot be redirected by a
    // symbolic link in the layer.
    let place = Path::new("/proc/self/fd")
        .join(parent.as_raw_fd().to_string())
        .join(name);
    std::fs::remove_dir_all(place).map_err(|source| LayerError::Write {
        action: "remove",
        entry: shown(path),
        source,
    })
}

/// Copies owner, mode, times, and the attributes that a layer may set, from `from` to `onto`. The
/// opaque mark is not copied.
fn copy_attributes(from: &OwnedFd, onto: &OwnedFd) -> Result<(), Errno> {
    // Attributes of the lower directory do not show through an overlay.
    for name in attributes(onto)? {
        fs::fremovexattr(onto, name.as_slice())?;
    }
    let found = fs::fstat(from)?;
    let owner = fs::Uid::from_raw(found.st_uid);
    let group = fs::Gid::from_raw(found.st_gid);
    // The owner is set first, since that clears mode bits.
    fs::fchown(onto, Some(owner), Some(group))?;
    fs::fchmod(onto, Mode::from_raw_mode(found.st_mode))?;
    let mut value = vec![0; MAX_ATTRIBUTE_BYTES];
    for name in attributes(from)? {
        let length = fs::fgetxattr(from, name.as_slice(), &mut value[..])?;
        fs::fsetxattr(onto, name.as_slice(), &value[..length], XattrFlags::empty())?;
    }
    fs::futimens(onto, &times(&found))
}

/// Returns the names of the attributes that a layer may set. The opaque mark is not one of them.
fn attributes(directory: &OwnedFd) -> Result<Vec<Vec<u8>>, Errno> {
    let mut list = vec![0; MAX_ATTRIBUTE_BYTES];
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
/// Returns the modification time for both times of a file, since images store no access time.
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
