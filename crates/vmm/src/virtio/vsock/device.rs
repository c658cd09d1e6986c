//! Vsock device: rings, interrupts and the timer.

use super::header::{HEADER_BYTES, VsockHeader};
use super::muxer::Muxer;
use super::{GuestConnect, VsockConfig, VsockConnectError};
use crate::GuestMemory;
use crate::poll::SlotPoller;
use crate::virtio::device::RingState;
use crate::virtio::device::chain::{check_queue, next_chain};
use crate::virtio::{Activation, DeviceError, Interrupt, VirtioDevice};
use nix::sys::epoll::EpollFlags;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vmm_sys_util::timerfd::TimerFd;

/// Device id (virtio 1.2 section 5).
const DEVICE_ID: u32 = 19;
/// Receive, transmit, event. A Linux guest fills the receive queue with 4 KiB buffers, and 128 of
/// them hold more than the credit of one connection. It posts 8 event buffers.
const QUEUE_SIZES: [u16; 3] = [128, 128, 8];
const RX_QUEUE: usize = 0;
const TX_QUEUE: usize = 1;
const EVENT_QUEUE: usize = 2;
/// Most packets in each direction before control returns to the event loop.
const MAX_BATCH_PACKETS: usize = 512;
/// Token of the timer.
const TIMER_TOKEN: u32 = 0;
/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET` (section 5.10.6.7), a le32.
const EVENT_TRANSPORT_RESET: [u8; 4] = [0; 4];

/// Virtio-vsock device.
pub struct Vsock {
    config: VsockConfig,
    listener: Box<dyn GuestConnect>,
    active: Option<ActiveVsock>,
}

struct ActiveVsock {
    memory: GuestMemory,
    interrupt: Arc<dyn Interrupt>,
    rx: Queue,
    tx: Queue,
    event: Queue,
    timer: VsockTimer,
    muxer: Muxer,
    /// True while a transport reset waits for an event buffer.
    reset_due: bool,
    /// True if transmit packets remain because the batch was full.
    tx_left: bool,
}

impl Vsock {
    /// Creates a device whose guest may connect to `config.host_ports`; `listener` gets the
    /// streams.
    pub fn new(config: VsockConfig, listener: Box<dyn GuestConnect>) -> Self {
        Self {
            config,
            listener,
            active: None,
        }
    }

    /// Number of connections, those being set up and torn down included.
    pub fn connections(&self) -> usize {
        self.active.as_ref().map_or(0, |a| a.muxer.len())
    }

    /// Joins `stream`, a connected Unix stream socket, to `port` in the guest. If the guest
    /// refuses, does not answer within five seconds or has no driver, the stream is closed without
    /// a byte.
    pub fn connect(&mut self, port: u32, stream: OwnedFd) -> Result<(), VsockConnectError> {
        let active = self.active.as_mut().ok_or(VsockConnectError::NotActive)?;
        active.muxer.connect(port, stream)?;
        Ok(self.run(false)?)
    }

    /// Closes the host's side of every connection; touches no guest memory. The guest runs no more.
    pub fn disconnect(&mut self) {
        if let Some(active) = &mut self.active {
            active.muxer.clear();
        }
    }

    /// Drops every connection and sends the guest a transport reset event (section 5.10.6.7), as
    /// after a restore. The event is sent as soon as the guest has an event buffer.
    pub fn transport_reset(&mut self) -> Result<(), DeviceError> {
        if let Some(active) = &mut self.active {
            active.muxer.clear();
            active.reset_due = true;
        }
        self.run(false)
    }

    #[cfg(test)]
    pub(super) fn set_timeouts(&mut self, timeouts: super::connection::VsockTimeouts) {
        if let Some(active) = &mut self.active {
            active.muxer.timeouts = timeouts;
        }
    }

    /// Serves the rings and interrupts at most once. A failed device releases everything.
    fn run(&mut self, transmit: bool) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let outcome = active.run(transmit, self.listener.as_mut());
        if outcome.is_err() {
            self.active = None;
        }
        outcome
    }
}

impl VirtioDevice for Vsock {
    fn device_id(&self) -> u32 {
        DEVICE_ID
    }

    fn name(&self) -> &str {
        "vsock"
    }

    fn features(&self) -> u64 {
        // Without a negotiated socket type there are only streams (section 5.10.3).
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let config = u64::from(self.config.guest_cid).to_le_bytes();
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let known = config.get(start..).unwrap_or_default();
        for (to, from) in data.iter_mut().zip(known) {
            *to = *from;
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.reset();
        self.active = Some(ActiveVsock::new(&self.config, activation)?);
        Ok(())
    }

    fn rings(&self) -> Vec<RingState> {
        let active = self.active.iter();
        active
            .flat_map(|a| [&a.rx, &a.tx, &a.event].map(RingState::of))
            .collect()
    }

    /// Drops the connections: they do not survive a restore.
    fn restored(&mut self) -> Result<(), DeviceError> {
        self.transport_reset()
    }

    fn reset(&mut self) {
        self.active = None;
    }

    fn queue_event(&mut self, index: usize) -> Result<(), DeviceError> {
        self.run(index == TX_QUEUE)
    }

    fn host_event(&mut self, token: u32, flags: EpollFlags) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let mut transmit = false;
        if token == TIMER_TOKEN {
            active.timer.clear()?;
            active.muxer.expire();
            transmit = active.tx_left;
        } else {
            active.muxer.stream_event(token, flags);
        }
        self.run(transmit)
    }
}

fn ring(error: virtio_queue::Error) -> DeviceError {
    DeviceError::Guest(format!("ring: {error}"))
}

fn guest(what: &str) -> DeviceError {
    DeviceError::Guest(what.into())
}

impl ActiveVsock {
    fn new(config: &VsockConfig, activation: Activation) -> Result<Self, DeviceError> {
        let Activation {
            memory,
            queues,
            interrupt,
            poller,
            ..
        } = activation;
        let Ok([mut rx, tx, event]) = <[Queue; 3]>::try_from(queues) else {
            return Err(guest("vsock has three queues"));
        };
        for queue in [&rx, &tx, &event] {
            if !queue.ready() {
                return Err(guest("a queue was not set up"));
            }
            check_queue(queue, &memory)?;
        }
        rx.disable_notification(&memory).map_err(ring)?;
        Ok(Self {
            memory,
            interrupt,
            rx,
            tx,
            event,
            timer: VsockTimer::new(poller.clone())?,
            muxer: Muxer::new(config.guest_cid, config.host_ports.clone(), poller),
            reset_due: false,
            tx_left: false,
        })
    }

    fn run(&mut self, transmit: bool, listener: &mut dyn GuestConnect) -> Result<(), DeviceError> {
        let mut used = [false; 3];
        if transmit {
            used[TX_QUEUE] = self.drain_tx(listener)?;
        }
        let (used_rx, rx_left) = self.fill_rx()?;
        used[RX_QUEUE] = used_rx;
        used[EVENT_QUEUE] = self.send_reset()?;

        let mut interrupt = false;
        for (queue, used) in [&mut self.rx, &mut self.tx, &mut self.event]
            .into_iter()
            .zip(used)
        {
            interrupt |= used && queue.needs_notification(&self.memory).map_err(ring)?;
        }
        if interrupt {
            self.interrupt.queue();
        }
        let at = if rx_left || self.tx_left {
            Some(Instant::now())
        } else {
            self.muxer.wake_at()
        };
        self.timer.fire_by(at)
    }

    /// Receives packets from the guest; returns true if there were any.
    fn drain_tx(&mut self, listener: &mut dyn GuestConnect) -> Result<bool, DeviceError> {
        let mut used = false;
        self.tx_left = false;
        // Iterations are counted rather than packets: a guest that keeps moving its index gets no
        // more time than others.
        for _ in 0..MAX_BATCH_PACKETS {
            let Some(mut chain) = next_chain(&mut self.tx, &self.memory)? else {
                if self.tx.enable_notification(&self.memory).map_err(ring)? {
                    continue;
                }
                return Ok(used);
            };
            let mut header = [0; HEADER_BYTES];
            let Some(front) = chain.readable.take(HEADER_BYTES) else {
                return Err(guest("vsock packet shorter than its header (5.10.6)"));
            };
            front.copy_to(&mut header);
            let header = VsockHeader::from_bytes(&header);
            self.muxer
                .receive(&header, &mut chain.readable, &mut *listener);
            self.tx
                .add_used(&self.memory, chain.head, 0)
                .map_err(ring)?;
            used = true;
        }
        self.tx_left = true;
        Ok(used)
    }

    /// Sends packets to the guest; returns if there were any, and if some remain although there are
    /// buffers.
    fn fill_rx(&mut self) -> Result<(bool, bool), DeviceError> {
        let mut used = false;
        for _ in 0..MAX_BATCH_PACKETS {
            if !self.muxer.has_packet() {
                self.rx.disable_notification(&self.memory).map_err(ring)?;
                return Ok((used, false));
            }
            let Some(mut chain) = next_chain(&mut self.rx, &self.memory)? else {
                // Kicks for receive buffers are enabled only while buffers are missing.
                if self.rx.enable_notification(&self.memory).map_err(ring)? {
                    continue;
                }
                self.muxer.update_watch();
                return Ok((used, false));
            };
            let front = chain.writable.take(HEADER_BYTES);
            let (Some(front), false) = (front, chain.writable.is_empty()) else {
                return Err(guest("vsock receive buffer without room for data (5.10.6)"));
            };
            let Some(header) = self.muxer.next_packet(&chain.writable) else {
                // No connection had a packet after all: the buffer goes back.
                self.rx.go_to_previous_position();
                continue;
            };
            front.copy_from(&header.to_bytes());
            let len = u32::try_from(HEADER_BYTES).map_or(header.len, |h| h + header.len);
            self.rx
                .add_used(&self.memory, chain.head, len)
                .map_err(ring)?;
            used = true;
        }
        self.muxer.update_watch();
        Ok((used, self.muxer.has_packet()))
    }

    /// Sends a due transport reset event; returns true if it was sent.
    fn send_reset(&mut self) -> Result<bool, DeviceError> {
        if !self.reset_due {
            return Ok(false);
        }
        let mut chain = next_chain(&mut self.event, &self.memory)?;
        if chain.is_none() && self.event.enable_notification(&self.memory).map_err(ring)? {
            chain = next_chain(&mut self.event, &self.memory)?;
        }
        let Some(chain) = chain else {
            return Ok(false);
        };
        if chain.writable.copy_from(&EVENT_TRANSPORT_RESET) != EVENT_TRANSPORT_RESET.len() {
            return Err(guest("vsock event buffer too short (5.10.6.7)"));
        }
        self.event
            .add_used(&self.memory, chain.head, 4)
            .map_err(ring)?;
        self.reset_due = false;
        Ok(true)
    }
}

/// Timer of the device in the event loop.
struct VsockTimer {
    timer: TimerFd,
    poller: SlotPoller,
    set_for: Option<Instant>,
}

impl VsockTimer {
    fn new(poller: SlotPoller) -> Result<Self, DeviceError> {
        let timer = TimerFd::new().map_err(|e| DeviceError::Host(format!("timerfd: {e}")))?;
        let this = Self {
            timer,
            poller,
            set_for: None,
        };
        this.poller
            .add(this.fd(), TIMER_TOKEN, EpollFlags::EPOLLIN)
            .map_err(|e| DeviceError::Host(format!("epoll: {e}")))?;
        Ok(this)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to `self.timer` and is open as long as that is.
        unsafe { BorrowedFd::borrow_raw(self.timer.as_raw_fd()) }
    }

    /// Makes sure that the timer fires at `at` or before.
    fn fire_by(&mut self, at: Option<Instant>) -> Result<(), DeviceError> {
        let Some(at) = at.filter(|at| self.set_for.is_none_or(|set| *at < set)) else {
            return Ok(());
        };
        let wait = at.saturating_duration_since(Instant::now());
        // Zero would stop the timer.
        self.timer
            .reset(wait.max(Duration::from_nanos(1)), None)
            .map_err(|e| DeviceError::Host(format!("timerfd: {e}")))?;
        self.set_for = Some(at);
        Ok(())
    }

    /// Clears the fired timer, and its readiness, until it is set again.
    fn clear(&mut self) -> Result<(), DeviceError> {
        self.set_for = None;
        self.timer
            .clear()
            .map_err(|e| DeviceError::Host(format!("timerfd: {e}")))
    }
}

impl Drop for VsockTimer {
    fn drop(&mut self) {
        // Added in `new`, removed only here.
        let _ = self.poller.remove(self.fd());
    }
}
