//! What a snapshot says about itself.

use crate::SnapshotError;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Version of the directory's layout and of the manifest.
pub const FORMAT: u32 = 1;

/// `manifest.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`] of the program that wrote it.
    pub format: u32,
    /// Its name, 1 to 64 lower-case letters and digits.
    pub id: String,
    /// The snapshot that its layers lie on.
    pub parent: Option<String>,
    /// Template of the sandbox.
    pub template: String,
    /// Milliseconds since the epoch.
    pub created_ms: u64,
    /// Who made it.
    pub versions: Versions,
    /// What the processor offered, as `jiffy-vmm` names it; that in the state is what it compares.
    pub cpu: String,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Memory and its layer.
    pub memory: MemorySizes,
    /// Writable disks and their layers, in guest order.
    pub disks: Vec<DiskSizes>,
    /// Whether there is a network card.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub net: bool,
    /// SHA-256 of the image with the kernel's modules that the guest has mounted, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modules: Option<String>,
}

/// Versions of what took part.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Versions {
    /// Jiffy's.
    pub vmm: String,
    /// The guest kernel's release.
    pub kernel: String,
    /// The agent's.
    pub agent: String,
}

/// Sizes of memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemorySizes {
    /// Guest memory in bytes.
    pub bytes: u64,
    /// Chunks that the layer holds.
    pub stored: u64,
    /// Chunks that it makes zero.
    pub zero: u64,
}

/// Sizes of one disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSizes {
    /// The disk in bytes.
    pub bytes: u64,
    /// Blocks of 4 KiB that the layer holds.
    pub stored: u64,
}

/// Checks that `id` can be a name.
pub(crate) fn check_id(id: &str) -> Result<(), SnapshotError> {
    let good = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    if (1..=64).contains(&id.len()) && id.bytes().all(good) {
        Ok(())
    } else {
        Err(SnapshotError::Id(id.chars().take(80).collect()))
    }
}

impl Manifest {
    /// Reads and checks the manifest of snapshot `id`.
    pub(crate) fn parse(bytes: &[u8], id: &str, path: &Path) -> Result<Self, SnapshotError> {
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        // The format first: what else is there depends on it.
        let Format { format } =
            serde_json::from_slice(bytes).map_err(|e| SnapshotError::damaged(path, e))?;
        if format != FORMAT {
            return Err(SnapshotError::Format {
                id: id.to_owned(),
                found: format,
                known: FORMAT,
            });
        }
        let manifest: Self =
            serde_json::from_slice(bytes).map_err(|e| SnapshotError::damaged(path, e))?;
        if manifest.id != id {
            let reason = format!("it is the manifest of {:?}", manifest.id);
            return Err(SnapshotError::damaged(path, reason));
        }
        if let Some(parent) = &manifest.parent {
            check_id(parent).map_err(|e| SnapshotError::damaged(path, e))?;
        }
        Ok(manifest)
    }
}
