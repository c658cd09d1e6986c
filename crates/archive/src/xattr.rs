//! Extended attributes of what a descriptor stands for.

use rustix::fs;
use rustix::io::Errno;
use std::os::fd::BorrowedFd;

/// Name and value.
type Attribute = (Vec<u8>, Vec<u8>);

/// Attributes whose names `keep` wants. File systems without any have none.
pub(crate) fn of(fd: BorrowedFd<'_>, keep: fn(&[u8]) -> bool) -> Result<Vec<Attribute>, Errno> {
    // Most files have none, and the kernel says so without a buffer.
    let mut names = match fs::flistxattr(fd, &mut [0_u8; 0][..]) {
        Ok(0) | Err(Errno::NOTSUP) => return Ok(Vec::new()),
        Ok(length) => vec![0; length],
        Err(e) => return Err(e),
    };
    let length = match fs::flistxattr(fd, &mut names[..]) {
        Ok(length) => length,
        // They change at this moment: as if they had not been there.
        Err(Errno::RANGE) => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut found = Vec::new();
    for name in names[..length].split(|b| *b == 0) {
        if name.is_empty() || !keep(name) {
            continue;
        }
        if let Some(value) = value(fd, name)? {
            found.push((name.to_vec(), value));
        }
    }
    // In an order of their own, so that equal files make equal archives.
    found.sort();
    Ok(found)
}

/// One attribute, if it is there.
pub(crate) fn value(fd: BorrowedFd<'_>, name: &[u8]) -> Result<Option<Vec<u8>>, Errno> {
    let length = match fs::fgetxattr(fd, name, &mut [0_u8; 0][..]) {
        Ok(length) => length,
        Err(Errno::NODATA | Errno::NOTSUP) => return Ok(None),
        Err(e) => return Err(e),
    };
    let mut value = vec![0; length];
    match fs::fgetxattr(fd, name, &mut value[..]) {
        Ok(length) => {
            value.truncate(length);
            Ok(Some(value))
        }
        Err(Errno::NODATA | Errno::RANGE) => Ok(None),
        Err(e) => Err(e),
    }
}
