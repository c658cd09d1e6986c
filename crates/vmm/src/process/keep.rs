//! A VM that outlives its controller, and the next controller's arrival.

use super::{SLOT_CONTROL, SLOT_LISTENER, Vm, watch};
use crate::error::VmmError;
use crate::machine::Descriptors;
use crate::machine::bus::lock;
use crate::virtio::blk::Block;
use jiffy_proto::channel::Channel;
use jiffy_proto::vm::{Event, FdIndex, PROTOCOL, StopCause};
use nix::errno::Errno;
use nix::sys::socket::{SockFlag, accept4};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

impl Vm {
    pub(super) fn on_keep(
        &mut self,
        listener: FdIndex,
        log: Option<FdIndex>,
        greeting: Option<FdIndex>,
        fds: Vec<OwnedFd>,
    ) {
        let mut fds = Descriptors::new(fds);
        let mut keep = || -> Result<(), VmmError> {
            let listener = fds.take(listener, "control listener")?;
            let greeting = greeting.map(|fd| fds.take(fd, "greeting")).transpose()?;
            if let Some(log) = log {
                let log = fds.take(log, "log")?;
                // SAFETY: the standard error that is replaced is used by nobody at this moment but panics.
                let done = unsafe { libc::dup3(log.as_raw_fd(), libc::STDERR_FILENO, 0) };
                Errno::result(done).map_err(|e| VmmError::host("log", e))?;
            }
            let slot = self.machine.poller.slot(SLOT_LISTENER);
            watch(&slot, listener.as_fd())?;
            self.listener = Some(listener);
            self._greeting = greeting;
            Ok(())
        };
        match keep() {
            Ok(()) => drop(self.link.send(&Event::Kept, &[])),
            // A controller that cannot keep it would lose it without knowing.
            Err(e) => self.cause = Some(e.into()),
        }
    }

    pub(super) fn on_controller_gone(&mut self) {
        if self.listener.is_none() {
            self.cause = Some(StopCause::Requested);
        }
        self.forget_controller();
        // Dropping the channel closes the socket, which also takes it out of the event loop.
        lock(&self.link.0).take();
    }

    /// Nobody waits any more for what the controller asked for.
    fn forget_controller(&mut self) {
        self.recalled = false;
        if let Some(copying) = &self.copying {
            copying.cancel();
        }
    }

    pub(super) fn on_listener(&mut self) {
        let Some(listener) = &self.listener else {
            return;
        };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let Ok(raw) = accept4(listener.as_raw_fd(), flags) else {
            return;
        };
        // SAFETY: accept4 has just made this descriptor for us.
        let socket = unsafe { OwnedFd::from_raw_fd(raw) };
        // The newest controller wins: an older one is a daemon that was replaced.
        let slot = self.machine.poller.slot(SLOT_CONTROL);
        if watch(&slot, socket.as_fd()).is_ok() {
            self.forget_controller();
            *lock(&self.link.0) = Some(Channel::new(socket));
        }
    }

    /// Tells the controller what there is, once no snapshot is being written any more.
    pub(super) fn on_recall(&mut self) {
        self.recalled = true;
        self.answer_recall();
    }

    pub(super) fn answer_recall(&mut self) {
        if !self.recalled || self.copying.is_some() {
            return;
        }
        self.recalled = false;
        match self.overlays() {
            Ok(overlays) => {
                let mut fds: Vec<BorrowedFd<'_>> = vec![self.console.as_fd()];
                fds.extend(overlays.iter().map(AsFd::as_fd));
                // As many as there are disks, after the console.
                let index = |at: usize| FdIndex(u8::try_from(at).unwrap_or(u8::MAX));
                let recalled = Event::Recalled {
                    protocol: PROTOCOL,
                    running: self.running,
                    undecided: self.undecided.as_ref().map(|u| u.id.clone()),
                    console: index(0),
                    overlays: (1..fds.len()).map(index).collect(),
                };
                self.link.send(&recalled, &fds);
            }
            Err(e) => self.cause = Some(VmmError::host("handing out overlays", e).into()),
        }
    }

    fn overlays(&self) -> io::Result<Vec<OwnedFd>> {
        let devices = self.machine.devices.iter();
        devices
            .filter_map(|device| lock(device).peek(Block::overlay)?.transpose())
            .collect()
    }
}
