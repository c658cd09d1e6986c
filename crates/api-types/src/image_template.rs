//! Templates from images in the form of CubeSandbox's API.

use crate::Moment;
use crate::network::MAX_NETWORK_ENTRIES;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Maximum number of environment variables, ports or arguments of a request.
pub const MAX_IMAGE_ITEMS: usize = 256;

/// Body of a request to build a template from an image, in the form of CubeSandbox's clients.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("required" = ["image"]))]
pub struct NewImageTemplate {
    /// Reference of the image.
    pub image: String,
    /// Name of the template. Defaults to a generated name.
    pub name: Option<String>,
    /// Kind of host. Ignored.
    pub instance_type: Option<String>,
    /// Minimum disk of its sandboxes, such as `1G`.
    pub writable_layer_size: Option<String>,
    /// Ports that the template declares.
    #[schemars(length(max = MAX_IMAGE_ITEMS))]
    pub exposed_ports: Option<Vec<u16>>,
    /// Port that must answer before the template is ready.
    pub probe_port: Option<u16>,
    /// Path on this port that must answer with status 2xx.
    pub probe_path: Option<String>,
    /// Processor time of its sandboxes in thousandths of a virtual CPU, rounded up to whole CPUs.
    pub cpu: Option<u32>,
    /// Memory of its sandboxes in MiB.
    pub memory: Option<u32>,
    /// Environment variables, as `NAME=value`.
    #[schemars(length(max = MAX_IMAGE_ITEMS))]
    pub env: Option<Vec<String>>,
    /// False if its sandboxes reach no public address that `allowOut` does not permit. A create
    /// cannot lift this.
    pub allow_internet_access: Option<bool>,
    /// Kind of network. Only `tap` is supported.
    pub network_type: Option<String>,
    /// Must be empty: the host that receives the request builds the template.
    pub nodes: Option<Vec<String>>,
    /// User name for the registry.
    pub registry_username: Option<String>,
    /// Password for the registry. It is not stored.
    pub registry_password: Option<String>,
    /// Replaces the entry point of the image. The command is started in every sandbox.
    #[schemars(length(max = MAX_IMAGE_ITEMS))]
    pub command: Option<Vec<String>>,
    /// Replaces the arguments of the entry point.
    #[schemars(length(max = MAX_IMAGE_ITEMS))]
    pub args: Option<Vec<String>>,
    /// Name servers of its sandboxes. A create can replace them.
    #[schemars(length(max = MAX_NETWORK_ENTRIES))]
    pub dns: Option<Vec<String>>,
    /// Addresses and names that its sandboxes may reach, as in `network.allowOut` of a create,
    /// which can replace them.
    #[schemars(length(max = MAX_NETWORK_ENTRIES))]
    pub allow_out: Option<Vec<String>>,
    /// Addresses that its sandboxes may not reach, as in `network.denyOut` of a create, which can
    /// replace them.
    #[schemars(length(max = MAX_NETWORK_ENTRIES))]
    pub deny_out: Option<Vec<String>>,
    /// Must be false if present.
    pub enable_ivshmem: Option<bool>,
}

impl std::fmt::Debug for NewImageTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Without the password, because logs contain this text.
        let mut debug = f.debug_struct("NewImageTemplate");
        debug.field("image", &self.image).field("name", &self.name);
        debug.finish_non_exhaustive()
    }
}

/// Body of a request to build a template again from its image. Fields of the original request that
/// are absent here are unchanged, except the password.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ImageRebuild {
    /// User name for the registry.
    pub registry_username: Option<String>,
    /// Password for the registry. It is not stored.
    pub registry_password: Option<String>,
}

/// Started build of a template from an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageBuild {
    /// Id of the build.
    #[serde(rename = "jobID")]
    #[schemars(extend("format" = "uuid"))]
    pub job_id: String,
    /// Id of the build.
    #[serde(rename = "buildID")]
    #[schemars(extend("format" = "uuid"))]
    pub build_id: String,
    /// Id of the template.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Name of the template.
    pub name: String,
    /// State of the build.
    pub status: crate::BuildState,
    /// Progress in percent. Always 0.
    pub progress: u8,
    /// Time of the request.
    pub created_at: Moment,
}

/// Body of a request to rename a template.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("required" = ["alias"]))]
pub struct NewAlias {
    /// New name. If empty, the template gets a generated name.
    pub alias: String,
}

/// Number of tags of a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TagCount {
    /// Number of tags.
    pub total: usize,
}

/// Presence of a tag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TagExists {
    /// True if the tag exists.
    pub exists: bool,
    /// The tag.
    #[serde(rename = "normalizedTag")]
    pub normalized_tag: String,
}

/// Assignments of all tags of a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TagGroups {
    /// Tags.
    pub tags: Vec<TagGroup>,
    /// Value of `tagsCursor` for the next page. Null on the last page.
    pub next_cursor: Option<String>,
}

/// Assignments of a tag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TagGroup {
    /// The tag.
    pub tag: String,
    /// The current assignment. Earlier assignments are not recorded.
    pub assignments: Vec<TagAssignment>,
    /// Always false.
    pub has_more: bool,
}

/// Assignment of a tag to a build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TagAssignment {
    /// Id of the assignment, which equals the id of the build.
    #[schemars(extend("format" = "uuid"))]
    pub assignment_id: String,
    /// Id of the build.
    #[schemars(extend("format" = "uuid"))]
    pub build_id: String,
    /// Time at which the build was ready.
    pub assigned_at: Moment,
    /// Time at which the build was requested.
    pub build_created_at: Moment,
    /// Time at which the build was ready.
    pub build_finished_at: Option<Moment>,
}

/// Assignments of one tag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TagAssignments {
    /// The current assignment.
    pub data: Vec<TagAssignment>,
    /// Always null.
    pub next_cursor: Option<String>,
}
