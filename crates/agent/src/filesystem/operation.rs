//! Changing directories on behalf of a user.

use super::entry;
use super::message::EntryInfo;
use crate::rpc::{RpcCode, RpcError};
use crate::sys;
use crate::users::{User, Users};
use std::io;
use std::path::Path;

/// Most entries of one listing; the answer must stay readable in one piece.
const MAX_ENTRIES: usize = 100_000;

/// Creates a directory and those above it; the new ones belong to the user.
pub fn make_dirs(path: &Path, user: &User) -> io::Result<()> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => return Err(io::Error::from_raw_os_error(libc::ENOTDIR)),
        Err(_) => {}
    }
    if let Some(parent) = path.parent() {
        make_dirs(parent, user)?;
    }
    match std::fs::create_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => return Ok(()),
        other => other?,
    }
    match sys::chown(path, user.uid, user.gid) {
        Err(e) if e.raw_os_error() != Some(libc::EPERM) => Err(e),
        _ => Ok(()),
    }
}

/// Removes whatever is there; nothing being there is fine.
pub fn remove(path: &Path) -> io::Result<()> {
    let result = match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => std::fs::remove_dir_all(path),
        Ok(_) => std::fs::remove_file(path),
        Err(e) => Err(e),
    };
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Lists a directory, down to `depth` levels.
pub fn list(path: &Path, depth: u32) -> Result<Vec<EntryInfo>, RpcError> {
    let what = format!("cannot list '{}'", path.display());
    let failed = |e: &io::Error| RpcError::io(&what, e);
    if !std::fs::metadata(path).map_err(|e| failed(&e))?.is_dir() {
        return Err(RpcError::new(
            RpcCode::InvalidArgument,
            format!("'{}' is not a directory", path.display()),
        ));
    }
    let users = Users::load();
    let mut entries = Vec::new();
    let mut waiting = vec![(path.to_path_buf(), depth.max(1))];
    while let Some((directory, depth)) = waiting.pop() {
        let reading = match std::fs::read_dir(&directory) {
            Ok(reading) => reading,
            // Subdirectories may vanish meanwhile.
            Err(_) if directory != path => continue,
            Err(e) => return Err(failed(&e)),
        };
        for found in reading.flatten() {
            let Ok(info) = entry::describe(&found.path(), &users) else {
                continue;
            };
            if entries.len() == MAX_ENTRIES {
                return Err(RpcError::new(
                    RpcCode::ResourceExhausted,
                    format!("{what}: more than {MAX_ENTRIES} entries"),
                ));
            }
            if depth > 1 && info.kind == "FILE_TYPE_DIRECTORY" && !info.is_symlink {
                waiting.push((found.path(), depth - 1));
            }
            entries.push(info);
        }
    }
    entries.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(entries)
}
