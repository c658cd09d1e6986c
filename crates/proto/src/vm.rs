//! Host <-> `jiffy-vmm`. Every message is one JSON object in one `SOCK_SEQPACKET` packet; descriptors
//! travel beside it as `SCM_RIGHTS` and are named by their position ([`FdIndex`]).

use crate::snapshot::{LayerFiles, RestoreConfig, SnapshotConfig, SnapshotReport};
use serde::{Deserialize, Serialize};
use std::num::NonZeroU64;

/// Position of a descriptor among those sent with the same message, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FdIndex(pub u8);

/// Version of what a controller and a VMM that was started by an earlier one say to each other; a controller obeys no other.
pub const PROTOCOL: u32 = 1;

/// The descriptor on which a `jiffy-vmm` process finds its control socket.
pub const CONTROL_FD: i32 = 3;

/// How a `jiffy-vmm` process is told in which surroundings it lives.
pub mod jail {
    /// Argument of a process that makes the namespaces that VMMs enter. It says [`READY`] on standard output when they are there,
    /// waits for a byte on standard input (its user namespace has its map now), says [`READY`] when there is no file system in them
    /// any more, and leaves when standard input is closed.
    pub const MAKE_ARGUMENT: &str = "--make-namespaces";
    /// Argument of a VMM that enters them, and takes a user of its own there, before it reads a word. They are the descriptors from
    /// [`FIRST_FD`] on, in the order of [`NAMESPACES`].
    pub const ENTER_ARGUMENT: &str = "--jailed";
    /// That step is done.
    pub const READY: u8 = b'+';
    /// The first namespace's descriptor.
    pub const FIRST_FD: i32 = super::CONTROL_FD + 1;
    /// Names in `/proc/PID/ns`. The first owns the others.
    pub const NAMESPACES: [&str; 5] = ["user", "net", "ipc", "uts", "mnt"];
    /// User (and group) on the host of a VMM with process id 0. Process ids are unique, and so are the users; the range is above those
    /// that distributions and systemd hand out (<https://systemd.io/UIDS-GIDS/>).
    pub const FIRST_UID: u32 = 1_900_000_000;
    /// So many users are in the map: one more than Linux's largest process id (`PID_MAX_LIMIT`).
    pub const UIDS: u32 = (1 << 22) + 1;
}

/// Host to VMM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Builds and boots the VM. Accepted once; answered by [`Event::Started`] or [`Event::Stopped`].
    Start(Box<VmConfig>),
    /// Makes the VM from a snapshot instead; answered likewise.
    Restore(Box<RestoreConfig>),
    /// Stops the vCPUs; answered by [`Event::Paused`].
    Pause,
    /// Lets them go on; answered by [`Event::Resumed`].
    Resume,
    /// Takes a snapshot; answered by [`Event::Snapshotted`] or [`Event::SnapshotFailed`].
    Snapshot(SnapshotConfig),
    /// Writes an index of the memory chunks that are present now, which is what a VM restored with
    /// [`crate::snapshot::MemorySource::Map`] has touched; answered by [`Event::WorkingSet`].
    WorkingSet {
        /// Takes the index.
        index: FdIndex,
        /// `/proc/PID/pagemap` of the VMM.
        pagemap: FdIndex,
    },
    /// Hands over one end of a connected Unix stream socket (the only descriptor) that becomes a vsock
    /// connection to `port` in the guest. Refused connections are closed without a byte.
    Connect {
        /// vsock port in the guest.
        port: u32,
    },
    /// Asks the guest to give back memory until it holds at most `target_mib` less than its full size.
    Balloon {
        /// Size of the balloon in MiB: how much the guest is to give back.
        target_mib: u32,
    },
    /// Asks for [`Event::Stats`].
    Stats,
    /// From now on the VM outlives its controller, and later ones arrive at `listener`; answered by [`Event::Kept`]. Until then a
    /// VM ends with its controller.
    Keep {
        /// Listening `SOCK_SEQPACKET` socket that does not block.
        listener: FdIndex,
        /// Becomes standard error, which is its controller's until then.
        log: Option<FdIndex>,
        /// The host's end of the agent's greeting: held open, so that the agent never notices that controllers change.
        greeting: Option<FdIndex>,
    },
    /// A new controller asks what there is; answered by [`Event::Recalled`].
    Recall,
    /// Decides whether the last snapshot happened ([`Event::Recalled`]`::undecided`); answered by [`Event::Settled`]. A further
    /// snapshot says yes without a word.
    Settle {
        /// Otherwise the VM lies again on what it lay on before.
        happened: bool,
    },
    /// Ends the VM at once, without asking the guest.
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
        /// Port the guest asked for; one of [`VsockConfig::host_ports`].
        port: u32,
    },
    /// A device broke its contract and was taken out of service; the VM goes on without it.
    DeviceFailed {
        /// Device name as in `/sys` of the host log: `blk0`, `vsock`, `net`, `rng`, `balloon`.
        device: String,
        /// What the guest did.
        reason: String,
    },
    /// The host cannot serve a disk any more, first of all for want of room; told once. The guest sees I/O errors and the VM goes on.
    DiskFailed {
        /// Which disk, and why.
        reason: String,
    },
    /// Answer to [`Request::Stats`].
    Stats(VmStats),
    /// The guest stands still.
    Paused {
        /// Time from the request to the last vCPU out of the guest, in microseconds.
        stopped_us: u64,
    },
    /// The guest goes on.
    Resumed,
    /// The snapshot is complete.
    Snapshotted(SnapshotReport),
    /// There is no snapshot; the VM is as it was before.
    SnapshotFailed {
        /// What failed, on what.
        reason: String,
        /// Bytes that it would have had at most, if they are more than it might have.
        #[serde(default)]
        needed_bytes: Option<u64>,
    },
    /// Answer to [`Request::WorkingSet`].
    WorkingSet {
        /// Number of chunks, or none if this host cannot tell.
        chunks: Option<u64>,
    },
    /// Answer to [`Request::Keep`].
    Kept,
    /// Answer to [`Request::Recall`], once no snapshot is being written any more.
    Recalled {
        /// [`PROTOCOL`] of the VMM.
        protocol: u32,
        /// Whether the vCPUs run.
        running: bool,
        /// Snapshot that the VMM has completed without hearing whether it counts.
        undecided: Option<String>,
        /// The console ring.
        console: FdIndex,
        /// Overlays in use, of disks that can be written, in guest order; they may be others once it is settled.
        overlays: Vec<FdIndex>,
    },
    /// Answer to [`Request::Settle`].
    Settled {
        /// What could not be undone.
        failure: Option<String>,
    },
    /// Last message: why the VM ended.
    Stopped(StopCause),
}

/// Microseconds since the `jiffy-vmm` process began its `main`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartTimes {
    /// The configuration had arrived.
    pub config_us: u64,
    /// KVM objects existed and the kernel was in guest memory.
    pub loaded_us: u64,
    /// The vCPU threads were let go.
    pub running_us: u64,
}

/// Counters since start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmStats {
    /// Exits to the VMM that were MMIO accesses.
    pub mmio_exits: u64,
    /// Exits to the VMM that were port accesses.
    pub pio_exits: u64,
    /// MiB the balloon holds now.
    pub balloon_mib: u32,
    /// Times that KVM left the guest, to the VMM or not; none if the kernel does not tell.
    #[serde(default)]
    pub exits: Option<u64>,
}

/// Why a VM ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cause", rename_all = "snake_case")]
pub enum StopCause {
    /// The guest shut down or rebooted in an orderly way or after a panic (`panic=-1` reboots): the console tells.
    GuestReset,
    /// [`Request::Stop`], or the controller of a VM that was not to be kept went away.
    Requested,
    /// The configuration was refused.
    BadConfig {
        /// What was wrong with it.
        reason: String,
    },
    /// KVM or the host refused something.
    HostError {
        /// What, on what.
        reason: String,
    },
    /// The guest did something no virtual machine can go on from.
    GuestFault {
        /// What it did.
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
    /// Kernel command line without the `virtio_mmio.device=` words, which the VMM adds.
    pub cmdline: String,
    /// In guest order: `/dev/vda`, `/dev/vdb`, ...
    pub disks: Vec<DiskConfig>,
    /// How fast all of them together may be.
    #[serde(default)]
    pub disk_limits: DiskLimits,
    /// Host-guest sockets.
    pub vsock: Option<VsockConfig>,
    /// Network card.
    pub net: Option<NetConfig>,
    /// Entropy device.
    pub rng: bool,
    /// Memory balloon with free-page reporting.
    pub balloon: bool,
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
    /// Longest kernel command line in bytes, including what the VMM adds.
    pub const MAX_CMDLINE: usize = 2_048;
}

/// One virtio-blk device. Sizes of descriptors must be multiples of 512 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum DiskConfig {
    /// The file as it is, never written.
    ReadOnly {
        /// Image.
        image: FdIndex,
    },
    /// `base` as it is, with the guest's writes kept in `overlay` (a sparse file; grown to the disk's size).
    Overlay {
        /// Image below; its size is the size of the disk.
        base: FdIndex,
        /// Where written blocks go; empty or from an earlier VM it must not be.
        overlay: FdIndex,
    },
    /// As `Overlay`, with layers of snapshots in between.
    Layered {
        /// Image below; its size is the size of the disk.
        base: FdIndex,
        /// Oldest first; never written.
        layers: Vec<LayerFiles>,
        /// Where written blocks go; empty.
        overlay: FdIndex,
    },
}

/// What the disks of one VM may take of the host, reading and writing together. A VM that rested may take at once what a second
/// allows. Nothing of this is part of a snapshot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskLimits {
    /// Bytes per second; none: as many as it can.
    pub bytes_per_s: Option<NonZeroU64>,
    /// Requests per second; none: as many as it can. A piece of the disk that is zeroed or discarded counts as one.
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
    /// Address the guest sees.
    pub mac: [u8; 6],
    /// Largest frame payload in bytes.
    pub mtu: u16,
}
