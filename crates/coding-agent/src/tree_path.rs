//! [`TreePath`]: a checked relative path in the project directory. Paths from the sandbox are
//! untrusted.

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, percent_encode};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Maximum length of a path in bytes, as in the kernel.
const MAX_PATH: usize = 4095;
/// Maximum length of a name in bytes, as in the kernel.
const MAX_NAME: usize = 255;
/// Maximum number of components.
const MAX_DEPTH: usize = 200;
/// Bytes that are escaped in texts. All bytes above ASCII are escaped as well.
const ESCAPED: AsciiSet = CONTROLS.add(b'%');

/// Normalised path relative to the project directory: at least one component, none of them empty,
/// `.` or `..`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TreePath(Vec<u8>);

impl TreePath {
    /// Checks a path. Returns `None` if it is not normalised or exceeds a limit.
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let mut depth = 0;
        let is_name = |name: &[u8]| {
            depth += 1;
            !name.is_empty() && name.len() <= MAX_NAME && name != b"." && name != b".."
        };
        let is_valid = bytes.len() <= MAX_PATH
            && !bytes.contains(&0)
            && bytes.split(|b| *b == b'/').all(is_name)
            && depth <= MAX_DEPTH;
        is_valid.then(|| Self(bytes.to_vec()))
    }

    /// Returns the bytes of the path.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the path for the file system.
    pub fn path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.0))
    }

    /// Returns the last component.
    pub fn name(&self) -> &[u8] {
        self.components().next_back().unwrap_or(&self.0)
    }

    /// Returns the parent. `None` if the parent is the project directory.
    pub fn parent(&self) -> Option<Self> {
        let slash = self.0.iter().rposition(|b| *b == b'/')?;
        Some(Self(self.0[..slash].to_vec()))
    }

    /// Returns the entry `name` of the directory `parent`. `None` for an invalid path.
    pub fn join(parent: Option<&Self>, name: &[u8]) -> Option<Self> {
        match parent {
            Some(parent) => Self::new(&[parent.bytes(), b"/", name].concat()),
            None => Self::new(name),
        }
    }

    /// Returns the components.
    pub fn components(&self) -> impl DoubleEndedIterator<Item = &[u8]> {
        self.0.split(|b| *b == b'/')
    }

    /// Returns the ancestors below the project directory, the outermost first.
    pub fn ancestors(&self) -> impl Iterator<Item = Self> + '_ {
        let slashes = self.0.iter().enumerate().filter(|(_, b)| **b == b'/');
        slashes.map(|(at, _)| Self(self.0[..at].to_vec()))
    }

    /// Returns the number of components.
    pub fn depth(&self) -> usize {
        self.components().count()
    }

    /// Returns whether the path is below `directory`.
    pub fn is_below(&self, directory: &Self) -> bool {
        self.0.starts_with(&directory.0) && self.0.get(directory.0.len()) == Some(&b'/')
    }
}

/// Encodes bytes as a text without loss. UTF-8 without `%` and control characters is not changed.
pub fn encode(bytes: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.chars().any(|c| c == '%' || c.is_control()) => Cow::Borrowed(text),
        _ => percent_encode(bytes, &ESCAPED).into(),
    }
}

/// Decodes a text of [`encode`].
pub fn decode(text: &str) -> Vec<u8> {
    percent_decode_str(text).collect()
}

impl fmt::Display for TreePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&encode(&self.0))
    }
}

impl fmt::Debug for TreePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{self}`")
    }
}

impl Serialize for TreePath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for TreePath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::new(&decode(&text)).ok_or_else(|| serde::de::Error::custom("invalid path"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_leave_the_directory_are_rejected() {
        let long = [b'x'; 256];
        let deep = [&b"x"[..]; 201].join(&b'/');
        for path in [
            &b""[..],
            b".",
            b"..",
            b"/",
            b"/a",
            b"a/",
            b"a//b",
            b"a/../b",
            b"a/..",
            b"a\0b",
            &long,
            &deep,
        ] {
            assert!(TreePath::new(path).is_none(), "{path:?}");
        }
        assert!(TreePath::new(b"a/...").is_some());
    }

    #[test]
    fn every_name_survives_serialization() {
        for name in [
            &b"plain"[..],
            "\u{e4}/b".as_bytes(),
            b"100%",
            b"a\nb",
            b"\xff\xfe",
            b"%41",
        ] {
            let path = TreePath::new(name).unwrap();
            let text = serde_json::to_string(&path).unwrap();
            assert_eq!(
                serde_json::from_str::<TreePath>(&text).unwrap(),
                path,
                "{text}"
            );
        }
        assert_eq!(TreePath::new(b"a\nb").unwrap().to_string(), "a%0Ab");
    }

    #[test]
    fn ancestors_and_parents_exclude_the_project_directory() {
        let path = TreePath::new(b"a/b/c").unwrap();
        let names: Vec<_> = path.ancestors().map(|p| p.to_string()).collect();
        assert_eq!(names, ["a", "a/b"]);
        assert_eq!(path.parent().unwrap().to_string(), "a/b");
        assert_eq!(TreePath::new(b"a").unwrap().parent(), None);
        assert!(path.is_below(&TreePath::new(b"a").unwrap()));
        assert!(
            !TreePath::new(b"ab")
                .unwrap()
                .is_below(&TreePath::new(b"a").unwrap())
        );
        assert_eq!(path.name(), b"c");
    }
}
