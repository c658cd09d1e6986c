//! Paths in requests. JSON contains only text, but the name of a file may contain any bytes, so a
//! path that is not UTF-8 has a separate field.

use crate::rpc::{RpcCode, RpcError};
use crate::users::User;
use crate::workers::Progress;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// Path of a request, as text or as bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestPath {
    /// Text. U+FFFD may stand for bytes that are not UTF-8.
    Text(String),
    /// The exact bytes.
    Bytes(Vec<u8>),
}

impl RequestPath {
    /// Creates a path from the bytes if they are given, otherwise from the text.
    pub fn new(text: String, bytes: Option<Vec<u8>>) -> Self {
        match bytes.filter(|bytes| !bytes.is_empty()) {
            Some(bytes) => Self::from_bytes(bytes),
            None => Self::Text(text),
        }
    }

    /// Creates a path from bytes, which may be invalid UTF-8.
    pub fn from_bytes(bytes: Vec<u8>) -> Self {
        match String::from_utf8(bytes) {
            Ok(text) => Self::Text(text),
            Err(e) => Self::Bytes(e.into_bytes()),
        }
    }

    /// Returns the path as text for messages.
    pub fn display(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Bytes(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        }
    }

    /// Returns the absolute path: see [`User::resolve`].
    pub fn resolve(&self, user: &User) -> PathBuf {
        match self {
            Self::Text(text) => user.resolve(text, None),
            Self::Bytes(bytes) => Path::new(&user.home).join(OsStr::from_bytes(bytes)),
        }
    }

    /// Returns the absolute path of an existing file, and records it in `progress`. If no file has
    /// exactly this name and the text contains U+FFFD, the path refers to the only file that is
    /// displayed with this text.
    ///
    /// # Errors
    /// The file system does not answer, or several files are displayed with this text.
    pub fn resolve_existing(&self, user: &User, progress: &Progress) -> Result<PathBuf, RpcError> {
        let path = self.resolve(user);
        progress.enter(&path)?;
        match self {
            Self::Text(text) if text.contains(char::REPLACEMENT_CHARACTER) => exact(&path),
            _ => Ok(path),
        }
    }
}

/// Replaces each component that contains U+FFFD and does not exist by the only entry that is
/// displayed with this text.
fn exact(path: &Path) -> Result<PathBuf, RpcError> {
    let mut found = PathBuf::new();
    for component in path.components() {
        let Component::Normal(name) = component else {
            found.push(component);
            continue;
        };
        let shown = name.to_str().unwrap_or_default();
        let is_lossy = shown.contains(char::REPLACEMENT_CHARACTER);
        // A file whose name really contains U+FFFD takes precedence.
        if is_lossy && std::fs::symlink_metadata(found.join(name)).is_err() {
            match only_entry(&found, shown)? {
                Some(entry) => found.push(entry),
                None => found.push(name),
            }
        } else {
            found.push(name);
        }
    }
    Ok(found)
}

/// Returns the only entry whose name is shown as `shown`. Names that are not UTF-8 may look equal.
fn only_entry(directory: &Path, shown: &str) -> Result<Option<OsString>, RpcError> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names = entries.map(|entry| entry.file_name());
    let has_text = |name: &OsString| name.to_string_lossy() == shown;
    let first = names.find(has_text);
    if first.is_some() && names.any(|name| has_text(&name)) {
        return Err(RpcError::new(
            RpcCode::InvalidArgument,
            format!(
                "several files in '{}' are shown as '{shown}' because their names are not UTF-8; \
                 select one by `pathBytes`",
                directory.display()
            ),
        ));
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_as_it_is_shown_selects_the_only_file_like_it() {
        let dir = tempfile::tempdir().unwrap();
        let name = |bytes: &'static [u8]| dir.path().join(OsStr::from_bytes(bytes));
        std::fs::create_dir(name(b"d\xff")).unwrap();
        std::fs::write(name(b"d\xff/f\xfe"), "").unwrap();
        let found = exact(&dir.path().join("d\u{fffd}/f\u{fffd}")).unwrap();
        assert_eq!(found, name(b"d\xff/f\xfe"));
        std::fs::write(name(b"d\xff/f\xfd"), "").unwrap();
        assert!(exact(&dir.path().join("d\u{fffd}/f\u{fffd}")).is_err());
        // A file with exactly this name takes precedence. A missing file remains an error.
        let literal = dir.path().join("d\u{fffd}");
        std::fs::write(&literal, "").unwrap();
        assert_eq!(exact(&literal).unwrap(), literal);
        let missing = dir.path().join("x\u{fffd}");
        assert_eq!(exact(&missing).unwrap(), missing);
    }
}
