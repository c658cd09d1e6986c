//! Creates the packets that a vsock connection sends to the guest: data, credit, shutdown, reset.

use super::{CreditRequestState, VsockConnection, VsockConnectionState, VsockTimeouts};
use crate::virtio::device::chain::GuestBuffers;
use crate::virtio::vsock::header::{SHUT_BOTH, SHUT_RECEIVE, SHUT_SEND, VsockOp};
use crate::virtio::vsock::socket::receive_guest;
use nix::errno::Errno;
use std::time::Instant;

/// Maximum number of data bytes in one packet, or in the packets of one call to the host. Same
/// value as Linux (`VIRTIO_VSOCK_MAX_PKT_BUF_SIZE`).
pub const MAX_PACKET_BYTES: usize = 64 * 1024;

/// Packet to the guest, without the fields that the muxer sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutgoingPacket {
    pub op: VsockOp,
    pub flags: u32,
    pub len: u32,
}

impl VsockConnection {
    /// Returns whether [`VsockConnection::next_packet`] may return a packet.
    pub fn has_packet(&self) -> bool {
        match self.state {
            VsockConnectionState::Connecting { request_sent } => !request_sent,
            VsockConnectionState::Accepting => true,
            VsockConnectionState::Open => {
                (self.can_read() && self.credit.available() > 0)
                    || self.shutdown_to_send() != self.sent_shutdown
                    || self.credit_request == CreditRequestState::Due
                    || self.needs_update()
            }
            VsockConnectionState::Closing | VsockConnectionState::Lingering => false,
        }
    }

    /// Returns whether data of the host may be read for the guest.
    pub(super) fn can_read(&self) -> bool {
        self.readable && !self.host_send_closed && self.guest_shut & SHUT_RECEIVE == 0
    }

    /// Returns the `SHUT_*` flags that the guest must have received. Flags are only added: a
    /// direction never opens again.
    fn shutdown_to_send(&self) -> u32 {
        let send = if self.host_send_closed { SHUT_SEND } else { 0 };
        let receive = if self.host_receive_closed {
            SHUT_RECEIVE
        } else {
            0
        };
        self.sent_shutdown | send | receive
    }

    /// Returns whether the guest must receive the current credit.
    fn needs_update(&self) -> bool {
        self.update_requested || self.credit.needs_update()
    }

    /// Returns the next packet for the guest. Data is read directly into `buffer`, which starts
    /// after the header.
    pub fn next_packet(
        &mut self,
        buffer: &GuestBuffers<'_>,
        timeouts: &VsockTimeouts,
    ) -> Option<OutgoingPacket> {
        let control = |op| {
            Some(OutgoingPacket {
                op,
                flags: 0,
                len: 0,
            })
        };
        match self.state {
            VsockConnectionState::Connecting {
                request_sent: false,
            } => {
                self.state = VsockConnectionState::Connecting { request_sent: true };
                return control(VsockOp::Request);
            }
            VsockConnectionState::Accepting => {
                self.state = VsockConnectionState::Open;
                return control(VsockOp::Response);
            }
            VsockConnectionState::Open => {}
            _ => return None,
        }
        if let Some(len) = self.read(std::slice::from_ref(buffer)) {
            return Some(OutgoingPacket {
                op: VsockOp::Rw,
                flags: 0,
                len,
            });
        }
        // The stream failed.
        if self.state == VsockConnectionState::Closing {
            return None;
        }
        // Data was sent first, so the guest receives all bytes before the end.
        let shut = self.shutdown_to_send();
        if shut != self.sent_shutdown {
            self.sent_shutdown = shut;
            // The guest must confirm with an RST. The deadline applies if it does not.
            if shut == SHUT_BOTH {
                self.state = VsockConnectionState::Closing;
                self.deadline = Some(Instant::now() + timeouts.close);
            }
            return Some(OutgoingPacket {
                op: VsockOp::Shutdown,
                flags: shut,
                len: 0,
            });
        }
        if self.credit_request == CreditRequestState::Due {
            self.credit_request = CreditRequestState::Sent;
            return control(VsockOp::CreditRequest);
        }
        if self.needs_update() {
            return control(VsockOp::CreditUpdate);
        }
        None
    }

    /// Reads data directly into `buffers`, in order. Returns the number of bytes.
    pub fn read(&mut self, buffers: &[GuestBuffers<'_>]) -> Option<u32> {
        if self.state != VsockConnectionState::Open {
            return None;
        }
        // Never send more than the guest has space for.
        let credit = usize::try_from(self.credit.available()).unwrap_or(usize::MAX);
        let bytes = buffers.iter().map(GuestBuffers::len).sum();
        let limit = credit.min(bytes).min(MAX_PACKET_BYTES);
        if !self.can_read() || limit == 0 {
            return None;
        }
        let bytes = match receive_guest(self.stream.as_ref()?, buffers, limit) {
            Ok(bytes) => bytes,
            Err(Errno::EAGAIN) => {
                self.readable = false;
                return None;
            }
            // The host closed without reading all data. No more data follows.
            Err(Errno::ECONNRESET) => 0,
            // Data may be lost, so the guest must not receive a regular end. The expired deadline
            // resets the connection.
            Err(_) => {
                self.state = VsockConnectionState::Closing;
                self.deadline = Some(Instant::now());
                return None;
            }
        };
        // After a full buffer, the stream may contain more data. A shorter read has emptied it. A
        // stream that hung up is not watched, so it must be read until its end.
        self.readable = bytes == limit || self.hung_up;
        if bytes == 0 {
            self.readable = false;
            self.host_send_closed = true;
            return None;
        }
        let bytes = u32::try_from(bytes).ok()?;
        self.credit.send(bytes);
        Some(bytes)
    }

    /// Records that a packet with the current credit is sent. Returns its `fwd_cnt`.
    pub fn credit_sent(&mut self) -> u32 {
        self.update_requested = false;
        self.credit.announce()
    }
}
