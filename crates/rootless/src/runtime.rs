//! Private directory for the Unix sockets of an unprivileged user.

use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};
use std::fs::{self, DirBuilder};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Length in bytes from which the path of a data directory is too long for sockets in `<home>/run`.
/// `sun_path` has 108 bytes (unix(7)), and the rest of them is for `/run` and the names of sockets.
const MAX_SOCKET_DIR_BYTES: usize = 80;

/// Returns the directory for sockets of user `uid` and the data directory `home`. This is
/// `<home>/run`, which outlives the login session of the user, like a daemon. If the path of `home`
/// is too long for sockets, this is a new or existing directory in `$XDG_RUNTIME_DIR` or
/// `/run/user/<uid>`. If no such directory is private to the user, this is also `<home>/run`.
pub fn directory(home: &Path, uid: u32) -> PathBuf {
    if home.as_os_str().len() < MAX_SOCKET_DIR_BYTES {
        return home.join("run");
    }
    let configured = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let default = PathBuf::from(format!("/run/user/{uid}"));
    let mut directories = configured.into_iter().chain([default]);
    let Some(parent) = directories.find(|directory| is_private(directory, uid)) else {
        return home.join("run");
    };
    let home = fs::canonicalize(home).unwrap_or_else(|_| home.to_owned());
    // The tag distinguishes data directories of the same user.
    let digest = Sha256::digest(home.as_os_str().as_bytes());
    let tag = HEXLOWER.encode(&digest[..6]);
    let directory = parent.join("jiffy").join(tag);
    let result = DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&directory);
    // Check the owner and mode after the creation: another user may have created the directory
    // before.
    if result.is_ok() && is_private(&directory, uid) {
        directory
    } else {
        home.join("run")
    }
}

fn is_private(directory: &Path, uid: u32) -> bool {
    let is_private =
        |data: fs::Metadata| data.is_dir() && data.uid() == uid && data.mode() & 0o077 == 0;
    directory.is_absolute() && fs::symlink_metadata(directory).is_ok_and(is_private)
}
