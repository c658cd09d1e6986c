//! What is known about a template without opening its image.

use jiffy_engine::Startup;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version of `template.json`; a manifest of another version is refused.
pub const MANIFEST_FORMAT: u32 = 1;

/// `template.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`MANIFEST_FORMAT`].
    pub format: u32,
    pub name: String,
    /// Seconds since the epoch.
    pub created: u64,
    /// SHA-256 of everything that went into the build except the packages themselves.
    pub recipe_sha256: String,
    pub image: ImageSum,
    pub defaults: Defaults,
    /// What is started in its sandboxes, and awaited, before they are handed out.
    #[serde(flatten)]
    pub startup: Startup,
    /// What it was imported from, if it was not built from packages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
}

/// Where an imported template comes from, and what its image says about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// The image's reference, the archive's or directory's path.
    pub from: String,
    /// SHA-256 of the image's manifest, lower-case hexadecimal; archives of plain files and directories have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest_sha256: Option<String>,
    /// SHA-256 of its layers without their compression, the lowest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<String>,
    /// What the image would run; nothing does unless it was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
    /// Ports it says it listens on: `80/tcp`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exposed_ports: Vec<String>,
}

/// Identity of a root filesystem image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSum {
    /// Lower-case hexadecimal.
    pub sha256: String,
    /// Bytes.
    pub size: u64,
}

/// What a sandbox of the template gets unless its creator says otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Defaults {
    pub user: String,
    pub workdir: String,
    /// MiB.
    pub disk_mib: u64,
    /// MiB; [`jiffy_engine::SandboxSize`] says if this does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u32>,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
}
