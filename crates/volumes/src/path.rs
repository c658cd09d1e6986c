//! Paths in a volume, as clients send them.

use crate::FileError;
use jiffy_volume_server::MAX_NAME;

/// Maximum length of a path in bytes.
const MAX_PATH: usize = 4096;
/// Maximum number of characters of an invalid path in an error.
const MAX_SHOWN_CHARS: usize = 256;

/// Path in a volume. Links are not followed, and `..` is rejected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumePath(Vec<String>);

impl VolumePath {
    /// Parses a path, relative to the root of the volume.
    pub fn parse(text: &str) -> Result<Self, FileError> {
        let invalid = || {
            let shown: String = text.chars().take(MAX_SHOWN_CHARS).collect();
            FileError::Path(shown.escape_debug().to_string())
        };
        if text.len() > MAX_PATH || text.contains('\0') {
            return Err(invalid());
        }
        let parts = text.split('/').filter(|part| !matches!(*part, "" | "."));
        let parts: Vec<String> = parts.map(str::to_owned).collect();
        if parts
            .iter()
            .any(|part| part == ".." || part.len() > MAX_NAME)
        {
            return Err(invalid());
        }
        Ok(Self(parts))
    }

    /// Returns the components.
    pub fn parts(&self) -> &[String] {
        &self.0
    }

    /// Returns the components of the directory, and the name in it. `None` for the root.
    pub(crate) fn split(&self) -> Option<(&[String], &str)> {
        let (name, directory) = self.0.split_last()?;
        Some((directory, name))
    }

    /// Returns the absolute path.
    pub fn absolute(&self) -> String {
        absolute(&self.0)
    }
}

/// Returns the absolute path with these components.
pub(crate) fn absolute(parts: &[String]) -> String {
    format!("/{}", parts.join("/"))
}
