//! Manifest of a snapshot: the description of its files, which is read before the files.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. A layer of memory consists of *chunks* of 64 KiB, and a layer of a disk of
//! *blocks* of 4 KiB.

use crate::SnapshotError;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Version of the directory's layout and of the manifest.
pub const SNAPSHOT_FORMAT: u32 = 1;

/// Content of `manifest.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Format of the snapshot: [`SNAPSHOT_FORMAT`] of the program that wrote it.
    pub format: u32,
    /// Id: 1 to 64 lower-case letters and digits.
    pub id: String,
    /// Parent: the snapshot on which the layers are based. `None` if the snapshot is independent.
    pub parent: Option<String>,
    /// Template of the sandbox.
    pub template: String,
    /// Time of creation, in milliseconds since 1970.
    pub created_ms: u64,
    /// Versions of the programs with which the snapshot was taken.
    pub versions: Versions,
    /// Processor features in the format of `jiffy-vmm`. Informative only: a restore compares the
    /// features in `state.bin`.
    pub cpu: String,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Sizes of the memory and its layer.
    pub memory: MemorySizes,
    /// Sizes of the writable disks and their layers, in guest order.
    pub disks: Vec<DiskSizes>,
    /// True if the guest has a network interface.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub net: bool,
    /// SHA-256 of the mounted image with kernel modules. `None` without modules.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modules: Option<String>,
    /// True if the snapshot contains the disks only: its state is empty, and guests boot from it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub disk_only: bool,
}

/// Versions of the programs with which a snapshot was taken.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Versions {
    /// Version of Jiffy.
    pub vmm: String,
    /// Release of the guest kernel.
    pub kernel: String,
    /// Version of the agent.
    pub agent: String,
}

/// Sizes of memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemorySizes {
    /// Size of the guest's memory, in bytes.
    pub bytes: u64,
    /// Number of chunks that the layer stores. A chunk has 64 KiB.
    pub stored: u64,
    /// Number of chunks that the layer marks as zero.
    pub zero: u64,
    /// True if the memory does not depend on the memory of the parent: chunks that the layer does
    /// not store are zero. This is the case after a boot from the disks of the parent.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub complete: bool,
}

/// Sizes of one disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSizes {
    /// Size of the disk, in bytes.
    pub bytes: u64,
    /// Number of blocks that the layer stores. A block has 4 KiB.
    pub stored: u64,
}

/// Checks that `id` is valid.
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
        /// Format number of a manifest, which is read before all other fields.
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        // Check the format first: the fields of another format would cause a misleading error.
        let Format { format } =
            serde_json::from_slice(bytes).map_err(|e| SnapshotError::damaged(path, e))?;
        if format != SNAPSHOT_FORMAT {
            return Err(SnapshotError::Format {
                id: id.to_owned(),
                format,
                supported: SNAPSHOT_FORMAT,
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
