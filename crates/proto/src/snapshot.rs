//! Host <-> `jiffy-vmm`: taking a snapshot of a running VM, and making a VM from one.

use crate::vm::{DiskConfig, DiskLimits, FdIndex, NetConfig, VsockConfig};
use serde::{Deserialize, Serialize};

/// Most layers, of memory or of one disk, that a VM is made from; longer lineages are merged first.
pub const MAX_LAYERS: usize = 48;
/// Most layers that a running VM may have come to by being snapshotted; a restore from a merged snapshot begins anew.
pub const MAX_LIVE_LAYERS: usize = 1024;

/// What a snapshot is written to. All files are opened for reading and writing, and empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotConfig {
    /// What the controller calls it.
    pub id: String,
    /// Takes the state of vCPUs and devices.
    pub state: FdIndex,
    /// Takes the chunks of memory that differ from the layers below ([`crate::layer`]).
    pub memory: FdIndex,
    /// The file of `memory` once more, opened with `O_DIRECT`; none where its file system refuses that.
    #[serde(default)]
    pub direct: Option<FdIndex>,
    /// Takes the index of `memory`.
    pub index: FdIndex,
    /// `/proc/PID/pagemap` of the VMM, which tells what was written; without it all of memory is looked through.
    pub pagemap: Option<FdIndex>,
    /// One for each disk with an overlay, in guest order.
    pub disks: Vec<DiskFreeze>,
    /// What the VM does afterwards.
    pub then: AfterSnapshot,
    /// Most bytes that its layers, indexes and state may have together; none: any number.
    #[serde(default)]
    pub max_bytes: Option<u64>,
}

/// The overlay in use becomes a layer of the snapshot, which only its index has to be written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFreeze {
    /// Takes the guest's writes from now on.
    pub overlay: FdIndex,
    /// Takes the index of the overlay that was in use.
    pub index: FdIndex,
}

/// What a VM does after its snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AfterSnapshot {
    /// Runs on at once, while memory is being written behind its back.
    Resume,
    /// Stays paused.
    Stay,
    /// Ends.
    Stop,
}

/// A snapshot that is complete. Times in microseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotReport {
    /// How long the guest stood still; with [`AfterSnapshot::Resume`] independent of how much it had written.
    pub stopped_us: u64,
    /// From the request to the last byte written (to files, not to storage).
    pub total_us: u64,
    /// What stopping consisted of.
    pub phases: FreezePhases,
    /// Chunks of memory that were looked at.
    pub candidates: u64,
    /// Chunks written to the memory layer.
    pub stored: u64,
    /// Chunks that are zero now and were not below; they take no space.
    pub zero: u64,
    /// What the processor of this host offers; a VM is only restored where it is the same.
    pub cpu: String,
    /// Number of vCPUs.
    pub vcpus: u8,
}

/// Parts of the time for which a guest stood still, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreezePhases {
    /// Until all vCPUs were out of the guest.
    pub pause_us: u64,
    /// Reading vCPUs and devices.
    pub state_us: u64,
    /// Finding the pages that were written.
    pub scan_us: u64,
    /// Making the process that writes memory while the guest runs on (or writing it, if it does not).
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
    /// How memory comes from the layers.
    pub source: MemorySource,
    /// In guest order, as many as were saved.
    pub disks: Vec<DiskConfig>,
    /// How fast all of them together may be.
    #[serde(default)]
    pub disk_limits: DiskLimits,
    /// Host-guest sockets, if there were any.
    pub vsock: Option<VsockConfig>,
    /// Network card, if there was one.
    pub net: Option<NetConfig>,
    /// [`crate::console::ConsoleRing`] that takes the serial console's output.
    pub console: FdIndex,
    /// Build everything but run no vCPU until [`crate::vm::Request::Resume`].
    #[serde(default)]
    pub paused: bool,
}

/// A layer and its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerFiles {
    /// Sparse file.
    pub file: FdIndex,
    /// Index ([`crate::layer::LayerIndex`]).
    pub index: FdIndex,
}

/// How a restored VM gets its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MemorySource {
    /// Mapped from the layers: pages come as they are touched and are shared with siblings until written.
    Map,
    /// Chunks of the working set (an index whose `stored` says which; without it, all chunks there are) are read at once into huge
    /// pages, the rest is mapped.
    Copy {
        /// Index file.
        working_set: Option<FdIndex>,
    },
}
