//! [`Secret`]: name and times of a secret, without its value, and the limits of its parts.

use crate::SecretError;
use std::collections::BTreeMap;
use zeroize::Zeroizing;

/// Maximum number of secrets of one owner.
pub const MAX_SECRETS: usize = 256;
/// Maximum length of a name in bytes.
pub const MAX_SECRET_NAME: usize = 128;
/// Maximum length of a value in bytes.
pub const MAX_SECRET_VALUE: usize = 8192;
/// Maximum number of entries of the metadata.
pub const MAX_METADATA_ENTRIES: usize = 32;
/// Maximum length of a name in the metadata, in bytes.
pub const MAX_METADATA_NAME: usize = 128;
/// Maximum length of a value in the metadata, in bytes.
pub const MAX_METADATA_VALUE: usize = 1024;
/// Maximum length of all names and values of the metadata, in bytes.
pub const MAX_METADATA_BYTES: usize = 8192;
/// Prefix of ids, which no name may have.
pub(crate) const ID_PREFIX: &str = "sec_";

/// A secret, without its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Secret {
    /// Id.
    pub id: String,
    /// Name in lower case, unique among the secrets of the owner.
    pub name: String,
    /// Number of values that were set.
    pub version: u64,
    /// Metadata of the owner.
    pub metadata: BTreeMap<String, String>,
    /// Creation time in milliseconds since 1970.
    pub created_ms: u64,
    /// Time of the last change in milliseconds since 1970.
    pub updated_ms: u64,
}

/// A new secret.
pub struct NewSecret {
    /// Name in any case.
    pub name: String,
    /// Value.
    pub value: Zeroizing<String>,
    /// Metadata of the owner.
    pub metadata: BTreeMap<String, String>,
}

/// Returns the stored form of a name: lower case.
pub(crate) fn checked_name(name: &str) -> Result<String, SecretError> {
    let is_of_name = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    let lower = name.to_ascii_lowercase();
    let is_name = (1..=MAX_SECRET_NAME).contains(&name.len())
        && name.bytes().all(is_of_name)
        && !lower.starts_with(ID_PREFIX);
    if is_name {
        Ok(lower)
    } else {
        let shown: String = name.chars().take(MAX_SECRET_NAME).collect();
        Err(SecretError::Name(shown.escape_debug().to_string()))
    }
}

/// Checks that a value can be part of a header.
pub(crate) fn check_value(value: &str) -> Result<(), SecretError> {
    let is_value = (1..=MAX_SECRET_VALUE).contains(&value.len())
        && is_header_text(value)
        && value.trim_matches([' ', '\t']).len() == value.len();
    if is_value {
        Ok(())
    } else {
        Err(SecretError::Value)
    }
}

/// Returns whether a header may contain the text (RFC 9110, 5.5): no control characters except
/// tabs.
pub(crate) fn is_header_text(text: &str) -> bool {
    text.bytes().all(|b| b == b'\t' || (b >= 0x20 && b != 0x7f))
}

/// Checks the number and the lengths of metadata entries.
pub(crate) fn check_metadata(metadata: &BTreeMap<String, String>) -> Result<(), SecretError> {
    let mut bytes = 0;
    let mut is_valid = metadata.len() <= MAX_METADATA_ENTRIES;
    for (name, value) in metadata {
        is_valid &= name.len() <= MAX_METADATA_NAME && value.len() <= MAX_METADATA_VALUE;
        bytes += name.len() + value.len();
    }
    if is_valid && bytes <= MAX_METADATA_BYTES {
        Ok(())
    } else {
        Err(SecretError::Metadata)
    }
}
