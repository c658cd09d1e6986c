//! Messages of `filesystem.Filesystem` as JSON.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// `Stat`, `MakeDir`, `Remove`.
#[derive(Debug, Default, Deserialize)]
pub struct PathRequest {
    /// Path of the entry.
    #[serde(default)]
    pub path: String,
}

/// `ListDir`.
#[derive(Debug, Default, Deserialize)]
pub struct ListRequest {
    /// Path of the directory.
    #[serde(default)]
    pub path: String,
    /// Depth in levels; 0 counts as 1.
    #[serde(default)]
    pub depth: u32,
}

/// `Move`.
#[derive(Debug, Default, Deserialize)]
pub struct MoveRequest {
    /// Present path.
    #[serde(default)]
    pub source: String,
    /// New path.
    #[serde(default)]
    pub destination: String,
}

/// `WatchDir`, `CreateWatcher`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WatchRequest {
    /// Path of the directory.
    pub path: String,
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
    /// Absolute path.
    pub path: String,
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
pub struct FilesystemEvent {
    /// Path relative to the watched directory.
    pub name: String,
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
