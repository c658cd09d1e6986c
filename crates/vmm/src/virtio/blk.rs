//! virtio-blk (virtio 1.2 section 5.2): a disk of the guest, its data moved by vectored I/O straight between guest
//! memory and the page cache.

mod disk;
mod limiter;
mod overlay;
mod request;
mod throttle;

pub use disk::Backend;
pub use throttle::SharedLimiter;

use super::device::RingState;
use super::device::chain::{Again, Left, check_queue, drain_held};
use super::{Activation, DeviceError, Interrupt, VirtioDevice};
use crate::GuestMemory;
use disk::{BLOCK, Disk, SECTOR};
use jiffy_proto::layer::LayerIndex;
use limiter::Work;
use nix::sys::epoll::EpollFlags;
use request::Server;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use throttle::Throttle;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use virtio_queue::Queue;

const QUEUE_SIZES: [u16; 1] = [256];
/// Data descriptors of one request: the queue less header and status.
const SEG_MAX: u32 = 254;
/// Bytes of the answer to `GET_ID`.
const ID_BYTES: usize = 20;
/// Most sectors in one discard or write-zeroes segment: 1 GiB.
const MAX_DISCARD_SECTORS: u32 = 1 << 21;
/// Most segments in one discard or write-zeroes request.
const MAX_DISCARD_SEGMENTS: usize = 16;
/// Most data moved before the event loop gets its turn.
const BUDGET: usize = 8 << 20;
/// Bytes of `struct virtio_blk_config` up to the end of the write-zeroes fields.
const CONFIG: usize = 60;

/// A block device that cannot be.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// The files are no disk.
    #[error("{name}: {cause}")]
    Disk {
        /// Device name.
        name: String,
        /// What was wrong.
        #[source]
        cause: std::io::Error,
    },
    /// The host has no descriptor left.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

struct Active {
    memory: GuestMemory,
    queue: Queue,
    interrupt: Arc<dyn Interrupt>,
}

/// A block device.
pub struct Block {
    name: String,
    disk: Disk,
    flush_to_host: bool,
    active: Option<Active>,
    again: Again,
    /// None: it is as fast as it can be.
    throttle: Option<Throttle>,
    /// Why the host failed, until it is told.
    warning: Option<String>,
    /// Whether it was told once.
    warned: bool,
}

impl Block {
    /// A disk called `name` (`blk0`, ...) over files whose size is a multiple of 512 bytes. The first 20 bytes of the
    /// name are the disk's serial in the guest.
    pub fn new(name: impl Into<String>, backend: Backend) -> Result<Self, BlockError> {
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
            again: Again::new()?,
            throttle: None,
            warning: None,
            warned: false,
        })
    }

    /// The same as disk number `disk` (below 64) of a guest whose disks are no faster together than `limiter` allows. A request
    /// that is too early stays in its queue, which nobody looks at before its time.
    pub fn limited(mut self, limiter: SharedLimiter, disk: u32) -> Result<Self, BlockError> {
        self.throttle = Some(Throttle::new(limiter, disk)?);
        Ok(self)
    }

    /// Whether a flush of the guest reaches the host's storage. By default it does not, and the guest is told that
    /// there is nothing to flush: the host's page cache outlives any guest, and a sandbox does not outlive its host.
    ///
    /// Nothing turns it on in a VMM yet, and so its filter ([`crate::seccomp`]) has no call for it.
    pub fn flush_to_host(mut self, yes: bool) -> Self {
        self.flush_to_host = yes;
        self
    }

    /// Which 4 KiB blocks the overlay holds: block `n` is bit `n % 64` of word `n / 64`. Empty without overlay.
    pub fn owned_blocks(&self) -> &[u64] {
        self.disk.owned_blocks()
    }

    /// Whether the guest can write, and so whether the disk has an overlay to freeze.
    pub fn writable(&self) -> bool {
        !self.disk.read_only()
    }

    /// Another descriptor of the file that takes the guest's writes.
    pub fn overlay(&self) -> io::Result<Option<OwnedFd>> {
        self.disk
            .overlay()
            .map(AsFd::as_fd)
            .map(|fd| fd.try_clone_to_owned())
            .transpose()
    }

    /// Makes what the guest wrote a layer and lets it write to `overlay`, an empty file. Returns the layer's index.
    pub fn freeze(&mut self, overlay: File) -> io::Result<LayerIndex> {
        self.disk.freeze(overlay)
    }

    /// Undoes the last [`Self::freeze`].
    pub fn thaw(&mut self) -> io::Result<()> {
        self.disk.thaw()
    }

    /// Size of the disk in bytes.
    pub fn bytes(&self) -> u64 {
        self.disk.bytes()
    }

    /// `struct virtio_blk_config` (5.2.4).
    fn config(&self) -> [u8; CONFIG] {
        let mut config = [0; CONFIG];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &(self.disk.bytes() / SECTOR).to_le_bytes());
        put(12, &SEG_MAX.to_le_bytes());
        put(20, &512u32.to_le_bytes());
        // Physical block 2^3 sectors, best I/O size 8 sectors, so that writes own whole blocks.
        put(24, &[3, 0, 8, 0]);
        put(34, &1u16.to_le_bytes());
        if !self.disk.read_only() {
            let segments = u32::try_from(MAX_DISCARD_SEGMENTS).unwrap_or(1);
            put(36, &MAX_DISCARD_SECTORS.to_le_bytes());
            put(40, &segments.to_le_bytes());
            put(
                44,
                &u32::try_from(BLOCK / SECTOR).unwrap_or(1).to_le_bytes(),
            );
            put(48, &MAX_DISCARD_SECTORS.to_le_bytes());
            put(52, &segments.to_le_bytes());
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
        self.again.start(activation.poller)?;
        self.active = Some(Active {
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
        self.again.stop();
        if let Some(throttle) = &mut self.throttle {
            throttle.stop();
        }
    }

    fn queue_event(&mut self, index: usize) -> Result<(), DeviceError> {
        let (0, Some(active)) = (index, &mut self.active) else {
            return Ok(());
        };
        let mut id = [0; ID_BYTES];
        for (to, from) in id.iter_mut().zip(self.name.bytes()) {
            *to = from;
        }
        let mut server = Server {
            disk: &mut self.disk,
            id,
            flush_to_host: self.flush_to_host,
            failed: None,
            zeroed: 0,
        };
        let throttle = self.throttle.as_ref();
        let left = drain_held(
            &mut active.queue,
            &active.memory,
            active.interrupt.as_ref(),
            BUDGET,
            || throttle.and_then(Throttle::hold),
            |chain| {
                let bytes = chain.readable.len() + chain.writable.len();
                let written = server.serve(chain);
                if let Some(throttle) = throttle {
                    throttle.charge(Work {
                        bytes: u64::try_from(bytes).unwrap_or(u64::MAX),
                        // Each piece that is zeroed is an operation of the host's file system.
                        requests: std::mem::take(&mut server.zeroed).max(1),
                    });
                }
                written
            },
        )?;
        if let Some(error) = server.failed.filter(|_| !self.warned) {
            self.warned = true;
            self.warning = Some(format!(
                "{}: the host cannot serve this disk ({error}): what was written and not synced may be lost",
                self.name
            ));
        }
        match (left, &mut self.throttle) {
            (Left::Held(wait), Some(throttle)) => throttle.wake_after(wait),
            (Left::Nothing, _) => Ok(()),
            _ => self.again.schedule(0),
        }
    }

    fn take_warning(&mut self) -> Option<String> {
        self.warning.take()
    }

    fn host_event(&mut self, token: u32, _flags: EpollFlags) -> Result<(), DeviceError> {
        match token {
            Throttle::TOKEN => self.queue_event(0),
            Again::TOKEN if self.again.take() != 0 => self.queue_event(0),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
