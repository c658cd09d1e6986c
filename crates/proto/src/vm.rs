//! Messages between the host and `jiffy-vmm`. Each message is one JSON object in one
//! `SOCK_SEQPACKET` packet. Descriptors are sent as `SCM_RIGHTS` in the same packet. A message
//! refers to its descriptors by their position ([`FdIndex`]).
//!
//! The *controller* is the process at the other end of the VMM's control socket, a daemon. A
//! *detached* VM continues to run without a controller, and a later daemon *reattaches* to it. A
//! *prepared* snapshot is complete, but neither committed nor aborted. A *captured* snapshot is
//! written after the guest has continued, by a process that outlives the controller and the guest.
//! An *overlay* is the file with the guest's writes to a disk.

use crate::cpu_level::CpuLevel;
use crate::snapshot::{
    CapturedSnapshot, FoldedLayers, LayerFiles, RestoreConfig, RollbackConfig, RollbackReport,
    SnapshotConfig, SnapshotDecision, SnapshotReport,
};
use serde::{Deserialize, Serialize};
use std::num::NonZeroU64;

/// Position, from 0, of a descriptor in the list of descriptors that are sent with the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FdIndex(pub u8);

/// Version of the control protocol. After a restart of the daemon, it may differ between the new
/// controller and a VMM that an earlier controller started. A controller accepts only its own
/// version.
pub const CONTROL_PROTOCOL_VERSION: u32 = 1;

/// Descriptor to which a `jiffy-vmm` process moves its control socket. The socket is passed as
/// standard input. To pass it as another descriptor, the parent would have to fork, which takes
/// milliseconds if the parent uses much memory.
pub const CONTROL_FD: i32 = 3;

/// Name of a `jiffy-vmm` process that waits for its first request.
pub const SPARE_NAME: &str = "jiffy-vmm-spare";

/// Command line of a `jiffy-vmm` process in a jail.
pub mod jail {
    /// Argument of a process that creates the namespaces for VMMs. It writes [`READY`] to standard
    /// output when the namespaces exist, and waits for a byte on standard input, which means that
    /// the user namespace has its map. It then removes all file systems from the namespaces and
    /// writes [`READY`] again. It exits when standard input is closed.
    pub const MAKE_ARGUMENT: &str = "--make-namespaces";
    /// Argument of a VMM that enters the namespaces and switches to its own user before it reads
    /// any request. The first message contains only the namespaces, in the order of [`NAMESPACES`].
    /// They become the descriptors from [`FIRST_FD`] on.
    pub const ENTER_ARGUMENT: &str = "--jailed";
    /// Byte that reports a completed step.
    pub const READY: u8 = b'+';
    /// Descriptor of the first namespace.
    pub const FIRST_FD: i32 = super::CONTROL_FD + 1;
    /// Names in `/proc/PID/ns`. The first namespace owns the others.
    pub const NAMESPACES: [&str; 5] = ["user", "net", "ipc", "uts", "mnt"];
    /// Host user (and group) of a hypothetical VMM with process id 0. The user of a VMM is this
    /// number plus its process id, so users are as unique as process ids. The range is above the
    /// ranges that distributions and systemd assign (<https://systemd.io/UIDS-GIDS/>).
    pub const FIRST_UID: u32 = 1_900_000_000;
    /// Number of users in the map: one more than the maximum process id of Linux (`PID_MAX_LIMIT`).
    pub const UIDS: u32 = (1 << 22) + 1;
}

/// Request of the host to a VMM. The names in messages (`rename`) must not change: VMMs of earlier
/// versions, which a new daemon reattaches to, use them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Creates the KVM objects of a VM before its configuration is known. Accepted once, before
    /// [`Request::Start`] or [`Request::Restore`]. Not answered: an error is reported by the
    /// request that follows.
    Prepare {
        /// `/dev/kvm`, opened for reading and writing.
        kvm: FdIndex,
        /// Probable memory size of the VM in MiB. 0 if unknown.
        #[serde(default)]
        memory_mib: u32,
    },
    /// Creates and boots the VM. Accepted once. Answered by [`Event::Started`] or
    /// [`Event::Stopped`].
    Start(Box<VmConfig>),
    /// Restores the VM from a snapshot instead of booting it. Answered as [`Request::Start`].
    Restore(Box<RestoreConfig>),
    /// Stops the vCPUs. Answered by [`Event::Paused`].
    Pause,
    /// Resumes the vCPUs. Answered by [`Event::Resumed`].
    Resume,
    /// Takes a snapshot. Answered by [`Event::Snapshotted`] or [`Event::SnapshotFailed`].
    Snapshot(SnapshotConfig),
    /// Rolls the VM back to a snapshot in the same process. Answered by [`Event::RollbackRefused`],
    /// or by [`Event::RollbackBegun`] and then [`Event::RolledBack`] or [`Event::Stopped`]. The
    /// network interface drops all frames until [`Request::FinishRollback`].
    Rollback(Box<RollbackConfig>),
    /// Reports that the agent has its identity after a rollback. Not answered.
    FinishRollback {
        /// Host's end of the connection of the agent's greeting, as in [`Request::Detach`].
        greeting: Option<FdIndex>,
    },
    /// Writes an index of the memory chunks that are in memory now. For a VM restored with
    /// [`crate::snapshot::MemorySource::Map`], these are its working set. Answered by
    /// [`Event::WorkingSet`].
    WorkingSet {
        /// Receives the index.
        index: FdIndex,
        /// `/proc/PID/pagemap` of the VMM.
        pagemap: FdIndex,
        /// Receives an index of the written pages ([`crate::snapshot::RestoreConfig::populate`]).
        written: FdIndex,
    },
    /// Passes one end of a connected Unix stream socket, the only descriptor of the message. It
    /// becomes a vsock connection to `port` in the guest. If the guest rejects the connection, the
    /// socket is closed without data.
    Connect {
        /// vsock port in the guest.
        port: u32,
    },
    /// Sets the target size of the balloon: the guest must return `target_mib` MiB to the host in
    /// total. 0 gives all memory back to the guest. Not answered.
    Balloon {
        /// Size of the balloon in MiB.
        target_mib: u32,
    },
    /// Requests [`Event::Stats`].
    Stats,
    /// Detaches the VM from its controller: the VM no longer terminates together with the
    /// controller. Later controllers connect to `listener`. Answered by [`Event::Detached`].
    #[serde(rename = "keep")]
    Detach {
        /// Non-blocking listening `SOCK_SEQPACKET` socket.
        listener: FdIndex,
        /// New standard error. Until then, the VMM uses the controller's standard error.
        log: Option<FdIndex>,
        /// Host's end of the connection of the agent's greeting. The VMM holds it open, so that a
        /// change of controllers is invisible to the agent.
        greeting: Option<FdIndex>,
        /// Id of the request that created the guest, for messages in `log`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        request_id: Option<String>,
    },
    /// Attaches a new controller and requests the state of the VM. Answered by
    /// [`Event::Reattached`].
    #[serde(rename = "recall")]
    Reattach,
    /// Commits or aborts the prepared snapshot ([`Event::Reattached`]`::prepared_snapshot`).
    /// Answered by [`Event::SnapshotResolved`]. The next snapshot also commits it.
    #[serde(rename = "settle")]
    ResolveSnapshot {
        /// Commit or abort.
        #[serde(rename = "happened")]
        decision: SnapshotDecision,
    },
    /// Aborts the captured snapshot that is being written ([`SnapshotConfig::captured`]). Answered
    /// by [`Event::SnapshotFailed`], unless the snapshot is complete.
    AbortCapture,
    /// Merges two adjacent layers: the VM uses the upper layer for the content of both, and closes
    /// the lower layer. Layers that are not adjacent in this VM are unchanged. Not answered.
    FoldLayers(Box<FoldedLayers>),
    /// Terminates the guest immediately, without a shutdown. The VM exits when no captured snapshot
    /// ([`SnapshotConfig::captured`]) is being written.
    Stop,
}

/// Event or answer of a VMM to the host. The names in messages must not change, as in [`Request`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The vCPUs were started.
    Started(StartTimes),
    /// The guest opened a connection to `port` on the host. The only descriptor is its stream.
    GuestConnect {
        /// Port on the host, one of [`VsockConfig::host_ports`].
        port: u32,
    },
    /// A device driver violated the specification of the device, which was disabled. The VM
    /// continues without it.
    DeviceFailed {
        /// Name of the device in the host's log: `blk0`, `vsock`, `net`, `rng`, `balloon`.
        device: String,
        /// The violation.
        reason: String,
    },
    /// The host can no longer serve a disk, usually because of a lack of disk space. Sent once. The
    /// guest receives I/O errors, and the VM continues.
    DiskFailed {
        /// Disk and cause.
        reason: String,
    },
    /// Answer to [`Request::Stats`].
    Stats(VmStats),
    /// The guest is paused.
    Paused {
        /// Time in microseconds from the request until the last vCPU had left the guest.
        stopped_us: u64,
    },
    /// The guest runs again.
    Resumed,
    /// The memory of a captured snapshot ([`SnapshotConfig::captured`]) is frozen and will be
    /// written.
    Captured {
        /// Time in microseconds for which the guest was stopped.
        stopped_us: u64,
    },
    /// The snapshot is complete.
    Snapshotted(SnapshotReport),
    /// The snapshot failed. The VM is in its previous state.
    SnapshotFailed {
        /// The failed operation and its object.
        reason: String,
        /// Upper bound of the required bytes, if it exceeds the limit.
        #[serde(default)]
        needed_bytes: Option<u64>,
    },
    /// The rollback was rejected or failed. The VM is in its previous state, and runs if it ran
    /// before.
    RollbackRefused {
        /// The failed operation and its object.
        reason: String,
    },
    /// The guest's private pages are being dropped. All later reports of the VMM are about the
    /// guest in the state of the snapshot. A failure terminates the VM.
    RollbackBegun,
    /// The rollback is complete. The guest runs from the snapshot.
    RolledBack(RollbackReport),
    /// Answer to [`Request::WorkingSet`].
    WorkingSet {
        /// Number of chunks. `None` if this host cannot determine it.
        chunks: Option<u64>,
    },
    /// Answer to [`Request::Detach`].
    #[serde(rename = "kept")]
    Detached,
    /// Answer to [`Request::Reattach`]. Sent when no snapshot is being written, except a captured
    /// one.
    #[serde(rename = "recalled")]
    Reattached {
        /// [`CONTROL_PROTOCOL_VERSION`] of the VMM.
        protocol: u32,
        /// Set if the vCPUs run.
        running: bool,
        /// Prepared snapshot, which is completed but neither committed nor aborted.
        #[serde(rename = "undecided")]
        prepared_snapshot: Option<String>,
        /// Captured snapshot ([`SnapshotConfig::captured`]). Either it is being written and
        /// [`Event::Snapshotted`] or [`Event::SnapshotFailed`] will follow, or it is
        /// `prepared_snapshot`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        captured: Option<Box<CapturedSnapshot>>,
        /// Set if the VMM supports [`Request::Rollback`].
        #[serde(default)]
        rollback: bool,
        /// Set if the VMM supports [`Request::FoldLayers`].
        #[serde(default)]
        fold: bool,
        /// Set if the VMM supports [`SnapshotConfig::disk_only`].
        #[serde(default)]
        disk_only: bool,
        /// Number of memory layers on which the next snapshot is based. 0 after a boot. `None` if
        /// the VMM does not report it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        memory_layers: Option<usize>,
        /// Console ring buffer.
        console: FdIndex,
        /// Current overlays of writable disks, in guest order. They may change when the snapshot is
        /// committed or aborted.
        overlays: Vec<FdIndex>,
    },
    /// Answer to [`Request::ResolveSnapshot`].
    #[serde(rename = "settled")]
    SnapshotResolved {
        /// Part of an abort that failed.
        failure: Option<String>,
    },
    /// Reason for the exit of the guest. Last message, unless a captured snapshot is being written.
    Stopped(StopCause),
}

/// Times in microseconds since the start of `main` of the `jiffy-vmm` process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartTimes {
    /// Time when the configuration was received.
    pub config_us: u64,
    /// Time when the KVM objects existed and the kernel was in guest memory.
    pub loaded_us: u64,
    /// Time when the vCPU threads were started.
    pub running_us: u64,
}

/// Counters since the start of the VMM process, and the current size of the balloon.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmStats {
    /// Number of exits to the VMM because of MMIO accesses.
    pub mmio_exits: u64,
    /// Number of exits to the VMM because of port accesses.
    pub pio_exits: u64,
    /// Current size of the balloon in MiB.
    pub balloon_mib: u32,
    /// Number of VM exits, both to the VMM and handled in the kernel. `None` if the kernel does not
    /// count them.
    #[serde(default)]
    pub exits: Option<u64>,
}

/// Reason for the exit of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cause", rename_all = "snake_case")]
pub enum StopCause {
    /// The guest shut down or rebooted, either in order or after a panic (`panic=-1` reboots). The
    /// console contains the reason.
    GuestReset,
    /// [`Request::Stop`], or the controller of a VM that was not detached has exited.
    Requested,
    /// The configuration was rejected.
    BadConfig {
        /// Error in the configuration.
        reason: String,
    },
    /// KVM or the host rejected an operation.
    HostError {
        /// Operation and its object.
        reason: String,
    },
    /// Memory that is fetched on demand did not arrive within the timeout.
    MissingMemory {
        /// Timeout and last failure.
        reason: String,
    },
    /// The guest performed an operation after which a virtual machine cannot continue.
    GuestFault {
        /// Operation of the guest.
        reason: String,
    },
}

/// Configuration of one microVM. The VMM does not trust it and checks all sizes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmConfig {
    /// Number of vCPUs, 1 to 8.
    pub vcpus: u8,
    /// Memory size, 128 to 65,536 MiB.
    pub memory_mib: u32,
    /// `/dev/kvm`, opened for reading and writing.
    pub kvm: FdIndex,
    /// Uncompressed 64-bit ELF kernel.
    pub kernel: FdIndex,
    /// Initial RAM file system (cpio), if any.
    pub initrd: Option<FdIndex>,
    /// Kernel command line without the `virtio_mmio.device=` parameters, which the VMM adds.
    pub cmdline: String,
    /// Disks in guest order: `/dev/vda`, `/dev/vdb`, ...
    pub disks: Vec<DiskConfig>,
    /// Limits of all disks together.
    #[serde(default)]
    pub disk_limits: DiskLimits,
    /// Host-guest sockets.
    pub vsock: Option<VsockConfig>,
    /// Network interface.
    pub net: Option<NetConfig>,
    /// Entropy device.
    pub rng: bool,
    /// Memory balloon with free-page reporting.
    pub balloon: bool,
    /// CPU that the guest sees.
    #[serde(default, skip_serializing_if = "CpuLevel::is_host")]
    pub cpu_level: CpuLevel,
    /// [`crate::console::ConsoleRing`] that receives the output of the serial console.
    pub console: FdIndex,
}

/// Limits of [`VmConfig`].
pub mod limits {
    /// Maximum number of vCPUs of one VM.
    pub const MAX_VCPUS: u8 = 8;
    /// Minimum guest memory in MiB.
    pub const MIN_MEMORY_MIB: u32 = 128;
    /// Maximum guest memory in MiB.
    pub const MAX_MEMORY_MIB: u32 = 65_536;
    /// Maximum number of disks of one VM.
    pub const MAX_DISKS: usize = 8;
    /// Maximum length of the kernel command line in bytes, including the VMM's additions.
    pub const MAX_CMDLINE: usize = 2_048;
}

/// One virtio-blk device. The size of its image must be a positive multiple of 512 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum DiskConfig {
    /// A file, used read-only.
    ReadOnly {
        /// Image.
        image: FdIndex,
    },
    /// Read-only `base`, with the guest's writes in `overlay`. The overlay is a sparse file, which
    /// the VMM enlarges to the size of the disk.
    Overlay {
        /// Image below the overlay. It determines the size of the disk.
        base: FdIndex,
        /// File with the written blocks.
        overlay: FdIndex,
    },
    /// Like `Overlay`, with layers of snapshots between `base` and `overlay`.
    Layered {
        /// Image below the layers. It determines the size of the disk.
        base: FdIndex,
        /// Layers, oldest first. Read-only.
        layers: Vec<LayerFiles>,
        /// File for written blocks. Must be empty.
        overlay: FdIndex,
    },
}

/// Limits for all disks of one VM together, reads and writes. After an idle time, the allowance of
/// one second may be used at once. The limits are not part of a snapshot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskLimits {
    /// Maximum bytes per second. `None` for no limit.
    pub bytes_per_s: Option<NonZeroU64>,
    /// Maximum requests per second. `None` for no limit. Zeroing or discarding a range of the disk
    /// counts as one request.
    pub requests_per_s: Option<NonZeroU64>,
}

/// virtio-vsock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockConfig {
    /// Context id of the guest, 3 or more.
    pub guest_cid: u32,
    /// Ports on the host to which the guest may connect. Connections to other ports are rejected.
    pub host_ports: Vec<u32>,
}

/// virtio-net over a tap device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetConfig {
    /// Descriptor of `/dev/net/tun` that is attached to a tap device. The flags of the device
    /// include `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`.
    pub tap: FdIndex,
    /// MAC address of the guest.
    pub mac: [u8; 6],
    /// Maximum payload of a frame in bytes.
    pub mtu: u16,
}
