//! What engines there are and what their sandboxes can do.

use serde::{Deserialize, Serialize};

/// What an engine can do. What it cannot is refused with [`EngineError::Unsupported`](crate::EngineError::Unsupported).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Capabilities {
    /// Snapshots of memory and disk, from which sandboxes are made.
    pub snapshot: bool,
    /// A guest runs on while its snapshot is written; otherwise it stands still.
    pub live_snapshot: bool,
    /// A snapshot stores only what differs from the one before.
    pub incremental: bool,
    /// Sandboxes of one snapshot share the memory that they do not change.
    pub fork_shares_memory: bool,
    /// A sandbox is put back to an earlier snapshot and keeps its id.
    pub rollback: bool,
    /// A sandbox that sleeps holds no memory.
    pub pause_frees_memory: bool,
    /// Connections of a guest that runs on, and streams into it, survive its snapshot.
    pub connections_survive_snapshot: bool,
    /// Connections of a guest to the world survive its sleep.
    pub connections_survive_pause: bool,
    /// Snapshots are compared with checksums of when they were taken.
    pub verify: bool,
    /// Guests have a network, under rules.
    pub network: bool,
    /// Bytes and requests per second of a guest's disks are limited.
    pub disk_limits: bool,
    /// A guest has `/dev/kvm`.
    pub nested_kvm: bool,
    /// A guest has a Linux kernel of its own: settings of it, io_uring, BPF, file systems.
    pub own_kernel: bool,
}

/// An engine as those who choose one are told of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EngineDescription {
    /// What it is called.
    pub name: String,
    /// Of what isolates its guests, if that has one.
    pub version: Option<String>,
    /// Whether it makes sandboxes on this host.
    pub usable: bool,
    /// Why not, with what to do about it.
    pub why: Option<String>,
    /// Whether it is taken for whoever names none.
    pub default: bool,
    /// What it can do here.
    pub capabilities: Capabilities,
}
