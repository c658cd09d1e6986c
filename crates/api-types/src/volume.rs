//! Volumes of API keys.

use crate::parts::Moment;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Maximum size of a volume in MiB.
pub const MAX_VOLUME_MB: u64 = 1 << 20;
/// Maximum number of files of a volume.
pub const MAX_VOLUME_FILES: u64 = 10_000_000;
/// Pattern of names of volumes in the OpenAPI document.
const NAME: &str = "^([a-uw-zA-UW-Z0-9_-][a-zA-Z0-9_-]{0,127})?$";

/// A new volume.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NewVolume {
    /// Name, unique among the volumes of the key. Defaults to the id.
    #[serde(default)]
    #[schemars(length(max = 128), regex(pattern = NAME))]
    pub name: Option<String>,
    /// Driver of CubeSandbox. The only driver is `local`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<VolumeDriver>,
    /// Size in MiB, which the files cannot exceed. It counts towards the disk limit of the key.
    /// Defaults to 10240, but to at most half of the disk space that the limit leaves.
    #[serde(rename = "sizeMB", default)]
    #[schemars(range(min = 1, max = MAX_VOLUME_MB))]
    pub size_mb: Option<u64>,
    /// Maximum number of files, directories and links. Defaults to 1000000.
    #[serde(default)]
    #[schemars(range(min = 1, max = MAX_VOLUME_FILES))]
    pub max_files: Option<u64>,
    /// Snapshot of a volume, whose files the new volume has. Size and maximum number of files
    /// default to the values of the snapshot's volume.
    #[serde(
        rename = "volumeSnapshotID",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(length(min = 1, max = 64))]
    pub volume_snapshot_id: Option<String>,
    /// Host of the fleet that stores the files, for example `h2`. Sandboxes that mount the volume
    /// run there. Defaults to the host that receives the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub host: Option<String>,
}

/// Snapshot of a volume in the store of the host or fleet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshot {
    /// Id.
    #[serde(rename = "volumeSnapshotID")]
    pub volume_snapshot_id: String,
    /// Id of the volume, which may have been removed.
    #[serde(rename = "volumeID")]
    pub volume_id: String,
    /// Name of the volume at the time of the snapshot.
    pub name: String,
    /// Size of the volume in MiB.
    #[serde(rename = "sizeMB")]
    pub size_mb: u64,
    /// Maximum number of files, directories and links of the volume.
    pub max_files: u64,
    /// Bytes of its files, each rounded up to 4 KiB.
    pub used_bytes: u64,
    /// Time of the snapshot.
    pub created_at: Moment,
}

/// Driver of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum VolumeDriver {
    /// Files on the disk of the host.
    Local,
}

/// A volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    /// Id.
    #[serde(rename = "volumeID")]
    pub volume_id: String,
    /// Name.
    pub name: String,
    /// Size in MiB.
    #[serde(rename = "sizeMB")]
    pub size_mb: u64,
    /// Maximum number of files, directories and links.
    pub max_files: u64,
    /// Time of the creation.
    pub created_at: Moment,
    /// Host that has the files, in a fleet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
}

/// A volume, with the token for its content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VolumeAndToken {
    /// Volume.
    #[serde(flatten)]
    pub volume: Volume,
    /// Token for calls on the content of the volume.
    pub token: String,
}

/// Type of an entry of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum VolumeEntryType {
    /// Regular file.
    File,
    /// Directory.
    Directory,
    /// Symbolic link.
    Symlink,
    /// Pipe, socket or device.
    Unknown,
}

/// File or directory of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VolumeEntry {
    /// Name. Empty for the root.
    pub name: String,
    /// Type.
    #[serde(rename = "type")]
    pub kind: VolumeEntryType,
    /// Absolute path in the volume.
    pub path: String,
    /// Size in bytes.
    pub size: u64,
    /// Permissions.
    pub mode: u32,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Time of the last access.
    pub atime: Moment,
    /// Time of the last change of the content.
    pub mtime: Moment,
    /// Time of the last change of content or attributes.
    pub ctime: Moment,
    /// Target of a symbolic link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

/// New owner and permissions of an entry of a volume. Absent values remain unchanged.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, JsonSchema)]
pub struct VolumeEntryChange {
    /// User.
    #[serde(default)]
    pub uid: Option<u32>,
    /// Group.
    #[serde(default)]
    pub gid: Option<u32>,
    /// Permissions.
    #[serde(default)]
    #[schemars(range(max = 0o7777))]
    pub mode: Option<u32>,
}

/// Volume to mount in a new sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NewVolumeMount {
    /// Name or id of the volume.
    #[schemars(length(min = 1, max = 128))]
    pub name: String,
    /// Absolute path of a directory in the sandbox, which is created if necessary.
    #[schemars(length(min = 2, max = 1024), regex(pattern = "^(/[a-zA-Z0-9_-]+)+$"))]
    pub path: String,
    /// True if the sandbox cannot change the volume. Defaults to false.
    #[serde(default)]
    pub read_only: Option<bool>,
}
