//! Messages of `filesystem.Filesystem` as JSON.

use super::request_path::RequestPath;
use crate::rpc::json;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// `Stat`, `MakeDir`, `Remove`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PathRequest {
    /// Path of the entry.
    path: String,
    /// Extension: its bytes, for a path that is not UTF-8.
    #[serde(deserialize_with = "json::bytes")]
    path_bytes: Option<Vec<u8>>,
}

impl PathRequest {
    /// The path.
    pub fn path(self) -> RequestPath {
        RequestPath::new(self.path, self.path_bytes)
    }
}

/// `ListDir`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ListRequest {
    /// Path of the directory.
    pub path: String,
    /// Extension: its bytes, for a path that is not UTF-8.
    #[serde(deserialize_with = "json::bytes")]
    pub path_bytes: Option<Vec<u8>>,
    /// Depth in levels; 0 counts as 1.
    pub depth: u32,
}

/// `Move`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MoveRequest {
    /// Present path.
    pub source: String,
    /// Extension: its bytes, for a path that is not UTF-8.
    #[serde(deserialize_with = "json::bytes")]
    pub source_bytes: Option<Vec<u8>>,
    /// New path.
    pub destination: String,
    /// Extension: its bytes, for a path that is not UTF-8.
    #[serde(deserialize_with = "json::bytes")]
    pub destination_bytes: Option<Vec<u8>>,
}

/// `WatchDir`, `CreateWatcher`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WatchRequest {
    /// Path of the directory.
    pub path: String,
    /// Extension: its bytes, for a path that is not UTF-8.
    #[serde(deserialize_with = "json::bytes")]
    pub path_bytes: Option<Vec<u8>>,
    /// Includes all directories below.
    pub recursive: bool,
    /// Send the entry with each event.
    #[serde(alias = "include_entry")]
    pub include_entry: bool,
}

/// `GetWatcherEvents`, `RemoveWatcher`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WatcherRequest {
    /// Id returned by `CreateWatcher`.
    #[serde(alias = "watcher_id")]
    pub watcher_id: String,
}

/// A file, directory or link.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EntryInfo {
    /// Last part of the path.
    pub name: String,
    /// Type of the entry; for a link that of its target.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Absolute path, with U+FFFD for bytes that are not UTF-8.
    pub path: String,
    /// Extension: bytes of a path that is not UTF-8, in base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path_bytes: Option<String>,
    /// Bytes.
    pub size: String,
    /// Permission bits.
    pub mode: u32,
    /// As `ls -l` shows them.
    pub permissions: String,
    /// User name.
    pub owner: String,
    /// Group name.
    pub group: String,
    /// RFC 3339.
    pub modified_time: String,
    /// Target of a link.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
    /// Extended attributes `user.e2b.*`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// The entry is a link.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_symlink: bool,
}

/// Something happened in a watched directory.
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
    /// The entry, if asked for and still there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryInfo>,
}

impl FilesystemEvent {
    /// Bytes that it takes in memory, about.
    pub fn weight(&self) -> usize {
        let entry = self.entry.as_ref().map_or(0, |entry| {
            let words = entry.metadata.iter().map(|(k, v)| k.len() + v.len() + 64);
            size_of::<EntryInfo>() + 2 * entry.path.len() + words.sum::<usize>()
        });
        size_of::<Self>() + self.name.len() + entry
    }
}
