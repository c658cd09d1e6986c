//! Messages of host and `jiffy-vmm`. Each is one JSON object in one `SOCK_SEQPACKET` packet;
//! descriptors travel beside it as `SCM_RIGHTS` and are referred to by their position
//! ([`FdIndex`]).

use crate::cpu_level::CpuLevel;
use crate::snapshot::{
    CapturedSnapshot, FoldedLayers, LayerFiles, RestoreConfig, RollbackConfig, RollbackReport,
    SnapshotConfig, SnapshotDecision, SnapshotReport,
};
use serde::{Deserialize, Serialize};
use std::num::NonZeroU64;

/// Position of a descriptor among those sent with the same message, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FdIndex(pub u8);

/// Version of the protocol between a controller and a VMM that an earlier one started; a controller
/// accepts no other.
pub const CONTROL_PROTOCOL_VERSION: u32 = 1;

/// Descriptor to which a `jiffy-vmm` process moves its control socket. It is given that as standard
/// input: a starter that puts others in place forks, and with much memory that takes milliseconds.
pub const CONTROL_FD: i32 = 3;

/// Name of a `jiffy-vmm` process that waits for its first request.
pub const SPARE_NAME: &str = "jiffy-vmm-spare";

/// Command line of a `jiffy-vmm` process in a jail.
pub mod jail {
    /// Argument of a process that makes the namespaces that VMMs enter. It writes [`READY`] to
    /// standard output when they exist, waits for a byte on standard input (its user namespace has
    /// its map now), writes [`READY`] when there is no file system in them any more, and exits when
    /// standard input is closed.
    pub const MAKE_ARGUMENT: &str = "--make-namespaces";
    /// Argument of a VMM that enters them, and takes a user of its own there, before it reads any
    /// request. The first message has them, in the order of [`NAMESPACES`], and nothing else; they
    /// become the descriptors from [`FIRST_FD`] on.
    pub const ENTER_ARGUMENT: &str = "--jailed";
    /// Byte that reports a completed step.
    pub const READY: u8 = b'+';
    /// The first namespace's descriptor.
    pub const FIRST_FD: i32 = super::CONTROL_FD + 1;
    /// Names in `/proc/PID/ns`. The first owns the others.
    pub const NAMESPACES: [&str; 5] = ["user", "net", "ipc", "uts", "mnt"];
    /// User (and group) on the host of a VMM with process id 0. Process ids are unique, and so are
    /// the users; the range is above those that distributions and systemd assign
    /// (<https://systemd.io/UIDS-GIDS/>).
    pub const FIRST_UID: u32 = 1_900_000_000;
    /// Number of users in the map: one more than Linux's largest process id (`PID_MAX_LIMIT`).
    pub const UIDS: u32 = (1 << 22) + 1;
}

/// Host to VMM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Makes KVM's objects of a VM before its configuration is known. Accepted once, before
    /// [`Request::Start`] or [`Request::Restore`]; not answered: what fails then fails with that
    /// one.
    Prepare {
        /// `/dev/kvm`, opened for reading and writing.
        kvm: FdIndex,
        /// Memory that the VM is likely to have, in MiB; 0: not known.
        #[serde(default)]
        memory_mib: u32,
    },
    /// Builds and boots the VM. Accepted once; answered by [`Event::Started`] or
    /// [`Event::Stopped`].
    Start(Box<VmConfig>),
    /// Makes the VM from a snapshot instead; answered likewise.
    Restore(Box<RestoreConfig>),
    /// Stops the vCPUs; answered by [`Event::Paused`].
    Pause,
    /// Resumes them; answered by [`Event::Resumed`].
    Resume,
    /// Takes a snapshot; answered by [`Event::Snapshotted`] or [`Event::SnapshotFailed`].
    Snapshot(SnapshotConfig),
    /// Puts the VM back to a snapshot, in the same process; answered by [`Event::RollbackRefused`],
    /// or by [`Event::RollbackBegun`] and then [`Event::RolledBack`] or [`Event::Stopped`]. Its
    /// network interface drops all frames until [`Request::FinishRollback`].
    Rollback(Box<RollbackConfig>),
    /// The agent has its identity after a rollback. Not answered.
    FinishRollback {
        /// The host's end of the agent's greeting, as in [`Request::Detach`].
        greeting: Option<FdIndex>,
    },
    /// Writes an index of the memory chunks that are present now, which for a VM restored with
    /// [`crate::snapshot::MemorySource::Map`] is its working set; answered by
    /// [`Event::WorkingSet`].
    WorkingSet {
        /// Takes the index.
        index: FdIndex,
        /// `/proc/PID/pagemap` of the VMM.
        pagemap: FdIndex,
        /// Takes an index of the pages that were written
        /// ([`crate::snapshot::RestoreConfig::populate`]).
        written: FdIndex,
    },
    /// Hands over one end of a connected Unix stream socket (the only descriptor) that becomes a
    /// vsock connection to `port` in the guest. Refused connections are closed without a byte.
    Connect {
        /// vsock port in the guest.
        port: u32,
    },
    /// Inflates the balloon until the guest holds at most `target_mib` less than its full size.
    Balloon {
        /// Size of the balloon in MiB.
        target_mib: u32,
    },
    /// Requests [`Event::Stats`].
    Stats,
    /// Detaches the VM's life from its controller's; later controllers connect to `listener`.
    /// Answered by [`Event::Detached`]. Until then a VM ends with its controller.
    #[serde(rename = "keep")]
    Detach {
        /// Listening `SOCK_SEQPACKET` socket that does not block.
        listener: FdIndex,
        /// New standard error, until then the controller's.
        log: Option<FdIndex>,
        /// The host's end of the agent's greeting: held open, so that the agent never notices a
        /// change of controllers.
        greeting: Option<FdIndex>,
        /// Id of the request that created the guest, for messages in `log`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        request_id: Option<String>,
    },
    /// Reattaches a new controller: requests the state of the VM; answered by
    /// [`Event::Reattached`].
    #[serde(rename = "recall")]
    Reattach,
    /// Commits or aborts the prepared snapshot ([`Event::Reattached`]`::prepared_snapshot`);
    /// answered by [`Event::SnapshotResolved`]. A further snapshot commits it, too.
    #[serde(rename = "settle")]
    ResolveSnapshot {
        /// Commit or abort.
        #[serde(rename = "happened")]
        decision: SnapshotDecision,
    },
    /// Aborts the captured snapshot that is being written ([`SnapshotConfig::captured`]); answered
    /// by [`Event::SnapshotFailed`], unless it is complete.
    AbortCapture,
    /// Uses the upper of two adjacent layers for the content of the lower one as well, and closes
    /// the lower one. Layers that the VM does not have side by side stay as they are. Not answered.
    FoldLayers(Box<FoldedLayers>),
    /// Ends the guest at once, without a shutdown. The VM ends once no captured snapshot
    /// ([`SnapshotConfig::captured`]) is being written any more.
    Stop,
}

/// VMM to host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The vCPUs run.
    Started(StartTimes),
    /// The guest opened a connection to `port` on the host; the only descriptor is its stream.
    GuestConnect {
        /// Port on the host, one of [`VsockConfig::host_ports`].
        port: u32,
    },
    /// A device violated its specification and was taken out of service; the VM goes on without it.
    DeviceFailed {
        /// Device name as in `/sys` of the host log: `blk0`, `vsock`, `net`, `rng`, `balloon`.
        device: String,
        /// The violation.
        reason: String,
    },
    /// The host cannot serve a disk any more, most often for want of space; sent once. The guest
    /// sees I/O errors and the VM goes on.
    DiskFailed {
        /// The disk, and the cause.
        reason: String,
    },
    /// Answer to [`Request::Stats`].
    Stats(VmStats),
    /// The guest is paused.
    Paused {
        /// Time from the request to the last vCPU out of the guest, in microseconds.
        stopped_us: u64,
    },
    /// The guest runs again.
    Resumed,
    /// Memory of a captured snapshot ([`SnapshotConfig::captured`]) is frozen and will be written.
    Captured {
        /// Time in microseconds for which the guest was stopped.
        stopped_us: u64,
    },
    /// The snapshot is complete.
    Snapshotted(SnapshotReport),
    /// The snapshot failed; the VM is in the state before it.
    SnapshotFailed {
        /// The failed operation and its object.
        reason: String,
        /// Upper bound of the bytes that it needs, if that exceeds its limit.
        #[serde(default)]
        needed_bytes: Option<u64>,
    },
    /// The rollback was refused or failed; the VM is as before, and runs if it did.
    RollbackRefused {
        /// The failed operation and its object.
        reason: String,
    },
    /// The guest's own pages are being dropped. Everything that the VMM reports from now on is
    /// about the guest as it was in the snapshot; a failure ends the VM.
    RollbackBegun,
    /// The guest runs from the snapshot.
    RolledBack(RollbackReport),
    /// Answer to [`Request::WorkingSet`].
    WorkingSet {
        /// Number of chunks, or none if this host cannot determine it.
        chunks: Option<u64>,
    },
    /// Answer to [`Request::Detach`].
    #[serde(rename = "kept")]
    Detached,
    /// Answer to [`Request::Reattach`], once no snapshot is being written any more but a captured
    /// one.
    #[serde(rename = "recalled")]
    Reattached {
        /// [`CONTROL_PROTOCOL_VERSION`] of the VMM.
        protocol: u32,
        /// The vCPUs run.
        running: bool,
        /// Prepared snapshot that the VMM has completed, and that is neither committed nor aborted.
        #[serde(rename = "undecided")]
        prepared_snapshot: Option<String>,
        /// Captured snapshot ([`SnapshotConfig::captured`]) that is being written, whose
        /// [`Event::Snapshotted`] or [`Event::SnapshotFailed`] follows, or that is
        /// `prepared_snapshot`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        captured: Option<Box<CapturedSnapshot>>,
        /// The VMM knows [`Request::Rollback`].
        #[serde(default)]
        rollback: bool,
        /// The VMM knows [`Request::FoldLayers`].
        #[serde(default)]
        fold: bool,
        /// The console ring.
        console: FdIndex,
        /// Overlays in use, of writable disks, in guest order; they may change when the snapshot is
        /// committed or aborted.
        overlays: Vec<FdIndex>,
    },
    /// Answer to [`Request::ResolveSnapshot`].
    #[serde(rename = "settled")]
    SnapshotResolved {
        /// The part of an abort that failed.
        failure: Option<String>,
    },
    /// The reason why the guest ended. Last message, unless a captured snapshot is being written.
    Stopped(StopCause),
}

/// Microseconds since the `jiffy-vmm` process began its `main`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartTimes {
    /// The configuration was received.
    pub config_us: u64,
    /// KVM objects existed and the kernel was in guest memory.
    pub loaded_us: u64,
    /// The vCPU threads were started.
    pub running_us: u64,
}

/// Counters since start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmStats {
    /// Exits to the VMM that were MMIO accesses.
    pub mmio_exits: u64,
    /// Exits to the VMM that were port accesses.
    pub pio_exits: u64,
    /// Present size of the balloon in MiB.
    pub balloon_mib: u32,
    /// VM exits, to the VMM or not; none if the kernel has no count.
    #[serde(default)]
    pub exits: Option<u64>,
}

/// Reason why a VM ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cause", rename_all = "snake_case")]
pub enum StopCause {
    /// The guest shut down or rebooted, orderly or after a panic (`panic=-1` reboots): the console
    /// has the reason.
    GuestReset,
    /// [`Request::Stop`], or the controller of a VM that was not detached is gone.
    Requested,
    /// The configuration was refused.
    BadConfig {
        /// The error in it.
        reason: String,
    },
    /// KVM or the host refused an operation.
    HostError {
        /// The operation and its object.
        reason: String,
    },
    /// Memory that is fetched while the guest runs did not arrive within its limit.
    MissingMemory {
        /// The limit, and the last failure.
        reason: String,
    },
    /// The guest did something after which no virtual machine can continue.
    GuestFault {
        /// The guest's action.
        reason: String,
    },
}

/// One microVM. Sizes are checked by the VMM, not trusted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmConfig {
    /// 1 to 8.
    pub vcpus: u8,
    /// 128 to 65,536 MiB.
    pub memory_mib: u32,
    /// `/dev/kvm`, opened for reading and writing.
    pub kvm: FdIndex,
    /// Uncompressed 64-bit ELF kernel.
    pub kernel: FdIndex,
    /// Initial RAM file system (cpio), if any.
    pub initrd: Option<FdIndex>,
    /// Kernel command line without the `virtio_mmio.device=` parameters, which the VMM adds.
    pub cmdline: String,
    /// In guest order: `/dev/vda`, `/dev/vdb`, ...
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
    /// Processor that the guest sees.
    #[serde(default, skip_serializing_if = "CpuLevel::is_host")]
    pub cpu_level: CpuLevel,
    /// [`crate::console::ConsoleRing`] that takes the serial console's output.
    pub console: FdIndex,
}

/// Limits of [`VmConfig`].
pub mod limits {
    /// Most vCPUs of one VM.
    pub const MAX_VCPUS: u8 = 8;
    /// Least guest memory in MiB.
    pub const MIN_MEMORY_MIB: u32 = 128;
    /// Most guest memory in MiB.
    pub const MAX_MEMORY_MIB: u32 = 65_536;
    /// Most disks of one VM.
    pub const MAX_DISKS: usize = 8;
    /// Longest kernel command line in bytes, including the VMM's additions.
    pub const MAX_CMDLINE: usize = 2_048;
}

/// One virtio-blk device. Sizes of descriptors must be multiples of 512 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum DiskConfig {
    /// The file as it is, read-only.
    ReadOnly {
        /// Image.
        image: FdIndex,
    },
    /// Read-only `base` with the guest's writes kept in `overlay` (a sparse file; grown to the
    /// disk's size).
    Overlay {
        /// Image below; its size is the size of the disk.
        base: FdIndex,
        /// File of the written blocks.
        overlay: FdIndex,
    },
    /// Like `Overlay`, with layers of snapshots in between.
    Layered {
        /// Image below; its size is the size of the disk.
        base: FdIndex,
        /// Oldest first; read-only.
        layers: Vec<LayerFiles>,
        /// File of written blocks; empty.
        overlay: FdIndex,
    },
}

/// Limits of the disks of one VM together, reads and writes. An idle VM may use the allowance of
/// one second at once. Not part of a snapshot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskLimits {
    /// Bytes per second; none: no limit.
    pub bytes_per_s: Option<NonZeroU64>,
    /// Requests per second; none: no limit. A range of the disk that is zeroed or discarded counts
    /// as one.
    pub requests_per_s: Option<NonZeroU64>,
}

/// virtio-vsock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockConfig {
    /// Context id of the guest, 3 or more.
    pub guest_cid: u32,
    /// Ports on the host that the guest may connect to; others are refused.
    pub host_ports: Vec<u32>,
}

/// virtio-net over a tap device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetConfig {
    /// Opened and named tap descriptor with `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`.
    pub tap: FdIndex,
    /// Guest's address.
    pub mac: [u8; 6],
    /// Largest frame payload in bytes.
    pub mtu: u16,
}
