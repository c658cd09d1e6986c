//! Mounting, with errors that name the call and the path.

use crate::sys;
use std::ffi::CStr;
use std::io;
use std::os::unix::fs::DirBuilderExt;

/// Common flags of file systems that hold no programs or devices.
pub const NO_PROGRAMS_OR_DEVICES: libc::c_ulong =
    libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;

/// Mounts a file system.
pub fn mount(
    source: &CStr,
    target: &CStr,
    kind: &CStr,
    flags: libc::c_ulong,
    options: &CStr,
) -> Result<(), String> {
    raw(source, target, kind, flags, options).map_err(|e| {
        format!(
            "cannot mount {} ({}) on {}: {e}",
            source.to_string_lossy(),
            kind.to_string_lossy(),
            target.to_string_lossy()
        )
    })
}

/// [`mount`] with the bare error.
pub fn raw(
    source: &CStr,
    target: &CStr,
    kind: &CStr,
    flags: libc::c_ulong,
    options: &CStr,
) -> io::Result<()> {
    // SAFETY: all pointers are valid C strings.
    sys::check(unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            flags,
            options.as_ptr().cast(),
        )
    })
    .map(drop)
}

/// Creates a directory unless it is there.
pub fn directory(path: &str, mode: u32) {
    // If it cannot be made the mount on it fails, and says so.
    let _ = std::fs::DirBuilder::new().mode(mode).create(path);
}
