//! [`RecordKey`]: the name of a record, for example `fleet/shards/0`. It is a path in the object
//! store or in etcd.

use super::RecordError;
use std::fmt;
use std::str::FromStr;

/// Maximum length in bytes of a key.
const MAX_KEY_BYTES: usize = 200;

/// Key of a record: parts of `a-z`, `0-9`, `-`, `_` and `.`, separated by `/`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordKey(String);

impl RecordKey {
    /// Returns the key `self/part`.
    pub fn child(&self, part: &str) -> Result<Self, RecordError> {
        format!("{}/{part}", self.0).parse()
    }

    /// Returns the key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RecordKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for RecordKey {
    type Err = RecordError;

    fn from_str(text: &str) -> Result<Self, RecordError> {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_.".contains(c);
        let is_part = |part: &str| {
            // A part of dots only would name a directory of a store in a file system.
            !part.is_empty() && part.chars().all(allowed) && !part.chars().all(|c| c == '.')
        };
        if text.len() <= MAX_KEY_BYTES && text.split('/').all(is_part) {
            Ok(Self(text.to_owned()))
        } else {
            let text = text.chars().take(MAX_KEY_BYTES).collect();
            Err(RecordError::Key(text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_with_other_characters_or_empty_parts_are_rejected() {
        let long = "a".repeat(MAX_KEY_BYTES + 1);
        for text in [
            "", "/", "a/", "/a", "a//b", "a/../b", "A", "a b", "a\0", "ä", &long,
        ] {
            assert!(text.parse::<RecordKey>().is_err(), "{text:?}");
        }
        let key: RecordKey = "fleet/shards/0".parse().unwrap();
        assert_eq!(
            key.child("x-1_2.json").unwrap().as_str(),
            "fleet/shards/0/x-1_2.json"
        );
        assert!(key.child("../root").is_err());
    }
}
