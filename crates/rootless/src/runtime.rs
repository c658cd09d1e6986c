//! Directory of sockets of one user, closed to others.

use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};
use std::fs::{self, DirBuilder};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Longest path of a directory whose sockets can have one (`sun_path`, unix(7)).
const MAX_SOCKET_DIR_BYTES: usize = 80;

/// Directory of sockets of user `uid` and the data directory `home`: `<home>/run`, which, like a
/// daemon, outlives the user's login session. If its path is too long for sockets, one in
/// `$XDG_RUNTIME_DIR` or `/run/user/<uid>`, unless others could write to it.
pub fn directory(home: &Path, uid: u32) -> PathBuf {
    if home.as_os_str().len() < MAX_SOCKET_DIR_BYTES {
        return home.join("run");
    }
    let named = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let usual = PathBuf::from(format!("/run/user/{uid}"));
    let mut places = named.into_iter().chain([usual]);
    let Some(place) = places.find(|place| is_private(place, uid)) else {
        return home.join("run");
    };
    let home = fs::canonicalize(home).unwrap_or_else(|_| home.to_owned());
    let digest = Sha256::digest(home.as_os_str().as_bytes());
    let tag = HEXLOWER.encode(&digest[..6]);
    let directory = place.join("jiffy").join(tag);
    let made = DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&directory);
    match made.is_ok() && is_private(&directory, uid) {
        true => directory,
        false => home.join("run"),
    }
}

fn is_private(place: &Path, uid: u32) -> bool {
    let private =
        |data: fs::Metadata| data.is_dir() && data.uid() == uid && data.mode() & 0o077 == 0;
    place.is_absolute() && fs::symlink_metadata(place).is_ok_and(private)
}
