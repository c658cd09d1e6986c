//! Deferred copies of pages that a restored guest probably writes at its first use. A page that the
//! VMM has copied causes no page fault in the guest. The event loop copies in small steps, between
//! events.
//!
//! The *first use* is the first request or command of a user. The VMM assumes that it starts with
//! the first connection from the host, or with the first frame for the network interface
//! ([`PopulateMoment`]).
//!
//! If the guest is the only guest that is starting, copying begins at its start, while its agent
//! connects. If other guests are starting, copying begins at the first use, because earlier copying
//! would delay these guests.

use super::Vm;
use crate::machine::bus::lock;
use crate::snapshot::linear_memory::LinearMemory;
use crate::snapshot::populate::DeferredCopies;
use crate::virtio::net::Net;
use jiffy_proto::snapshot::PopulateMoment;

impl Vm {
    /// Records the first use of the guest if an event of its network interface carried a frame.
    /// Frames that arrive before the sandbox is handed out to a user do not count: the host itself
    /// sent them.
    pub(super) fn record_frames(&mut self, device: usize) {
        let frame = PopulateMoment::Frame;
        // The VM is detached (`listener` is set) when the sandbox is handed out.
        if self.listener.is_none() || !self.machine.deferred_copies.is_waiting_for(frame) {
            return;
        }
        let device = self.machine.devices.get(device);
        // A closed gate drops all frames: the guest is still being rolled back.
        if device.and_then(|device| lock(device).device_ref(Net::is_open)) == Some(true) {
            self.machine.deferred_copies.on_moment(frame);
        }
    }

    /// Returns whether copies must be made now. No copies are made during a background copy: the
    /// writer process still shares the pages, so writing to a page would copy it once more.
    pub(super) fn copies_are_due(&self) -> bool {
        self.background_copy.is_none() && self.machine.deferred_copies.are_due()
    }

    /// Makes some of the copies.
    pub(super) fn make_due_copies(&mut self) {
        if !self.copies_are_due() {
            return;
        }
        match LinearMemory::new(&self.machine.memory) {
            Ok(linear) => self.machine.deferred_copies.step(&linear),
            // Ignore the error and the copies: they only save page faults.
            Err(_) => self.machine.deferred_copies = DeferredCopies::default(),
        }
    }
}
