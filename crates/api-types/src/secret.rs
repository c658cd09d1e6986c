//! Secrets of API keys.

use crate::parts::Moment;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Maximum length of a secret's name in bytes.
pub const MAX_SECRET_NAME: usize = 128;
/// Maximum length of a secret's value in bytes.
pub const MAX_SECRET_VALUE: usize = 8192;
/// Pattern of names of secrets. Ids begin with `sec_`.
const NAME: &str = "^(?!sec_)[A-Za-z0-9_.-]+$";
/// Pattern of values in the OpenAPI document. It excludes accepted characters that are longer than
/// a byte, because lengths in the document are in characters. It also excludes spaces.
const VALUE: &str = "^[!-~]+$";

/// Metadata of a secret. The descriptions are in the schemas of the fields.
pub type SecretMetadata = BTreeMap<String, String>;

/// A new secret.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct NewSecret {
    /// Name of 1 to 128 letters, digits, `-`, `_` and `.`, unique among the secrets of the key. It
    /// is stored in lower case, and must not begin with `sec_`.
    #[schemars(length(min = 1, max = MAX_SECRET_NAME), regex(pattern = NAME))]
    pub name: String,
    /// Value of 1 to 8,192 bytes of UTF-8, without control characters and without spaces at the
    /// ends. No call returns it.
    #[schemars(length(min = 1, max = MAX_SECRET_VALUE), regex(pattern = VALUE))]
    pub value: String,
    /// Metadata, which is returned with the secret: at most 32 entries with names of 128 and values
    /// of 1,024 bytes, 8,192 bytes in total.
    #[serde(default)]
    #[schemars(extend("maxProperties" = 8, "propertyNames" = metadata_names()))]
    #[schemars(extend("additionalProperties" = metadata_values()))]
    pub metadata: Option<SecretMetadata>,
}

/// New value of a secret.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct SecretUpdate {
    /// Value of 1 to 8,192 bytes of UTF-8, without control characters and without spaces at the
    /// ends. No call returns it.
    #[schemars(length(min = 1, max = MAX_SECRET_VALUE), regex(pattern = VALUE))]
    pub value: String,
    /// Metadata that replaces the present metadata, with the same limits as at the creation. Absent
    /// metadata remain unchanged.
    #[serde(default)]
    #[schemars(extend("maxProperties" = 8, "propertyNames" = metadata_names()))]
    #[schemars(extend("additionalProperties" = metadata_values()))]
    pub metadata: Option<SecretMetadata>,
}

/// A secret, without its value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Secret {
    /// Id.
    #[serde(rename = "secretID")]
    pub secret_id: String,
    /// Name.
    pub name: String,
    /// Number of values that were set.
    pub current_version: u64,
    /// Metadata.
    pub metadata: SecretMetadata,
    /// Time of the creation.
    pub created_at: Moment,
    /// Time of the last change.
    pub updated_at: Moment,
}

// Bounds of schemas are in characters of at most 4 bytes. The 8 entries, names of 32 and values of
// 64 characters therefore stay below the bounds in bytes: 128, 1,024, and 8,192 in total.
fn metadata_names() -> serde_json::Value {
    serde_json::json!({ "maxLength": 32 })
}

fn metadata_values() -> serde_json::Value {
    serde_json::json!({ "type": "string", "maxLength": 64 })
}
