//! Messages of host and `jiffy-vmm` about taking a snapshot of a running VM, and making a VM from
//! one.

use crate::vm::{DiskConfig, DiskLimits, FdIndex, NetConfig, VsockConfig};
use serde::{Deserialize, Serialize};

/// Most layers, of memory or of one disk, from which a VM is made; longer lineages are merged
/// first.
pub const MAX_LAYERS: usize = 48;
/// Most layers that a running VM may accumulate by being snapshotted; a restore from a merged
/// snapshot resets the count.
pub const MAX_LIVE_LAYERS: usize = 1024;

/// Files to which a snapshot is written. All are opened for reading and writing, and empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotConfig {
    /// The controller's id of the snapshot.
    pub id: String,
    /// Takes the state of vCPUs and devices.
    pub state: FdIndex,
    /// Takes the chunks of memory that differ from the layers below ([`crate::layer`]).
    pub memory: FdIndex,
    /// The file of `memory` once more, opened with `O_DIRECT`; none if its file system refuses
    /// that.
    #[serde(default)]
    pub direct: Option<FdIndex>,
    /// Takes the index of `memory`.
    pub index: FdIndex,
    /// `/proc/PID/pagemap` of the VMM, by which written pages are found; without it all of memory
    /// is scanned.
    pub pagemap: Option<FdIndex>,
    /// Takes an index whose `stored` chunks the guest has touched since it was made. Needs
    /// `pagemap`. A hint: the file stays empty if they cannot be found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_set: Option<FdIndex>,
    /// One for each disk with an overlay, in guest order.
    pub disks: Vec<DiskFreeze>,
    /// State of the VM after the snapshot.
    pub then: AfterSnapshot,
    /// Most bytes of its layers, indexes and state together; none: no limit.
    #[serde(default)]
    pub max_bytes: Option<u64>,
    /// Report it with [`crate::vm::Event::Captured`] once its memory is frozen, and write it to
    /// the end without a controller, and after the guest has ended. Only with
    /// [`AfterSnapshot::Resume`].
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

/// Two snapshots of one lineage whose layers were folded into one: the controller has copied every
/// chunk and block that `upper` lacked from the files of `lower` into the files of `upper`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoldedLayers {
    /// Snapshot that is removed.
    pub lower: SnapshotLayerFiles,
    /// Snapshot directly above it.
    pub upper: SnapshotLayerFiles,
}

/// Snapshot that a VMM has completed, and that its controller has neither committed nor aborted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapturedSnapshot {
    /// The controller's id of the snapshot.
    pub id: String,
    /// Its report; none while it is being written.
    pub report: Option<SnapshotReport>,
}

/// Freeze of a disk: the overlay in use becomes a layer of the snapshot, and only its index is
/// written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFreeze {
    /// Takes the guest's writes from now on.
    pub overlay: FdIndex,
    /// Takes the index of the overlay that was in use.
    pub index: FdIndex,
}

/// State of a VM after its snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AfterSnapshot {
    /// Runs on at once, while a background copy of memory is written.
    Resume,
    /// Stays paused.
    Stay,
    /// Ends.
    Stop,
}

/// Decision about a prepared snapshot. Serialized as a boolean: true commits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "bool", into = "bool")]
pub enum SnapshotDecision {
    /// The snapshot is the VM's newest layer.
    Commit,
    /// The VM is put back on the layers from before it.
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

/// Report of a complete snapshot. Times in microseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotReport {
    /// Time for which the guest was stopped; with [`AfterSnapshot::Resume`] independent of the
    /// amount it had written.
    pub stopped_us: u64,
    /// From the request to the last byte written (to files, not to storage).
    pub total_us: u64,
    /// Phases of the stop.
    pub phases: FreezePhases,
    /// Chunks of memory that were scanned.
    pub candidates: u64,
    /// Chunks written to the memory layer.
    pub stored: u64,
    /// Chunks that are zero now and were not below; they take no space.
    pub zero: u64,
    /// Features of this host's processor; a VM is only restored on one with the same.
    pub cpu: String,
    /// Number of vCPUs.
    pub vcpus: u8,
}

/// Phases of the time for which a guest was stopped, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreezePhases {
    /// Until all vCPUs were out of the guest.
    pub pause_us: u64,
    /// Reading vCPUs and devices.
    pub state_us: u64,
    /// Finding the pages that were written.
    pub scan_us: u64,
    /// Forking the process that writes memory while the guest runs on (or writing it, if it does
    /// not).
    pub copy_us: u64,
}

/// A VM made from a snapshot. Devices must be those it was saved with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreConfig {
    /// `/dev/kvm`, opened for reading and writing.
    pub kvm: FdIndex,
    /// State of vCPUs and devices.
    pub state: FdIndex,
    /// Memory, oldest layer first; at least one.
    pub memory: Vec<LayerFiles>,
    /// Source of the memory's contents.
    pub source: MemorySource,
    /// Pages that become the VM's own before it runs: the `stored` units of an index over pages of
    /// [`crate::layer::MEMORY_PAGE`] bytes. Those that are not mapped from a layer are ignored.
    #[serde(default)]
    pub populate: Option<FdIndex>,
    /// Others that do so while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub populate_later: Option<LaterPages>,
    /// In guest order, as many as were saved.
    pub disks: Vec<DiskConfig>,
    /// Limits of all disks together.
    #[serde(default)]
    pub disk_limits: DiskLimits,
    /// Host-guest sockets, if there were any.
    pub vsock: Option<VsockConfig>,
    /// Network interface, if there was one.
    pub net: Option<NetConfig>,
    /// [`crate::console::ConsoleRing`] that takes the serial console's output.
    pub console: FdIndex,
    /// Build everything but run no vCPU until [`crate::vm::Request::Resume`].
    #[serde(default)]
    pub paused: bool,
    /// Memory that has not all arrived on this host; none: the layers are whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lazy: Option<LazyConfig>,
}

/// Snapshot to which a running VM is put back in its process. It is of the same size, and its
/// devices are over the same images.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RollbackConfig {
    /// State of vCPUs and devices.
    pub state: FdIndex,
    /// Memory, oldest layer first; at least one.
    pub memory: Vec<LayerFiles>,
    /// Source of the memory's contents.
    pub source: MemorySource,
    /// See [`RestoreConfig::populate`].
    #[serde(default)]
    pub populate: Option<FdIndex>,
    /// See [`RestoreConfig::populate_later`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub populate_later: Option<LaterPages>,
    /// `/proc/PID/pagemap` of the VMM, by which the guest's own pages are found.
    pub pagemap: FdIndex,
    /// One for each disk with an overlay, in guest order.
    pub disks: Vec<DiskRollback>,
}

/// Rollback of a disk: its image stays, and what lies above it is replaced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRollback {
    /// Oldest first; read-only.
    pub layers: Vec<LayerFiles>,
    /// Takes the guest's writes from now on; empty.
    pub overlay: FdIndex,
}

/// Report of a rollback. Times in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RollbackReport {
    /// Reading state and indexes, while the guest ran on.
    pub read_us: u64,
    /// Time for which the guest was stopped.
    pub stopped_us: u64,
    /// Of this, until all vCPUs were out of the guest.
    pub pause_us: u64,
    /// Finding the guest's own pages.
    pub scan_us: u64,
    /// Dropping them, mapping and reading.
    pub memory_us: u64,
    /// Putting devices and vCPUs back.
    pub state_us: u64,
    /// Number of the guest's own pages, [`crate::layer::MEMORY_PAGE`] bytes each.
    pub pages: u64,
}

/// Memory layers with holes, whose chunks a fetcher gets when the guest touches them
/// ([`crate::fetch`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LazyConfig {
    /// `/dev/userfaultfd`, opened.
    pub userfaultfd: FdIndex,
    /// Listening `SOCK_SEQPACKET` socket that does not block. The fetcher connects to it; a newer
    /// connection replaces an older one.
    pub listener: FdIndex,
    /// Layers with holes.
    pub layers: Vec<LazyLayer>,
    /// Time in milliseconds for which the guest waits for a chunk; then the VM ends.
    pub timeout_ms: u64,
}

/// Memory layer with holes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LazyLayer {
    /// Its number in [`RestoreConfig::memory`].
    pub layer: u32,
    /// Index whose `stored` units are present in the layer's file now; further ones may arrive.
    pub present: FdIndex,
}

/// A layer and its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerFiles {
    /// Sparse file.
    pub file: FdIndex,
    /// Index ([`crate::layer::LayerIndex`]).
    pub index: FdIndex,
}

/// Pages that become a VM's own while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaterPages {
    /// As in [`RestoreConfig::populate`]; may have those, too.
    pub pages: FdIndex,
    /// Moment from which on they do.
    pub from: PopulateMoment,
}

/// Moment from which on pages become a VM's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PopulateMoment {
    /// Its start, which does not wait for them.
    Start,
    /// The first connection from the host by vsock.
    Connection,
    /// The first frame for its network interface once it has been detached.
    Frame,
}

/// Source of a restored VM's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MemorySource {
    /// Mapped from the layers: pages are loaded at the first access and are shared with siblings
    /// until written.
    Map,
    /// Chunks of the working set (the `stored` units of an index; without it, all chunks there are)
    /// are read at once into huge pages, the rest is mapped.
    Copy {
        /// Index file.
        working_set: Option<FdIndex>,
    },
}
