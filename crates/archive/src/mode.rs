//! Permissions of entries.

use rustix::fs::{self, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::path::Arg;
use std::os::fd::{AsFd, AsRawFd};

/// Sets the permissions of entry `name` of a directory. Does not follow symbolic links, even if
/// another process concurrently replaces the entry by one: a link fails with `ELOOP`.
///
/// The system call with the necessary flag exists only since Linux 6.6. Therefore the entry is
/// opened and changed through its name in `/proc`.
pub fn set_mode(directory: impl AsFd, name: impl Arg, mode: Mode) -> Result<(), Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let entry = fs::openat(directory, name, flags, Mode::empty())?;
    if FileType::from_raw_mode(fs::fstat(&entry)?.st_mode) == FileType::Symlink {
        return Err(Errno::LOOP);
    }
    fs::chmod(format!("/proc/self/fd/{}", entry.as_raw_fd()), mode)
}
