//! Handles packets that the guest sends on a vsock connection: data, credit, shutdown.

use super::{ConnectionAction, CreditRequestState, VsockConnection, VsockConnectionState};
use crate::virtio::device::chain::GuestBuffers;
use crate::virtio::vsock::header::{SHUT_BOTH, SHUT_RECEIVE, SHUT_SEND, VsockHeader, VsockOp};
use crate::virtio::vsock::socket::{send_guest, shutdown_stream};
use nix::errno::Errno;
use nix::sys::socket::Shutdown;

impl VsockConnection {
    /// Handles a packet from the guest; `data` follows the header.
    pub fn receive(
        &mut self,
        op: VsockOp,
        header: &VsockHeader,
        data: &mut GuestBuffers<'_>,
    ) -> ConnectionAction {
        // An RST must not be answered, and does not carry credit.
        if op == VsockOp::Rst {
            return ConnectionAction::Remove;
        }
        self.credit.update(header);
        // The guest has buffer space again: a credit request is no longer needed.
        if self.credit.available() > 0 && self.credit_request != CreditRequestState::None {
            self.credit_request = CreditRequestState::None;
            if self.state == VsockConnectionState::Open {
                self.deadline = None;
            }
        }
        match (self.state, op) {
            (VsockConnectionState::Connecting { request_sent: true }, VsockOp::Response) => {
                self.state = VsockConnectionState::Open;
                self.deadline = None;
                // The host has probably written data already. Reading now saves a wakeup of the
                // event loop.
                self.readable = true;
                ConnectionAction::Keep
            }
            // A packet that is not valid in this state.
            (VsockConnectionState::Connecting { .. } | VsockConnectionState::Lingering, _) => {
                ConnectionAction::SendReset
            }
            (_, VsockOp::Request | VsockOp::Response) => ConnectionAction::SendReset,
            (_, VsockOp::Rw) => self.receive_data(header.len, data),
            (_, VsockOp::Shutdown) => self.receive_shutdown(header.flags),
            (_, VsockOp::CreditRequest) => {
                self.update_requested = true;
                ConnectionAction::Keep
            }
            // The credit was updated above. RSTs were handled above.
            (_, VsockOp::CreditUpdate | VsockOp::Rst) => ConnectionAction::Keep,
        }
    }

    /// Handles a data packet of the guest: passes its bytes to the stream of the host, or appends
    /// them to the backlog if the stream is full.
    fn receive_data(&mut self, len: u32, data: &mut GuestBuffers<'_>) -> ConnectionAction {
        // `take` fails if the packet is shorter than its header claims.
        let data = usize::try_from(len).ok().and_then(|len| data.take(len));
        let Some(mut data) = data else {
            return ConnectionAction::SendReset;
        };
        // The guest sends after a shutdown, or exceeds its credit. Its accounting cannot be
        // trusted.
        if self.guest_shut & SHUT_SEND != 0 || !self.credit.receive(len) {
            return ConnectionAction::SendReset;
        }
        let stream = match &self.stream {
            Some(stream) if !self.host_receive_closed => stream,
            _ => {
                // The host no longer receives: drop the data, but return the credit to the guest.
                self.credit.forward(len);
                return ConnectionAction::Keep;
            }
        };
        // Bytes of the backlog must be sent first.
        let mut sent = 0;
        if self.backlog.is_empty() && len > 0 {
            sent = match send_guest(stream, &data) {
                Ok(sent) => sent,
                Err(Errno::EAGAIN) => 0,
                Err(_) => {
                    // The host has closed its end: drop the data, as above.
                    self.credit.forward(len);
                    self.host_receive_closed = true;
                    return ConnectionAction::Keep;
                }
            };
        }
        self.credit.forward(u32::try_from(sent).unwrap_or(len));
        if data.take(sent).is_some() && !data.is_empty() {
            self.backlog.push(&data);
        }
        ConnectionAction::Keep
    }

    /// Handles a packet by which the guest closes one or both directions.
    fn receive_shutdown(&mut self, flags: u32) -> ConnectionAction {
        self.guest_shut |= flags & SHUT_BOTH;
        // The guest has closed both directions and expects an RST as confirmation.
        if self.guest_shut == SHUT_BOTH {
            return ConnectionAction::SendReset;
        }
        if let Some(stream) = &self.stream {
            if self.guest_shut & SHUT_RECEIVE != 0 {
                self.readable = false;
                shutdown_stream(stream, Shutdown::Read);
            }
            // With a backlog, `flush` shuts the stream down after the last byte.
            if self.guest_shut & SHUT_SEND != 0 && self.backlog.is_empty() {
                shutdown_stream(stream, Shutdown::Write);
            }
        }
        ConnectionAction::Keep
    }
}
