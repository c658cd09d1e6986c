//! Engines that isolate sandboxes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Origin of a sandbox's guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BootMode {
    /// Booted from its kernel.
    Cold,
    /// Restored from a snapshot of its template, of itself or of a relative.
    Snapshot,
    /// Taken from the warm pool.
    WarmPool,
    /// Forked: restored from a snapshot of a live sandbox that was taken for the fork.
    Fork,
}

/// Capabilities of an engine. An operation that needs a missing capability fails with status 501.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Capabilities {
    /// Snapshots of memory and disk, and sandboxes restored from them.
    pub snapshot: bool,
    /// Snapshots of the disk without the memory, and sandboxes that boot from them.
    pub disk_snapshot: bool,
    /// A guest continues to run while its snapshot is written. Otherwise it is paused.
    pub live_snapshot: bool,
    /// A snapshot stores only the difference from its parent.
    pub incremental: bool,
    /// Sandboxes of one snapshot share unmodified memory.
    pub fork_shares_memory: bool,
    /// Rollback: a sandbox returns to an earlier snapshot and keeps its id.
    pub rollback: bool,
    /// A paused sandbox holds no memory.
    pub pause_frees_memory: bool,
    /// Connections of a guest, and streams into it, survive a live snapshot.
    pub connections_survive_snapshot: bool,
    /// Outgoing connections of a guest survive a pause.
    pub connections_survive_pause: bool,
    /// Snapshots have checksums and can be verified.
    pub verify: bool,
    /// Guests have a network with egress rules.
    pub network: bool,
    /// Rate limits for a guest's disks, in bytes and requests per second.
    pub disk_limits: bool,
    /// A guest has `/dev/kvm`.
    pub nested_kvm: bool,
    /// A guest has a Linux kernel of its own: sysctls, io_uring, BPF, file systems.
    pub own_kernel: bool,
}

/// An engine and its capabilities on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "Engine")]
pub struct EngineDescription {
    /// Name of the engine.
    pub name: String,
    /// Version of the isolating program, if it has one.
    pub version: Option<String>,
    /// True if the engine works on this host.
    pub usable: bool,
    /// Reason why the engine does not work, with a remedy. Only the host's owner receives it.
    pub why: Option<String>,
    /// True if new sandboxes use this engine by default.
    pub default: bool,
    /// Capabilities on this host.
    pub capabilities: Capabilities,
}
