//! Extended attributes of an open file.

use rustix::fs;
use rustix::io::Errno;
use std::os::fd::BorrowedFd;

/// Maximum size in bytes of a value, and of all names of a file (`XATTR_SIZE_MAX`,
/// `XATTR_LIST_MAX`).
const MAX_VALUE_BYTES: usize = 64 << 10;
/// Size in bytes of the first buffer, which is sufficient for almost all attributes.
const SMALL_BUFFER_BYTES: usize = 512;

/// Name and value.
type Attribute = (Vec<u8>, Vec<u8>);

/// Returns the attributes whose names `include` accepts, sorted. Empty on file systems without
/// attributes.
pub(crate) fn of(fd: BorrowedFd<'_>, include: fn(&[u8]) -> bool) -> Result<Vec<Attribute>, Errno> {
    let Some(names) = filled(|buffer| fs::flistxattr(fd, buffer))? else {
        return Ok(Vec::new());
    };
    let mut attributes = Vec::new();
    for name in names.split(|b| *b == 0) {
        if name.is_empty() || !include(name) {
            continue;
        }
        // The attribute may have been removed concurrently.
        if let Some(value) = value(fd, name)? {
            attributes.push((name.to_vec(), value));
        }
    }
    // Sort the attributes, so that equal files result in equal archives.
    attributes.sort();
    Ok(attributes)
}

/// Returns the value of an attribute, if it exists.
pub(crate) fn value(fd: BorrowedFd<'_>, name: &[u8]) -> Result<Option<Vec<u8>>, Errno> {
    filled(|buffer| fs::fgetxattr(fd, name, buffer))
}

/// Returns the output of `read` with a sufficiently large buffer. `None` if the attribute does not
/// exist or the file system has no attributes.
fn filled(read: impl Fn(&mut [u8]) -> Result<usize, Errno>) -> Result<Option<Vec<u8>>, Errno> {
    let mut small = [0; SMALL_BUFFER_BYTES];
    match read(&mut small) {
        Ok(length) => return Ok(Some(small[..length].to_vec())),
        Err(Errno::NODATA | Errno::NOTSUP) => return Ok(None),
        Err(Errno::RANGE) => {}
        Err(e) => return Err(e),
    }
    let mut large = vec![0; MAX_VALUE_BYTES];
    match read(&mut large) {
        Ok(length) => {
            large.truncate(length);
            Ok(Some(large))
        }
        Err(Errno::NODATA) => Ok(None),
        Err(e) => Err(e),
    }
}
