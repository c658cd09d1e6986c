//! Comparisons of sandboxes and snapshots.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Differences between the files of two sandboxes or snapshots, or the contents of one file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Comparison {
    /// Numbers and sizes of all differences, on all pages. Absent with `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<ComparisonSummary>,
    /// Page of the differences, sorted by path. Empty with `path`.
    pub changes: Vec<FileDifference>,
    /// Contents of the file `path`. Absent without `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<ComparedFile>,
    /// True if differences are missing: a side has more than 100,000 changes against its template.
    pub incomplete: bool,
    /// Time for the start of temporary guests in milliseconds. A running sandbox needs none.
    #[schemars(range(min = 0.0))]
    pub start_ms: f64,
    /// Time for the comparison of the files in milliseconds.
    #[schemars(range(min = 0.0))]
    pub compare_ms: f64,
}

/// Numbers and sizes of differences.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ComparisonSummary {
    /// Files that only the second object has.
    pub added: DifferenceCount,
    /// Files that both objects have. The size is the size in the second object.
    pub changed: DifferenceCount,
    /// Files that only the first object has.
    pub removed: DifferenceCount,
}

/// Number and size of differences of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DifferenceCount {
    /// Number of files, directories and links.
    pub count: u64,
    /// Sum of the sizes in bytes.
    pub bytes: u64,
}

/// File, directory or symbolic link that differs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FileDifference {
    /// Absolute path, with U+FFFD for bytes that are not UTF-8.
    pub path: String,
    /// Bytes of a path that is not UTF-8, in base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_bytes: Option<String>,
    /// Kind of the difference.
    pub kind: DifferenceKind,
    /// State in the first object. Absent for an added file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub a: Option<ComparedState>,
    /// State in the second object. Absent for a removed file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub b: Option<ComparedState>,
    /// False if the contents have the same size and could not be compared: they are unreadable, or
    /// beyond the first 4 GiB of such contents.
    pub verified: bool,
}

/// Kind of a difference.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum DifferenceKind {
    /// Only the second object has the file.
    Added,
    /// The contents, the type, the permissions or the owner differ.
    Changed,
    /// Only the first object has the file.
    Removed,
}

/// State of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ComparedState {
    /// Type of the file.
    #[serde(rename = "type")]
    pub kind: ComparedType,
    /// Size in bytes. For a directory of the template that one object removed: the size of its
    /// files. For other directories: 0, because their files are listed separately.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Number of the user.
    pub uid: u32,
    /// Number of the group.
    pub gid: u32,
}

/// Type of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ComparedType {
    /// Regular file.
    File,
    /// Directory.
    Directory,
    /// Symbolic link.
    Symlink,
    /// Socket, pipe or device.
    Other,
}

/// Contents of a file in two objects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ComparedFile {
    /// Absolute path.
    pub path: String,
    /// Content in the first object. Absent if the file does not exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub a: Option<ComparedContent>,
    /// Content in the second object. Absent if the file does not exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub b: Option<ComparedContent>,
}

/// Content of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ComparedContent {
    /// Size of the file in bytes.
    pub size: u64,
    /// First MiB of the content, as text or in base64. For a symbolic link: its target.
    pub content: String,
    /// True if `content` is in base64, because the file is not UTF-8.
    pub base64: bool,
    /// True if the file is larger than `content`.
    pub truncated: bool,
    /// True for a symbolic link.
    pub symlink: bool,
}
