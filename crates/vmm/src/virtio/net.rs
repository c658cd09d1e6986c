//! virtio-net (virtio 1.2 section 5.1): a network interface backed by a tap device.
//!
//! An *offload* leaves work on a frame to its receiver: the checksum, or the division of a TCP
//! stream into segments. The *gate* is closed during a rollback, so that no frame passes.

mod header;
mod receive;
mod tap;

use super::device::RingState;
use super::device::chain::{DeferredKick, DescriptorChain, check_queue, drain};
use super::{Activation, DeviceError, Interrupt, VirtioDevice};
use crate::GuestMemory;
use crate::poll::SlotPoller;
use header::HEADER_BYTES;
use nix::sys::epoll::EpollFlags;
use receive::{FrameReceiver, ReceiveQueue};
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;
use tap::{Tap, TapOffloads};
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF,
    VIRTIO_NET_F_MTU,
};
use virtio_queue::Queue;

/// Queues with frames for the guest, and with frames of the guest.
const RX_QUEUE: usize = 0;
const TX_QUEUE: usize = 1;
/// Sizes of the receive and transmit queues.
const QUEUE_SIZES: [u16; 2] = [256, 256];
/// Maximum size of a frame with its header: 64 KiB of IP, 14 bytes of Ethernet, 12 bytes of header
/// (5.1.6.3.1).
const MAX_FRAME_BYTES: usize = 65_562;
/// Maximum number of bytes sent before control returns to the event loop.
const TX_BUDGET_BYTES: usize = 2 << 20;
/// Token of the tap in the event loop.
const TAP_TOKEN: u32 = 0;
/// Minimum MTU of IPv4 (RFC 791).
const MIN_MTU: u16 = 68;
/// Maximum number of frames dropped from a tap at once, more than its queue holds.
const MAX_WAITING_FRAMES: usize = 4096;

/// Error of creating a network interface.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The descriptor is not a usable tap.
    #[error("tap: {0}")]
    Tap(#[from] std::io::Error),
    /// The MTU is too small for IP.
    #[error("mtu {0}: less than 68")]
    Mtu(u16),
    /// The host has no free descriptors.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Counters of an interface since its creation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NetCounters {
    /// Frames delivered to the guest.
    pub rx_frames: u64,
    /// Frames that are too large for the guest's buffers.
    pub rx_dropped: u64,
    /// Frames written to the tap.
    pub tx_frames: u64,
    /// Frames with an offload that was not negotiated, or that the tap rejected.
    pub tx_dropped: u64,
    /// Failed reads and writes of the tap, except when it was empty or full.
    pub tap_errors: u64,
}

/// Sends frames of the guest to the tap, and counts them.
#[derive(Debug, Default)]
struct FrameSender {
    frames: u64,
    dropped: u64,
    errors: u64,
}

/// State after the driver has activated the device.
struct ActiveNet {
    memory: GuestMemory,
    queues: Vec<Queue>,
    interrupt: Arc<dyn Interrupt>,
    features: u64,
    poller: SlotPoller,
}

/// Network interface.
pub struct Net {
    tap: Tap,
    mac: [u8; 6],
    mtu: u16,
    active: Option<ActiveNet>,
    deferred_kick: DeferredKick,
    rx: FrameReceiver,
    tx: FrameSender,
    /// True between `close_gate` and `open_gate`: no frames pass.
    closed: bool,
}

impl Net {
    /// Creates an interface over a tap opened with `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`. The guest
    /// sees `mac` and `mtu` (at least 68).
    pub fn new(tap: File, mac: [u8; 6], mtu: u16) -> Result<Self, NetError> {
        Self::over(Tap::new(tap)?, mac, mtu)
    }

    /// Creates an interface over a datagram socket instead of a tap. Every datagram is a frame with
    /// its 12-byte header.
    #[cfg(any(test, feature = "testing"))]
    pub fn over_datagrams(socket: File, mac: [u8; 6], mtu: u16) -> Result<Self, NetError> {
        Self::over(Tap::datagrams(socket)?, mac, mtu)
    }

    /// Creates an inactive interface over `tap`.
    fn over(tap: Tap, mac: [u8; 6], mtu: u16) -> Result<Self, NetError> {
        if mtu < MIN_MTU {
            return Err(NetError::Mtu(mtu));
        }
        Ok(Self {
            tap,
            mac,
            mtu,
            active: None,
            deferred_kick: DeferredKick::new()?,
            rx: FrameReceiver::new(),
            tx: FrameSender::default(),
            closed: false,
        })
    }

    /// Lets no frames pass until `open_gate`. The frames of this period belong to the time that is
    /// lost in a rollback: replies to the guest's earlier packets, or packets of its earlier
    /// connections.
    pub fn close_gate(&mut self) {
        self.closed = true;
    }

    /// Returns whether frames pass.
    pub fn is_open(&self) -> bool {
        !self.closed
    }

    /// Drops the frames that wait in the tap, and lets further frames pass.
    pub fn open_gate(&mut self) {
        if !std::mem::take(&mut self.closed) {
            return;
        }
        for _ in 0..MAX_WAITING_FRAMES {
            if !self.rx.drop_frame(&self.tap) {
                break;
            }
        }
        // If the limit was reached, frames remain, and the tap signals no new edge for them.
        // Read the tap even without a new edge.
        self.rx.readable = true;
        if self.active.is_some() {
            // Ignore the error: the next kick or frame also starts the receiver.
            let _ = self.deferred_kick.schedule(RX_QUEUE);
        }
    }

    /// Returns the counters since the creation.
    pub fn counters(&self) -> NetCounters {
        NetCounters {
            rx_frames: self.rx.frames,
            rx_dropped: self.rx.dropped,
            tx_frames: self.tx.frames,
            tx_dropped: self.tx.dropped,
            tap_errors: self.rx.errors + self.tx.errors,
        }
    }

    /// Moves waiting frames from the tap to the guest.
    fn receive(&mut self) -> Result<(), DeviceError> {
        // Frames wait in the tap until `open_gate` drops them.
        if self.closed {
            return Ok(());
        }
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let Some(queue) = active.queues.get_mut(RX_QUEUE) else {
            return Ok(());
        };
        let to = ReceiveQueue {
            queue,
            memory: &active.memory,
            interrupt: active.interrupt.as_ref(),
            mergeable: active.features >> VIRTIO_NET_F_MRG_RXBUF & 1 == 1,
        };
        if self.rx.run(&self.tap, to)? {
            self.deferred_kick.schedule(RX_QUEUE)?;
        }
        Ok(())
    }

    /// Sends the frames in the transmit queue, up to a limit of bytes, so that other devices are
    /// served.
    fn transmit(&mut self) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let Some(queue) = active.queues.get_mut(TX_QUEUE) else {
            return Ok(());
        };
        let (tx, features) = (&mut self.tx, active.features);
        // While the gate is closed, frames are taken from the guest and dropped.
        let tap = (!self.closed).then_some(&self.tap);
        let has_more = drain(
            queue,
            &active.memory,
            active.interrupt.as_ref(),
            TX_BUDGET_BYTES,
            |chain| {
                tx.send(tap, chain, features)?;
                Ok(0)
            },
        )?;
        if has_more {
            self.deferred_kick.schedule(TX_QUEUE)?;
        }
        Ok(())
    }
}

impl FrameSender {
    /// Sends one frame of the guest. Without `tap`, the frame is dropped.
    fn send(
        &mut self,
        tap: Option<&Tap>,
        chain: DescriptorChain<'_>,
        features: u64,
    ) -> Result<(), DeviceError> {
        let mut frame = chain.readable;
        // The guest chooses both lengths. The kernel would reject a longer frame only after copying
        // it.
        if !chain.writable.is_empty() || frame.len() > MAX_FRAME_BYTES {
            return Err(DeviceError::Guest(format!(
                "frame of {} bytes to send, {} bytes writable (5.1.6.2)",
                frame.len(),
                chain.writable.len()
            )));
        }
        let mut header = [0; HEADER_BYTES];
        frame
            .take(HEADER_BYTES)
            .ok_or_else(|| DeviceError::Guest("frame without a complete header (5.1.6)".into()))?
            .copy_to(&mut header);
        // `tap` is `None` while the gate is closed.
        let (Some(mut header), Some(tap)) = (header::sanitize(header, features), tap) else {
            self.dropped += 1;
            return Ok(());
        };
        let mut iovecs = vec![libc::iovec {
            iov_base: header.as_mut_ptr().cast(),
            iov_len: HEADER_BYTES,
        }];
        iovecs.extend(frame.iovecs());
        // A full tap drops the frame, like a network.
        match tap.write(&iovecs) {
            Ok(()) => self.frames += 1,
            Err(e) => {
                self.dropped += 1;
                self.errors += u64::from(e.kind() != std::io::ErrorKind::WouldBlock);
            }
        }
        Ok(())
    }
}

impl VirtioDevice for Net {
    fn device_id(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn name(&self) -> &str {
        "net"
    }

    fn features(&self) -> u64 {
        [
            VIRTIO_NET_F_CSUM,
            VIRTIO_NET_F_GUEST_CSUM,
            VIRTIO_NET_F_MTU,
            VIRTIO_NET_F_MAC,
            VIRTIO_NET_F_GUEST_TSO4,
            VIRTIO_NET_F_GUEST_TSO6,
            VIRTIO_NET_F_HOST_TSO4,
            VIRTIO_NET_F_HOST_TSO6,
            VIRTIO_NET_F_MRG_RXBUF,
        ]
        .iter()
        .fold(0, |features, bit| features | 1 << bit)
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    /// `struct virtio_net_config` (5.1.4): MAC address at 0, MTU at 10. Other fields belong to
    /// features that are not offered.
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0; 12];
        config[..6].copy_from_slice(&self.mac);
        config[10..].copy_from_slice(&self.mtu.to_le_bytes());
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        for (to, from) in data.iter_mut().zip(config.iter().skip(offset)) {
            *to = *from;
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let Activation {
            memory,
            queues,
            interrupt,
            features,
            poller,
        } = activation;
        for queue in &queues {
            check_queue(queue, &memory)?;
        }
        let has = |bit: u32| features >> bit & 1 == 1;
        self.tap
            .set_offloads(TapOffloads {
                csum: has(VIRTIO_NET_F_GUEST_CSUM),
                tso4: has(VIRTIO_NET_F_GUEST_TSO4),
                tso6: has(VIRTIO_NET_F_GUEST_TSO6),
            })
            .map_err(|e| DeviceError::Host(format!("tap offloads: {e}")))?;
        self.deferred_kick.start(poller.clone())?;
        // Edge-triggered: a tap with frames that the guest does not receive would always be ready.
        let edges = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        if let Err(e) = poller.add(self.tap.as_fd(), TAP_TOKEN, edges) {
            self.deferred_kick.stop();
            return Err(DeviceError::Host(format!("tap: epoll: {e}")));
        }
        self.active = Some(ActiveNet {
            memory,
            queues,
            interrupt,
            features,
            poller,
        });
        Ok(())
    }

    fn rings(&self) -> Vec<RingState> {
        let active = self.active.iter();
        active
            .flat_map(|a| a.queues.iter().map(RingState::of))
            .collect()
    }

    fn reset(&mut self) {
        if let Some(active) = self.active.take() {
            // Ignore the error: the descriptor is added by `activate` and only removed here.
            let _ = active.poller.remove(self.tap.as_fd());
        }
        self.deferred_kick.stop();
        // The gate remains as it is: a rollback closes it before it resets the device.
        self.rx.reset();
    }

    fn queue_event(&mut self, index: usize) -> Result<(), DeviceError> {
        match index {
            RX_QUEUE => self.receive(),
            TX_QUEUE => self.transmit(),
            _ => Ok(()),
        }
    }

    fn host_event(&mut self, token: u32, _flags: EpollFlags) -> Result<(), DeviceError> {
        match token {
            TAP_TOKEN => {
                self.rx.readable = true;
                self.receive()
            }
            DeferredKick::TOKEN => {
                let queues = self.deferred_kick.take();
                for index in [RX_QUEUE, TX_QUEUE]
                    .into_iter()
                    .filter(|i| queues >> i & 1 == 1)
                {
                    self.queue_event(index)?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        self.reset();
    }
}

#[cfg(test)]
mod tests;
