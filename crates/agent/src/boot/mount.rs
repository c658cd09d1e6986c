//! Mounts file systems at boot. Errors name the call and the path.

use crate::sys;
use std::ffi::CStr;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};

/// Flags for file systems that contain no programs and no devices.
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

/// Mounts a file system as [`mount`] does, but returns the plain error.
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

/// Creates a directory with this mode unless it exists.
pub fn directory(path: &str, mode: u32) {
    // Ignore the error: if the directory cannot be created, the mount on it reports an error.
    if std::fs::DirBuilder::new().mode(mode).create(path).is_ok() {
        // The umask may have removed bits of the mode.
        let _ = std::fs::set_permissions(path, Permissions::from_mode(mode));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_new_directory_has_the_requested_mode_and_an_existing_one_keeps_its_mode() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("lock");
        let mode = || std::fs::metadata(&path).unwrap().mode() & 0o7777;
        directory(path.to_str().unwrap(), 0o1777);
        assert_eq!(mode(), 0o1777);
        directory(path.to_str().unwrap(), 0o755);
        assert_eq!(mode(), 0o1777);
    }
}
