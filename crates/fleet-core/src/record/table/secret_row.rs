//! [`SecretRow`]: secret of an API key in the tables of the fleet.

use super::super::{UnknownFields, check_text, rule};
use super::row::MAX_ID_BYTES;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Maximum number of secrets of one owner.
pub const MAX_OWNER_SECRETS: usize = 256;
/// Maximum length of a name.
const MAX_NAME: usize = 128;
/// Maximum length of an encrypted value in base64: 8 KiB with the additions of the encryption.
const MAX_VALUE: usize = 12 << 10;
/// Maximum number of entries of the metadata.
const MAX_METADATA_ENTRIES: usize = 32;
/// Maximum length of all names and values of the metadata.
const MAX_METADATA_BYTES: usize = 8_192;

/// Secret of an API key. Its value is encrypted with a key that is derived from the secret of the
/// fleet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretRow {
    /// Id.
    pub id: String,
    /// Id of the key that owns the secret. `None` for the owner of the fleet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Name in lower case, unique among the secrets of the owner.
    pub name: String,
    /// Number of values that were set.
    pub version: u64,
    /// Encrypted value, in base64.
    pub value: String,
    /// Metadata of the owner.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// Creation time in milliseconds since 1970.
    pub created_ms: u64,
    /// Time of the last change in milliseconds since 1970.
    pub updated_ms: u64,
    /// Fields of newer formats.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

impl SecretRow {
    /// Checks the fields of a secret.
    pub(super) fn check(&self) -> Result<(), String> {
        check_text("id", &self.id, MAX_ID_BYTES)?;
        if let Some(owner) = &self.owner {
            check_text("owner", owner, MAX_ID_BYTES)?;
        }
        check_text("name", &self.name, MAX_NAME)?;
        rule(
            !self.name.bytes().any(|b| b.is_ascii_uppercase()),
            "the name of a secret must be in lower case",
        )?;
        rule(
            (1..u64::MAX).contains(&self.version),
            "the version of a secret is out of range",
        )?;
        check_text("value", &self.value, MAX_VALUE)?;
        let entries = self.metadata.iter();
        let bytes: usize = entries.map(|(name, value)| name.len() + value.len()).sum();
        rule(
            self.metadata.len() <= MAX_METADATA_ENTRIES && bytes <= MAX_METADATA_BYTES,
            "the metadata of a secret is too large",
        )
    }
}
