//! Messages between the host and `jiffy-vmm` for snapshots: taking a snapshot of a running VM, and
//! restoring a VM from a snapshot.
//!
//! The *controller* is the process at the other end of the VMM's control socket, a daemon. A
//! *layer* contains the part of memory or of a disk that differs from the layers below
//! ([`crate::layer`]). An *overlay* is the file with the guest's writes to a disk since its last
//! layer.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors. The *working set*
//! consists of the chunks of memory that a restored guest touches first.

use crate::vm::{DiskConfig, DiskLimits, FdIndex, NetConfig, VsockConfig};
use serde::{Deserialize, Serialize};

/// Maximum number of layers of memory, and of each disk, for a restore. Before a restore, the
/// sandbox manager merges long lineages.
pub const MAX_LAYERS: usize = 48;
/// Maximum number of layers that a running VM may accumulate through its snapshots. A restore from
/// a merged snapshot resets the number.
pub const MAX_LIVE_LAYERS: usize = 1024;

/// Files to which a snapshot is written. All are empty and opened for reading and writing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotConfig {
    /// Id of the snapshot, chosen by the controller.
    pub id: String,
    /// Receives the state of vCPUs and devices.
    pub state: FdIndex,
    /// Receives the chunks of memory that differ from the layers below ([`crate::layer`]).
    pub memory: FdIndex,
    /// If set, the snapshot contains the disks only: no state and no memory is written. Must not be
    /// combined with `captured`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub disk_only: bool,
    /// The file of `memory`, opened again with `O_DIRECT`. `None` if its file system does not
    /// support this.
    #[serde(default)]
    pub direct: Option<FdIndex>,
    /// Receives the index of `memory`.
    pub index: FdIndex,
    /// `/proc/PID/pagemap` of the VMM, with which written pages are found. Without it, all memory
    /// is scanned.
    pub pagemap: Option<FdIndex>,
    /// Receives an index whose `stored` chunks are the chunks that the guest has accessed since the
    /// restore. Requires `pagemap`. The index is only a hint: the file remains empty if the chunks
    /// cannot be determined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_set: Option<FdIndex>,
    /// Files for each disk with an overlay, in guest order.
    pub disks: Vec<DiskFreeze>,
    /// State of the VM after the snapshot.
    pub then: AfterSnapshot,
    /// Maximum size of all layers, indexes and the state together, in bytes. `None` for no limit.
    #[serde(default)]
    pub max_bytes: Option<u64>,
    /// If set, the snapshot is reported with [`crate::vm::Event::Captured`] when its memory is
    /// frozen. It is then written to the end, even without a controller and after the exit of the
    /// guest. Only with [`AfterSnapshot::Resume`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub captured: bool,
}

/// Device and inode number of a file (`st_dev` and `st_ino` of stat(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
}

/// Layer files of one snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotLayerFiles {
    /// Memory layer.
    pub memory: FileIdentity,
    /// Layers of the writable disks, in guest order.
    pub disks: Vec<FileIdentity>,
}

/// Two snapshots of one lineage whose layers were merged into one. The controller has copied all
/// chunks and blocks that are missing in `upper` from the files of `lower` into the files of
/// `upper`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoldedLayers {
    /// Snapshot that will be removed.
    pub lower: SnapshotLayerFiles,
    /// Snapshot directly above `lower`.
    pub upper: SnapshotLayerFiles,
}

/// Captured snapshot ([`SnapshotConfig::captured`]) that its controller has neither committed nor
/// aborted. It may still be in progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapturedSnapshot {
    /// Id of the snapshot, chosen by the controller.
    pub id: String,
    /// Report of the snapshot. `None` while it is being written.
    pub report: Option<SnapshotReport>,
}

/// Freeze of a disk. The current overlay becomes a layer of the snapshot, and only its index is
/// written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFreeze {
    /// Receives the guest's writes from now on.
    pub overlay: FdIndex,
    /// Receives the index of the previous overlay.
    pub index: FdIndex,
}

/// State of a VM after its snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AfterSnapshot {
    /// The VM continues to run while memory is written by a background copy.
    Resume,
    /// The VM remains paused.
    Stay,
    /// The VM is terminated.
    Stop,
}

/// Decision about a prepared snapshot. Serialized as a boolean: true commits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "bool", into = "bool")]
pub enum SnapshotDecision {
    /// The snapshot becomes the VM's newest layer.
    Commit,
    /// The VM uses the layers from before the snapshot again.
    Abort,
}

impl From<bool> for SnapshotDecision {
    fn from(commit: bool) -> Self {
        if commit { Self::Commit } else { Self::Abort }
    }
}

impl From<SnapshotDecision> for bool {
    fn from(decision: SnapshotDecision) -> Self {
        decision == SnapshotDecision::Commit
    }
}

/// Report of a complete snapshot. Times are in microseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotReport {
    /// Time for which the guest was stopped. With [`AfterSnapshot::Resume`], it does not depend on
    /// the amount of written memory.
    pub stopped_us: u64,
    /// Time from the request until the last byte was written (to files, not to storage).
    pub total_us: u64,
    /// Phases of the time for which the guest was stopped.
    pub phases: FreezePhases,
    /// Number of memory chunks that were scanned.
    pub candidates: u64,
    /// Number of chunks written to the memory layer.
    pub stored: u64,
    /// Number of chunks that are zero now and were not zero below. They occupy no space.
    pub zero: u64,
    /// CPU features of this host. A VM can be restored only on a host with the same features.
    pub cpu: String,
    /// Number of vCPUs.
    pub vcpus: u8,
}

/// Phases of the time for which a guest was stopped, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreezePhases {
    /// Time until all vCPUs had left the guest.
    pub pause_us: u64,
    /// Time for reading vCPUs and devices.
    pub state_us: u64,
    /// Time for finding the written pages.
    pub scan_us: u64,
    /// Time for forking the process that writes memory while the guest continues to run. If the
    /// guest does not continue, time for writing the memory.
    pub copy_us: u64,
}

/// Restore of a VM from a snapshot. The devices must equal the devices of the snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreConfig {
    /// `/dev/kvm`, opened for reading and writing.
    pub kvm: FdIndex,
    /// State of vCPUs and devices.
    pub state: FdIndex,
    /// Memory layers, oldest first. At least one.
    pub memory: Vec<LayerFiles>,
    /// Source of the memory's content.
    pub source: MemorySource,
    /// Pages that are copied into the VM before it runs: the `stored` units of an index with units
    /// of [`crate::layer::MEMORY_PAGE`] bytes. Pages that are not mapped from a layer are ignored.
    #[serde(default)]
    pub populate: Option<FdIndex>,
    /// Further pages, which are copied while the VM runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub populate_later: Option<LaterPages>,
    /// Disks in guest order, as many as in the snapshot.
    pub disks: Vec<DiskConfig>,
    /// Limits of all disks together.
    #[serde(default)]
    pub disk_limits: DiskLimits,
    /// Host-guest sockets, if the snapshot has any.
    pub vsock: Option<VsockConfig>,
    /// Network interface, if the snapshot has one.
    pub net: Option<NetConfig>,
    /// [`crate::console::ConsoleRing`] that receives the output of the serial console.
    pub console: FdIndex,
    /// If set, no vCPU runs until [`crate::vm::Request::Resume`].
    #[serde(default)]
    pub paused: bool,
    /// Memory that is still incomplete on this host. `None` if the layers are complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lazy: Option<LazyConfig>,
}

/// Snapshot to which a running VM is rolled back in its process. The snapshot must have the size,
/// processor features and devices of the VM. Its devices must use the same images.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RollbackConfig {
    /// State of vCPUs and devices.
    pub state: FdIndex,
    /// Memory layers, oldest first. At least one.
    pub memory: Vec<LayerFiles>,
    /// Source of the memory's content.
    pub source: MemorySource,
    /// See [`RestoreConfig::populate`].
    #[serde(default)]
    pub populate: Option<FdIndex>,
    /// See [`RestoreConfig::populate_later`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub populate_later: Option<LaterPages>,
    /// `/proc/PID/pagemap` of the VMM, with which the guest's private pages are found.
    pub pagemap: FdIndex,
    /// Files for each disk with an overlay, in guest order.
    pub disks: Vec<DiskRollback>,
}

/// Rollback of a disk. Its image remains, and the layers above the image are replaced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRollback {
    /// Layers, oldest first. Read-only.
    pub layers: Vec<LayerFiles>,
    /// Receives the guest's writes from now on. Must be empty.
    pub overlay: FdIndex,
}

/// Report of a rollback. Times are in microseconds. `pause_us`, `scan_us`, `memory_us` and
/// `state_us` are parts of `stopped_us`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RollbackReport {
    /// Time for reading state and indexes, during which the guest still ran.
    pub read_us: u64,
    /// Time for which the guest was stopped.
    pub stopped_us: u64,
    /// Time until the vCPUs and the disk thread were paused.
    pub pause_us: u64,
    /// Time for finding the guest's private pages.
    pub scan_us: u64,
    /// Time for dropping these pages, mapping layers and reading pages.
    pub memory_us: u64,
    /// Time for restoring devices and vCPUs.
    pub state_us: u64,
    /// Number of the guest's private pages of [`crate::layer::MEMORY_PAGE`] bytes each.
    pub pages: u64,
}

/// Incomplete memory layers. A fetcher obtains their missing chunks when the guest accesses them
/// ([`crate::fetch`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LazyConfig {
    /// Open `/dev/userfaultfd`.
    pub userfaultfd: FdIndex,
    /// Non-blocking listening `SOCK_SEQPACKET` socket. The fetcher connects to it. A new connection
    /// replaces the previous one.
    pub listener: FdIndex,
    /// Incomplete layers.
    pub layers: Vec<LazyLayer>,
    /// Maximum time in milliseconds for which the guest waits for a chunk. After this time the VM
    /// is terminated.
    pub timeout_ms: u64,
}

/// Incomplete memory layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LazyLayer {
    /// Index of the layer in [`RestoreConfig::memory`].
    pub layer: u32,
    /// Index file whose `stored` units are present in the layer's file at the start. More units may
    /// arrive later.
    pub present: FdIndex,
}

/// Files of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerFiles {
    /// Sparse file with the content.
    pub file: FdIndex,
    /// Index ([`crate::layer::LayerIndex`]).
    pub index: FdIndex,
}

/// Pages that are copied into a VM while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaterPages {
    /// Index in the format of [`RestoreConfig::populate`]. It may repeat pages of that index.
    pub pages: FdIndex,
    /// Moment at which the copying starts.
    pub from: PopulateMoment,
}

/// Moment at which the copying of pages starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PopulateMoment {
    /// Start of the VM, which does not wait for the copying.
    Start,
    /// First connection from the host over vsock.
    Connection,
    /// First frame that arrives for the guest's network interface while the VM is detached
    /// ([`crate::vm::Request::Detach`]). The host itself causes the earlier frames.
    Frame,
}

/// Source of a restored VM's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MemorySource {
    /// Pages are mapped from the layers. They are loaded at the first access, and shared with other
    /// guests of the same snapshot until they are written.
    Map,
    /// The chunks of the working set are read immediately into huge pages, and the rest is mapped.
    /// The working set consists of the `stored` units of an index. Without an index, it consists of
    /// all chunks.
    Copy {
        /// Index file.
        working_set: Option<FdIndex>,
    },
}
