//! Messages of `filesystem.Filesystem` as JSON. Fields described as extensions are not part of
//! E2B's envd protocol.

use super::request_path::RequestPath;
use crate::rpc::json;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Request of `Stat`, `MakeDir` and `Remove`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PathRequest {
    /// Path of the entry.
    path: String,
    /// Extension: bytes of a path that is not UTF-8.
    #[serde(deserialize_with = "json::bytes")]
    path_bytes: Option<Vec<u8>>,
}

impl PathRequest {
    /// Returns the path.
    pub fn path(self) -> RequestPath {
        RequestPath::new(self.path, self.path_bytes)
    }
}

/// Request of `ListDir`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ListRequest {
    /// Path of the directory.
    pub path: String,
    /// Extension: bytes of a path that is not UTF-8.
    #[serde(deserialize_with = "json::bytes")]
    pub path_bytes: Option<Vec<u8>>,
    /// Depth in levels. 0 means 1.
    pub depth: u32,
}

/// Request of `Move`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MoveRequest {
    /// Current path.
    pub source: String,
    /// Extension: bytes of a path that is not UTF-8.
    #[serde(deserialize_with = "json::bytes")]
    pub source_bytes: Option<Vec<u8>>,
    /// New path.
    pub destination: String,
    /// Extension: bytes of a path that is not UTF-8.
    #[serde(deserialize_with = "json::bytes")]
    pub destination_bytes: Option<Vec<u8>>,
}

/// Request of `WatchDir` and `CreateWatcher`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WatchRequest {
    /// Path of the directory.
    pub path: String,
    /// Extension: bytes of a path that is not UTF-8.
    #[serde(deserialize_with = "json::bytes")]
    pub path_bytes: Option<Vec<u8>>,
    /// Also watches all directories below.
    pub recursive: bool,
    /// Sends the description of the entry with each event.
    #[serde(alias = "include_entry")]
    pub include_entry: bool,
}

/// Request of `GetWatcherEvents` and `RemoveWatcher`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WatcherRequest {
    /// Id returned by `CreateWatcher`.
    #[serde(alias = "watcher_id")]
    pub watcher_id: String,
}

/// Description of a file, directory or symbolic link.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EntryInfo {
    /// Last component of the path.
    pub name: String,
    /// Type of the entry. For a symbolic link, the type of its target.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Absolute path, with U+FFFD for bytes that are not UTF-8.
    pub path: String,
    /// Extension: bytes of a path that is not UTF-8, in base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path_bytes: Option<String>,
    /// Size in bytes. A string, as Protobuf's JSON mapping represents 64-bit integers.
    pub size: String,
    /// Permission bits.
    pub mode: u32,
    /// Permissions in the format of `ls -l`.
    pub permissions: String,
    /// User name.
    pub owner: String,
    /// Group name.
    pub group: String,
    /// Modification time in RFC 3339.
    pub modified_time: String,
    /// Target of a symbolic link.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
    /// Extended attributes `user.e2b.*`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// Set if the entry is a symbolic link.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_symlink: bool,
}

/// Event in a watched directory.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FilesystemEvent {
    /// Path relative to the watched directory, with U+FFFD for bytes that are not UTF-8.
    pub name: String,
    /// Extension: bytes of a name that is not UTF-8, in base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name_bytes: Option<String>,
    /// `EVENT_TYPE_*`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Description of the entry, if the client requested descriptions and the entry still exists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryInfo>,
}

impl FilesystemEvent {
    /// Returns the approximate size in memory in bytes, which limits the queues of events.
    pub fn weight(&self) -> usize {
        let entry = self.entry.as_ref().map_or(0, |entry| {
            // Bytes of the extended attributes: name, value, and 64 for the entry of the map.
            let words = entry.metadata.iter().map(|(k, v)| k.len() + v.len() + 64);
            // The path counts twice, because `path_bytes` or `symlink_target` may repeat it.
            size_of::<EntryInfo>() + 2 * entry.path.len() + words.sum::<usize>()
        });
        size_of::<Self>() + self.name.len() + entry
    }
}
