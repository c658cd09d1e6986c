//! Descriptions of files and directories (name, type, size, owner) for responses and events.

use super::message::EntryInfo;
use super::metadata;
use crate::calendar::format_time;
use crate::users::Users;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::fs::{FileType, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Describes the file at `path`.
pub fn describe(path: &Path, users: &Users) -> io::Result<EntryInfo> {
    let own = std::fs::symlink_metadata(path)?;
    let is_symlink = own.file_type().is_symlink();
    let target = if is_symlink {
        // The target of a link may not exist.
        std::fs::metadata(path).ok()
    } else {
        None
    };
    Ok(EntryInfo {
        name: path
            .file_name()
            .map_or_else(|| "/".to_owned(), |n| n.to_string_lossy().into_owned()),
        kind: kind(target.as_ref().unwrap_or(&own).file_type()),
        path: path.to_string_lossy().into_owned(),
        path_bytes: base64_unless_text(path),
        size: own.len().to_string(),
        mode: own.mode() & 0o7777,
        permissions: permissions(&own),
        owner: users.user_name(own.uid()),
        group: users.group_name(own.gid()),
        modified_time: format_time(own.mtime(), own.mtime_nsec()),
        symlink_target: is_symlink.then(|| {
            // The target of a broken link cannot be resolved, so its text is returned.
            std::fs::canonicalize(path)
                .or_else(|_| std::fs::read_link(path))
                .map(|t| t.to_string_lossy().into_owned())
                .unwrap_or_default()
        }),
        // Symbolic links cannot have `user.*` attributes, and `metadata::read` would return the
        // attributes of the target.
        metadata: if is_symlink {
            Default::default()
        } else {
            metadata::read(path)
        },
        is_symlink,
    })
}

/// Returns the bytes of a path in base64 if the path is not valid UTF-8.
pub fn base64_unless_text(path: &Path) -> Option<String> {
    match path.to_str() {
        Some(_) => None,
        None => Some(STANDARD.encode(path.as_os_str().as_bytes())),
    }
}

/// Returns the name of a file type in the protocol.
fn kind(found: FileType) -> &'static str {
    if found.is_file() {
        "FILE_TYPE_FILE"
    } else if found.is_dir() {
        "FILE_TYPE_DIRECTORY"
    } else if found.is_symlink() {
        "FILE_TYPE_SYMLINK"
    } else {
        "FILE_TYPE_UNSPECIFIED"
    }
}

/// Returns type and permissions as `ls -l` prints them, for example `drwxr-xr-x`.
fn permissions(found: &Metadata) -> String {
    let kind = found.file_type();
    let first = if kind.is_dir() {
        'd'
    } else if kind.is_symlink() {
        'l'
    } else if kind.is_fifo() {
        'p'
    } else if kind.is_socket() {
        's'
    } else if kind.is_char_device() {
        'c'
    } else if kind.is_block_device() {
        'b'
    } else {
        '-'
    };
    let mode = found.mode();
    let mut text = String::from(first);
    for (shift, special, letter) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (mode & special != 0, bits & 1 != 0) {
            // As in `ls`: a capital letter means that the file is not executable.
            (true, true) => letter,
            (true, false) => letter.to_ascii_uppercase(),
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    text
}
