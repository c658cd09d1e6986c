//! [`VolumeRow`]: volume of an API key in the tables of the fleet. A *volume* is a set of files
//! that sandboxes mount. Its files are on one member (host) of the fleet only.

use super::super::{UnknownFields, check_text, rule};
use super::row::MAX_ID_BYTES;
use crate::ids::MemberId;
use serde::{Deserialize, Serialize};

/// Maximum number of volumes of one owner.
pub const MAX_OWNER_VOLUMES: usize = 100;
/// Maximum sum of the sizes of an owner's volumes in bytes.
pub const MAX_OWNER_VOLUME_BYTES: u64 = 1 << 40;
/// Maximum sum of the numbers of files of an owner's volumes.
pub const MAX_OWNER_VOLUME_FILES: u64 = 100_000_000;
/// Maximum length of a name in bytes.
const MAX_NAME: usize = 128;

/// Volume of an API key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRow {
    /// Id.
    pub id: String,
    /// Id of the key that owns the volume. `None` for the owner of the fleet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Name, unique among the volumes of the owner.
    pub name: String,
    /// Member that has the files.
    pub home: MemberId,
    /// Maximum number of bytes.
    pub bytes: u64,
    /// Maximum number of files, directories and links.
    pub files: u64,
    /// Creation time in milliseconds since 1970.
    pub created_ms: u64,
    /// Fields of newer formats.
    #[serde(flatten)]
    pub unknown: UnknownFields,
}

impl VolumeRow {
    /// Checks the fields of a volume.
    pub(super) fn check(&self) -> Result<(), String> {
        check_text("id", &self.id, MAX_ID_BYTES)?;
        if let Some(owner) = &self.owner {
            check_text("owner", owner, MAX_ID_BYTES)?;
        }
        check_text("name", &self.name, MAX_NAME)?;
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        rule(
            self.name.bytes().all(is_valid),
            "the name of a volume must have letters, digits, `-` and `_` only",
        )?;
        rule(
            self.bytes <= MAX_OWNER_VOLUME_BYTES && self.files <= MAX_OWNER_VOLUME_FILES,
            "the size of a volume is out of range",
        )
    }
}
