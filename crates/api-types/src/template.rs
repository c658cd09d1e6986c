//! Templates, their tags and requests to build them.
//!
//! The types mirror E2B's API, so that E2B's clients can parse them. Fields of features that Jiffy
//! does not have are always null or have a constant value.

use crate::parts::Moment;
use crate::size::SandboxSize;
use crate::template_network::TemplateNetwork;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

const NAME: &str = "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}(:[A-Za-z0-9][A-Za-z0-9._-]{0,62})?$";
const TAG: &str = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$";
/// Maximum number of tags of one request.
const MAX_TAGS: usize = 99;

/// A template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Template {
    /// Id of the template. Equal to its name if the template was not built on this host.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Build that created it.
    #[serde(rename = "buildID")]
    #[schemars(extend("format" = "uuid"))]
    pub build_id: String,
    /// Virtual CPUs of its sandboxes.
    pub cpu_count: u8,
    /// Memory of its sandboxes in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u32,
    /// Writable disk of its sandboxes in MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    /// True if all keys may use the template.
    pub public: bool,
    /// Name of the template.
    pub aliases: Vec<String>,
    /// Name of the template with each of its tags.
    pub names: Vec<String>,
    /// Time of the creation.
    pub created_at: Moment,
    /// Time of the last build.
    pub updated_at: Moment,
    /// Always null.
    pub created_by: (),
    /// Always null.
    pub last_spawned_at: (),
    /// Always 0.
    pub spawn_count: u64,
    /// Always 1.
    pub build_count: u64,
    /// Version of the envd protocol.
    pub envd_version: String,
    /// Always `ready`.
    pub build_status: TemplateBuildStatus,
    /// True if the template is a stock template.
    #[serde(default)]
    pub is_default: bool,
    /// Network rules of its sandboxes. Absent if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<TemplateNetwork>,
    /// Equal to `network.allowInternetAccess`, for CubeSandbox's clients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_internet_access: Option<bool>,
    /// Builds of the template. Absent in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub builds: Option<Vec<TemplateBuild>>,
}

/// Status of a template's build.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TemplateBuildStatus {
    /// The template exists.
    Ready,
}

/// A build of a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateBuild {
    /// Id of the build.
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// Status of the build.
    pub status: crate::build::BuildState,
    /// Time of the request.
    pub created_at: Moment,
    /// Time of the last change of status.
    pub updated_at: Moment,
    /// Equal to `updatedAt`.
    pub finished_at: Moment,
    /// Virtual CPUs of the template's sandboxes.
    pub cpu_count: u8,
    /// Memory of the template's sandboxes in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u32,
    /// Writable disk of the template's sandboxes in MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
}

/// Template of a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Alias {
    /// Id of the template.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// True if all keys may use the template.
    pub public: bool,
}

/// Tag of a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Tag {
    /// The tag.
    pub tag: String,
    /// Build that the tag refers to.
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// Time at which the build was ready.
    pub created_at: Moment,
}

/// Body of a request for a build. The template is created if it does not exist.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NewTemplate {
    /// Name of the template, with an optional tag.
    #[schemars(required, regex(pattern = NAME))]
    pub name: Option<String>,
    /// Name that older clients send. Ignored if `name` is present.
    pub alias: Option<String>,
    /// Further tags.
    #[schemars(length(max = MAX_TAGS), inner(regex(pattern = TAG)))]
    pub tags: Option<Vec<String>>,
    /// Virtual CPUs of its sandboxes.
    #[schemars(range(min = 1, max = SandboxSize::MAX_VCPUS))]
    pub cpu_count: Option<u8>,
    /// Memory of its sandboxes in MiB.
    #[serde(rename = "memoryMB")]
    #[schemars(range(min = SandboxSize::MIN_MEMORY_MIB, max = SandboxSize::MAX_MEMORY_MIB))]
    pub memory_mb: Option<u32>,
    /// Minimum free disk space of its sandboxes in MiB.
    #[schemars(range(min = 0, max = SandboxSize::MAX_DISK_MIB))]
    pub min_free_disk_mb: Option<u64>,
}

/// Requested build, which waits for its files and its start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RequestedBuild {
    /// Id of the template.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Id of the build.
    #[serde(rename = "buildID")]
    #[schemars(extend("format" = "uuid"))]
    pub build_id: String,
    /// True if all keys may use the template.
    pub public: bool,
    /// Name of the template.
    pub names: Vec<String>,
    /// Tags of the build.
    pub tags: Vec<String>,
    /// Name of the template.
    pub aliases: Vec<String>,
}

/// Link to upload the files of a build, and their presence on the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UploadLink {
    /// True if the host already has the files.
    pub present: bool,
    /// Upload link, valid for an hour.
    pub url: String,
}

/// Body of a request to add tags to a template.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["target", "tags"]))]
pub struct AddTags {
    /// Template and tag of the build that receives the new tags.
    #[schemars(required)]
    pub target: Option<String>,
    /// New tags.
    pub tags: Vec<String>,
}

/// Tags that were added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AddedTags {
    /// Added tags.
    pub tags: Vec<String>,
    /// Build that has the tags.
    #[serde(rename = "buildID")]
    pub build_id: String,
}

/// Body of a request to remove tags from a template.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["name", "tags"]))]
pub struct RemoveTags {
    /// Template.
    #[schemars(required)]
    pub name: Option<String>,
    /// Tags to remove.
    pub tags: Vec<String>,
}

/// Body of a request to change a template.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TemplateChange {
    /// True if all keys may use the template.
    pub public: Option<bool>,
}

/// A changed template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChangedTemplate {
    /// Name of the template.
    pub names: Vec<String>,
}

/// Body of a request to prune the build cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Prune {
    /// Minimum time without use in seconds.
    pub unused_seconds: u64,
}

/// Removed parts of the build cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Pruned {
    /// Number of snapshots of steps.
    pub steps: usize,
    /// Bytes of uploaded files.
    pub upload_bytes: u64,
}
