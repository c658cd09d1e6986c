//! virtio-blk (virtio 1.2 section 5.2): a disk of the guest. Vectored I/O moves data directly
//! between guest memory and the page cache of the host.
//!
//! A *layer* is the part of a memory or disk that one snapshot stores: the content that differs
//! from its ancestors. The *overlay* is the file that receives the disk writes of a guest. A
//! snapshot *freezes* the overlay: the file becomes a layer, and a new overlay receives later
//! writes. A *thaw* undoes this.

mod disk;
mod disk_limiter;
mod overlay;
mod request;
mod throttle;

pub use disk::{DiskBackend, DiskLayers, SharedOverlay};
pub use throttle::SharedDiskLimiter;

use super::device::RingState;
use super::device::chain::{DeferredKick, DrainStatus, check_queue, drain_throttled};
use super::{Activation, DeviceError, Interrupt, VirtioDevice};
use crate::GuestMemory;
use disk::{BLOCK_BYTES, Disk, SECTOR_BYTES};
use disk_limiter::DiskWork;
use jiffy_proto::layer::LayerIndex;
use jiffy_proto::snapshot::FileIdentity;
use nix::sys::epoll::EpollFlags;
use request::RequestServer;
use std::fs::File;
use std::io;
use std::sync::Arc;
use throttle::DiskThrottle;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use virtio_queue::Queue;

/// Size of the only queue, for requests.
const QUEUE_SIZES: [u16; 1] = [256];
/// Maximum number of data descriptors of a request: the queue size without header and status.
const SEG_MAX: u32 = 254;
/// Size of the reply to `GET_ID`, in bytes.
const ID_BYTES: usize = 20;
/// Maximum number of sectors in one discard or write-zeroes segment: 1 GiB.
const MAX_DISCARD_SECTORS: u32 = 1 << 21;
/// Maximum number of segments in one discard or write-zeroes request.
const MAX_DISCARD_SEGMENTS: usize = 16;
/// Maximum number of bytes moved before control returns to the event loop.
const BUDGET_BYTES: usize = 8 << 20;
/// Size of `struct virtio_blk_config` including the write-zeroes fields, in bytes.
const CONFIG_BYTES: usize = 60;

/// Error of creating a block device.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// The files do not form a valid disk.
    #[error("{name}: {cause}")]
    Disk {
        /// Device name.
        name: String,
        /// Cause.
        #[source]
        cause: std::io::Error,
    },
    /// The host has no free descriptors.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// State after the driver has activated the device.
struct ActiveBlock {
    memory: GuestMemory,
    queue: Queue,
    interrupt: Arc<dyn Interrupt>,
}

/// Block device.
pub struct Block {
    name: String,
    disk: Disk,
    flush_to_host: bool,
    active: Option<ActiveBlock>,
    deferred_kick: DeferredKick,
    /// Rate limit. `None` if unlimited.
    throttle: Option<DiskThrottle>,
    /// Error of the host's files that is not reported yet.
    warning: Option<String>,
    /// True once an error was reported. Only the first error is reported.
    warned: bool,
}

impl Block {
    /// Creates a disk named `name` (`blk0`, ...). The size of its files must be a multiple of 512
    /// bytes. The first 20 bytes of the name are the disk's serial number in the guest.
    pub fn new(name: impl Into<String>, backend: DiskBackend) -> Result<Self, BlockError> {
        let name = name.into();
        let disk = match Disk::new(backend) {
            Ok(disk) => disk,
            Err(cause) => return Err(BlockError::Disk { name, cause }),
        };
        Ok(Self {
            name,
            disk,
            flush_to_host: false,
            active: None,
            deferred_kick: DeferredKick::new()?,
            throttle: None,
            warning: None,
            warned: false,
        })
    }

    /// Limits the disk, number `disk` (below 64) of its guest, by `limiter`, which the guest's
    /// disks share. A request above the limit stays in its queue until the timer fires.
    pub fn limited(mut self, limiter: SharedDiskLimiter, disk: u32) -> Result<Self, BlockError> {
        self.throttle = Some(DiskThrottle::new(limiter, disk)?);
        Ok(self)
    }

    /// Sets whether a flush of the guest syncs the host's storage. By default it does not, and the
    /// device offers no flush: the host's page cache outlives the guest, and a sandbox does not
    /// survive a crash of its host.
    ///
    /// A VMM never enables this, so its filter ([`crate::seccomp`]) does not allow `fdatasync`.
    pub fn flush_to_host(mut self, yes: bool) -> Self {
        self.flush_to_host = yes;
        self
    }

    /// Returns the bit set of the 4 KiB blocks in the overlay: block `n` is bit `n % 64` of word `n
    /// / 64`. Empty without an overlay.
    pub fn owned_blocks(&self) -> &[u64] {
        self.disk.owned_blocks()
    }

    /// Returns whether the guest can write to the disk, which then has an overlay to freeze.
    pub fn writable(&self) -> bool {
        !self.disk.read_only()
    }

    /// Returns a handle of the file that receives the guest's writes.
    pub fn overlay(&self) -> SharedOverlay {
        self.disk.overlay()
    }

    /// Turns the guest's writes into a layer, and directs further writes to `overlay`, an empty
    /// file. Returns the layer's index.
    pub fn freeze(&mut self, overlay: File) -> io::Result<LayerIndex> {
        self.disk.freeze(overlay)
    }

    /// Undoes the last [`Self::freeze`].
    pub fn thaw(&mut self) -> io::Result<()> {
        self.disk.thaw()
    }

    /// Replaces all layers above the image by `layers`, and returns the former layers. The caller
    /// must then reset the device.
    pub fn revert(&mut self, layers: DiskLayers) -> Option<DiskLayers> {
        self.warning = None;
        self.warned = false;
        self.disk.revert(layers)
    }

    /// Merges two adjacent frozen layers into the upper one (a *fold*), if this disk has them. The
    /// file of the lower layer is closed.
    pub fn fold_layers(&mut self, lower: FileIdentity, upper: FileIdentity) {
        self.disk.fold_layers(lower, upper);
    }

    /// Returns the size of the disk in bytes.
    pub fn bytes(&self) -> u64 {
        self.disk.bytes()
    }

    /// `struct virtio_blk_config` (5.2.4).
    fn config(&self) -> [u8; CONFIG_BYTES] {
        let mut config = [0; CONFIG_BYTES];
        // Offsets of the fields in `struct virtio_blk_config`. Fields without a feature remain
        // zero.
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        // `capacity`, `seg_max` and `blk_size`.
        put(0, &(self.disk.bytes() / SECTOR_BYTES).to_le_bytes());
        put(12, &SEG_MAX.to_le_bytes());
        put(20, &512u32.to_le_bytes());
        // Offset 24: topology. The physical block has 2^3 sectors and `min_io_size` is 8 sectors,
        // so that writes cover whole blocks.
        put(24, &[3, 0, 8, 0]);
        // `num_queues`.
        put(34, &1u16.to_le_bytes());
        if !self.disk.read_only() {
            let segments = u32::try_from(MAX_DISCARD_SEGMENTS).unwrap_or(1);
            // `max_discard_sectors`, `max_discard_seg` and `discard_sector_alignment`.
            put(36, &MAX_DISCARD_SECTORS.to_le_bytes());
            put(40, &segments.to_le_bytes());
            put(
                44,
                &u32::try_from(BLOCK_BYTES / SECTOR_BYTES)
                    .unwrap_or(1)
                    .to_le_bytes(),
            );
            // `max_write_zeroes_sectors` and `max_write_zeroes_seg`.
            put(48, &MAX_DISCARD_SECTORS.to_le_bytes());
            put(52, &segments.to_le_bytes());
            // `write_zeroes_may_unmap`.
            put(56, &[1]);
        }
        config
    }
}

impl VirtioDevice for Block {
    fn device_id(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn features(&self) -> u64 {
        let mut features =
            1 << VIRTIO_BLK_F_SEG_MAX | 1 << VIRTIO_BLK_F_BLK_SIZE | 1 << VIRTIO_BLK_F_TOPOLOGY;
        if self.disk.read_only() {
            features |= 1 << VIRTIO_BLK_F_RO;
        } else {
            features |= 1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES;
            if self.flush_to_host {
                features |= 1 << VIRTIO_BLK_F_FLUSH;
            }
        }
        features
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let config = self.config();
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        for (to, from) in data.iter_mut().zip(config.iter().skip(offset)) {
            *to = *from;
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let queue = activation
            .queues
            .into_iter()
            .next()
            .ok_or_else(|| DeviceError::Host("no queue".into()))?;
        check_queue(&queue, &activation.memory)?;
        if let Some(throttle) = &mut self.throttle {
            throttle.start(activation.poller.clone())?;
        }
        self.deferred_kick.start(activation.poller)?;
        self.active = Some(ActiveBlock {
            memory: activation.memory,
            queue,
            interrupt: activation.interrupt,
        });
        Ok(())
    }

    fn rings(&self) -> Vec<RingState> {
        self.active
            .iter()
            .map(|a| RingState::of(&a.queue))
            .collect()
    }

    fn reset(&mut self) {
        self.active = None;
        self.deferred_kick.stop();
        if let Some(throttle) = &mut self.throttle {
            throttle.stop();
        }
    }

    fn queue_event(&mut self, index: usize) -> Result<(), DeviceError> {
        let (0, Some(active)) = (index, &mut self.active) else {
            return Ok(());
        };
        // The serial number, padded with zeroes.
        let mut id = [0; ID_BYTES];
        for (to, from) in id.iter_mut().zip(self.name.bytes()) {
            *to = from;
        }
        let mut server = RequestServer {
            disk: &mut self.disk,
            id,
            flush_to_host: self.flush_to_host,
            failed: None,
            zeroed_segments: 0,
        };
        let throttle = self.throttle.as_ref();
        let status = drain_throttled(
            &mut active.queue,
            &active.memory,
            active.interrupt.as_ref(),
            BUDGET_BYTES,
            || throttle.and_then(DiskThrottle::wait_for_tokens),
            |chain| {
                let bytes = chain.readable.len() + chain.writable.len();
                let written = server.serve(chain);
                if let Some(throttle) = throttle {
                    throttle.charge(DiskWork {
                        bytes: u64::try_from(bytes).unwrap_or(u64::MAX),
                        // Each zeroed segment is an operation on the host's file system.
                        requests: std::mem::take(&mut server.zeroed_segments).max(1),
                    });
                }
                written
            },
        )?;
        // Only the first error is reported: a full disk would otherwise cause a warning per
        // request.
        if let Some(error) = server.failed.filter(|_| !self.warned) {
            self.warned = true;
            self.warning = Some(format!(
                "{}: the host cannot serve this disk ({error}): unsynced writes may be lost",
                self.name
            ));
        }
        match (status, &mut self.throttle) {
            (DrainStatus::Throttled(wait), Some(throttle)) => throttle.wake_after(wait),
            (DrainStatus::Drained, _) => Ok(()),
            // The budget is spent. Continue after other events.
            _ => self.deferred_kick.schedule(0),
        }
    }

    fn take_warning(&mut self) -> Option<String> {
        self.warning.take()
    }

    fn host_event(&mut self, token: u32, _flags: EpollFlags) -> Result<(), DeviceError> {
        match token {
            DiskThrottle::TOKEN => self.queue_event(0),
            DeferredKick::TOKEN if self.deferred_kick.take() != 0 => self.queue_event(0),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
