//! Host side of a connection: handles the events of its Unix stream, and updates the events for
//! which the event loop watches it.

use super::{
    ConnectionAction, CreditRequestState, VsockConnection, VsockConnectionState, VsockTimeouts,
};
use crate::poll::SlotPoller;
use crate::virtio::vsock::header::{SHUT_RECEIVE, SHUT_SEND};
use crate::virtio::vsock::socket::shutdown_stream;
use nix::errno::Errno;
use nix::sys::epoll::EpollFlags;
use nix::sys::socket::Shutdown;
use std::os::fd::AsFd;
use std::time::Instant;

impl VsockConnection {
    /// Handles events of the stream.
    pub fn stream_event(&mut self, flags: EpollFlags) -> ConnectionAction {
        // EPOLLHUP: both directions of the stream have ended.
        self.hung_up |= flags.intersects(EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR);
        if flags.contains(EpollFlags::EPOLLOUT) || self.hung_up {
            self.flush();
        }
        // The host cannot receive the rest.
        if self.hung_up {
            self.close_host_receive();
        }
        if flags.contains(EpollFlags::EPOLLIN) || self.hung_up {
            // The guest does not receive data, so the end of the stream need not be found by
            // reading.
            if self.guest_shut & SHUT_RECEIVE != 0 {
                self.host_send_closed |= self.hung_up;
            } else {
                self.readable = !self.host_send_closed;
            }
        }
        if self.state == VsockConnectionState::Lingering && self.backlog.is_empty() {
            return ConnectionAction::Remove;
        }
        ConnectionAction::Keep
    }

    /// Writes delayed bytes of the guest to the host's socket. After the last one, the end of the
    /// guest's stream is passed on.
    fn flush(&mut self) {
        let (Some(stream), false) = (&self.stream, self.backlog.is_empty()) else {
            return;
        };
        let (bytes, flushed) = self.backlog.flush(stream);
        self.credit.forward(bytes);
        if flushed.is_err() {
            return self.close_host_receive();
        }
        if self.backlog.is_empty() && self.guest_shut & SHUT_SEND != 0 {
            shutdown_stream(stream, Shutdown::Write);
        }
    }

    /// Drops the backlog because the host no longer receives.
    fn close_host_receive(&mut self) {
        self.host_receive_closed = true;
        self.credit.forward(self.backlog.clear());
    }

    /// Updates the event loop and the deadline according to the state. Called for a new connection
    /// of the host, and when the connection cannot send a packet now.
    pub fn update_watch(
        &mut self,
        poller: &SlotPoller,
        token: u32,
        timeouts: &VsockTimeouts,
    ) -> Result<(), Errno> {
        // The host has data, but the guest has no space.
        let starved = self.can_read() && self.credit.available() == 0;
        if self.state == VsockConnectionState::Open
            && starved
            && self.credit_request == CreditRequestState::None
        {
            self.credit_request = CreditRequestState::Delayed;
            self.deadline = Some(Instant::now() + timeouts.credit);
        }
        let Some(stream) = &self.stream else {
            return Ok(());
        };
        let wanted_events = self.wanted_events();
        match (self.watched, wanted_events) {
            (None, None) => {}
            (None, Some(flags)) => poller.add(stream.as_fd(), token, flags)?,
            (Some(_), None) => poller.remove(stream.as_fd())?,
            (Some(old), Some(new)) if old != new => poller.modify(stream.as_fd(), token, new)?,
            _ => {}
        }
        self.watched = wanted_events;
        // In this state, the connection waits for the guest's RST only, so the stream is no longer
        // needed. The code above removed the stream from the event loop (`wanted_events` is
        // `None`).
        if self.state == VsockConnectionState::Closing {
            self.close(poller);
        }
        Ok(())
    }

    /// Returns the events to watch for. An empty set still reports a hangup of the host.
    fn wanted_events(&self) -> Option<EpollFlags> {
        // A stream that has ended would always be ready.
        if self.hung_up || self.state == VsockConnectionState::Closing {
            return None;
        }
        let mut flags = EpollFlags::empty();
        if !self.backlog.is_empty() {
            flags |= EpollFlags::EPOLLOUT;
        }
        let listening = self.guest_shut & SHUT_RECEIVE == 0 && !self.host_send_closed;
        // While `readable` is set, data waits for the guest. Another event would not add
        // information.
        if self.state == VsockConnectionState::Open && listening && !self.readable {
            flags |= EpollFlags::EPOLLIN;
        }
        Some(flags)
    }

    /// Removes the stream from the event loop and shuts it down. The shutdown also takes effect if
    /// the host holds a duplicate of the stream.
    pub fn close(&mut self, poller: &SlotPoller) {
        if let Some(stream) = self.stream.take() {
            if self.watched.take().is_some() {
                // Ignore the result: the descriptor is open and watched, so this succeeds.
                let _ = poller.remove(stream.as_fd());
            }
            shutdown_stream(&stream, Shutdown::Both);
        }
    }
}
