//! A volume, and the limits of names, sizes and numbers of volumes.

use crate::VolumeError;

/// Maximum length of a name in bytes.
pub const MAX_NAME: usize = 128;
/// Maximum number of volumes of a key.
pub const MAX_VOLUMES: usize = 100;
/// Default size in bytes.
pub const DEFAULT_BYTES: u64 = 10 << 30;
/// Minimum size in bytes.
pub const MIN_BYTES: u64 = 1 << 20;
/// Maximum size in bytes.
pub const MAX_BYTES: u64 = 1 << 40;
/// Default number of files.
pub const DEFAULT_FILES: u64 = 1_000_000;
/// Maximum number of files.
pub const MAX_FILES: u64 = 10_000_000;
/// Maximum sum of the sizes of a key's volumes in bytes.
pub const MAX_KEY_BYTES: u64 = 1 << 40;
/// Maximum sum of the numbers of files of a key's volumes.
pub const MAX_KEY_FILES: u64 = 100_000_000;
/// Start of ids. Names cannot start with it.
pub const ID_PREFIX: &str = "vol-";

/// A volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Id.
    pub id: String,
    /// Owner: the id of an API key, or empty for the owner of the host.
    pub owner: String,
    /// Name, unique among the volumes of the owner.
    pub name: String,
    /// Maximum number of bytes.
    pub bytes: u64,
    /// Maximum number of files, directories and links.
    pub files: u64,
    /// Time of the creation in milliseconds since 1970.
    pub created_ms: u64,
}

/// A new volume.
#[derive(Debug, Clone)]
pub struct NewVolume {
    /// Name. The id if empty.
    pub name: String,
    /// Maximum number of bytes.
    pub bytes: u64,
    /// Maximum number of files, directories and links.
    pub files: u64,
}

/// Checks a name.
pub(crate) fn check_name(name: &str) -> Result<(), VolumeError> {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    let length = 1..=MAX_NAME;
    if length.contains(&name.len())
        && name.bytes().all(is_valid)
        && !name.to_ascii_lowercase().starts_with(ID_PREFIX)
    {
        return Ok(());
    }
    let shown: String = name.chars().take(MAX_NAME).collect();
    Err(VolumeError::Name(shown.escape_debug().to_string()))
}

/// Checks a size.
pub(crate) fn check_size(new: &NewVolume) -> Result<(), VolumeError> {
    if !(MIN_BYTES..=MAX_BYTES).contains(&new.bytes) || !(1..=MAX_FILES).contains(&new.files) {
        return Err(VolumeError::Size);
    }
    Ok(())
}
