//! [`IdentityRow`]: the keys in the tables of the fleet that sign identity tokens. An *identity
//! token* is a signed statement by which other services recognise a sandbox.

use super::super::{UnknownFields, check_text, rule};
use serde::{Deserialize, Serialize};

/// Maximum number of keys. Usually the fleet has one key, and two during a rotation.
const MAX_KEYS: usize = 16;
/// Maximum length of an encrypted key in base64.
const MAX_KEY: usize = 1024;

/// Key that signs identity tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdentityKey {
    /// Creation time in seconds since 1970.
    pub created_s: u64,
    /// Private key in base64, encrypted with a key that is derived from the secret of the fleet.
    pub sealed: String,
}

/// All keys of the fleet that sign identity tokens, which are replaced together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdentityRow {
    /// Number of changes, including the creation.
    pub version: u64,
    /// Keys, oldest first.
    pub keys: Vec<IdentityKey>,
    /// Fields of newer formats.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

impl IdentityRow {
    /// Checks the fields.
    pub(super) fn check(&self) -> Result<(), String> {
        rule(
            (1..u64::MAX).contains(&self.version),
            "the version of the identity keys is out of range",
        )?;
        rule(
            (1..=MAX_KEYS).contains(&self.keys.len()),
            "the fleet has no or too many identity keys",
        )?;
        let mut keys = self.keys.iter();
        keys.try_for_each(|key| check_text("sealed", &key.sealed, MAX_KEY))
    }
}
