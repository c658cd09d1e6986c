//! Detaches the VM from its controller (the daemon), which exits, and attaches it to the next one.
//! The guest runs meanwhile.
//!
//! A *detached* VMM continues to run when its daemon exits. A *captured* snapshot is completed even
//! if the controller disconnects or the guest ends.

use super::snapshot::BackgroundCopy;
use super::{SLOT_CONTROL, SLOT_LISTENER, Vm, watch};
use crate::error::VmmError;
use crate::machine::ReceivedFds;
use crate::machine::bus::lock;
use jiffy_proto::channel::Channel;
use jiffy_proto::vm::{CONTROL_PROTOCOL_VERSION, Event, FdIndex, StopCause};
use nix::errno::Errno;
use nix::sys::socket::{SockFlag, accept4};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

impl Vm {
    /// Detaches the VM from its controller: the VM survives the controller, and later controllers
    /// connect to `listener`. Messages go to `log` from now on.
    pub(super) fn on_detach(
        &mut self,
        listener: FdIndex,
        log: Option<FdIndex>,
        greeting: Option<FdIndex>,
        fds: Vec<OwnedFd>,
    ) {
        let mut fds = ReceivedFds::new(fds);
        let mut detach = || -> Result<(), VmmError> {
            let listener = fds.take(listener, "control listener")?;
            let greeting = greeting.map(|fd| fds.take(fd, "greeting")).transpose()?;
            if let Some(log) = log {
                let log = fds.take(log, "log")?;
                // SAFETY: only a panic could use standard error while it is replaced.
                let done = unsafe { libc::dup3(log.as_raw_fd(), libc::STDERR_FILENO, 0) };
                Errno::result(done).map_err(|e| VmmError::host("log", e))?;
            }
            let slot = self.machine.poller.slot(SLOT_LISTENER);
            // Change `self` only after the last call that can fail.
            watch(&slot, listener.as_fd())?;
            self.listener = Some(listener);
            self._greeting = greeting;
            Ok(())
        };
        match detach() {
            Ok(()) => drop(self.link.send(&Event::Detached, &[])),
            // End the VM. If the VM continued, the controller would assume that the VM is detached,
            // although the VM still ends with the controller.
            Err(e) => self.cause = Some(e.into()),
        }
    }

    /// Called when the controller has closed the control socket. If the VM has a listener, it
    /// continues and waits for another controller. A VM without a listener stops.
    pub(super) fn on_controller_disconnected(&mut self) {
        // A VM without a listener could never be controlled again.
        if self.listener.is_none() {
            self.cause = Some(StopCause::Requested);
        }
        self.drop_controller_requests();
        // Dropping the channel closes the socket, which also removes it from the event loop.
        lock(&self.link.0).take();
    }

    /// Drops unanswered requests of the disconnected controller.
    fn drop_controller_requests(&mut self) {
        self.reattach_pending = false;
        if let Some(background_copy) = self.background_copy.as_ref().filter(|c| !c.captured) {
            background_copy.cancel();
        }
    }

    /// Accepts a connection of a new controller.
    pub(super) fn on_listener(&mut self) {
        let Some(listener) = &self.listener else {
            return;
        };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        // Ignore the error: the controller may have closed the connection already, and can connect
        // again.
        let Ok(raw) = accept4(listener.as_raw_fd(), flags) else {
            return;
        };
        // SAFETY: accept4 has just created this descriptor for this process.
        let socket = unsafe { OwnedFd::from_raw_fd(raw) };
        // The newest controller replaces an older one: a daemon connects only after it has replaced
        // the daemon that was connected before.
        let slot = self.machine.poller.slot(SLOT_CONTROL);
        if watch(&slot, socket.as_fd()).is_ok() {
            self.drop_controller_requests();
            // Dropping the replaced channel closes it, which also removes it from the event loop.
            *lock(&self.link.0) = Some(Channel::new(socket));
        }
    }

    /// Sends the state of the VM to the controller as soon as no snapshot is being written, except
    /// a captured one.
    pub(super) fn on_reattach(&mut self) {
        self.reattach_pending = true;
        self.send_reattach_state();
    }

    /// Sends the state of the VM to a new daemon that has connected. Waits until a snapshot in
    /// progress is captured.
    pub(super) fn send_reattach_state(&mut self) {
        let is_uncaptured = |copy: &BackgroundCopy| !copy.captured;
        if !self.reattach_pending || self.background_copy.as_ref().is_some_and(is_uncaptured) {
            return;
        }
        self.reattach_pending = false;
        // The disks' locks must not be taken here: a disk may not respond.
        let disks = self.machine.writable_disks.iter();
        let overlays: Vec<Arc<File>> = disks.filter_map(|disk| disk.overlay.file()).collect();
        let mut fds: Vec<BorrowedFd<'_>> = vec![self.console.as_fd()];
        fds.extend(overlays.iter().map(|overlay| overlay.as_fd()));
        // One overlay per disk follows the console.
        let index = |at: usize| FdIndex(u8::try_from(at).unwrap_or(u8::MAX));
        let state = Event::Reattached {
            protocol: CONTROL_PROTOCOL_VERSION,
            running: self.running,
            prepared_snapshot: self.prepared.as_ref().map(|snapshot| snapshot.id.clone()),
            captured: self.captured_snapshot(),
            // Requests that this version supports, in addition to the requests of the first
            // version.
            rollback: true,
            fold: true,
            disk_only: true,
            memory_layers: Some(self.machine.layers.len()),
            console: index(0),
            overlays: (1..fds.len()).map(index).collect(),
        };
        self.link.send(&state, &fds);
    }
}
