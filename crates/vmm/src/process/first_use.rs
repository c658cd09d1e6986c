//! Pages that a guest writes at its first use. They are copied ahead in steps, between events. If
//! the guest starts alone, the copies begin at its start, while its agent greets. Otherwise they
//! begin at the first use, because the work would delay other guests that are starting.

use super::Vm;
use crate::machine::bus::lock;
use crate::snapshot::linear_memory::LinearMemory;
use crate::snapshot::populate::DeferredCopies;
use crate::virtio::net::Net;
use jiffy_proto::snapshot::PopulateMoment;

impl Vm {
    /// Records a use of the guest if `device` is its network interface, which has an event. Frames
    /// that arrive before the sandbox is handed out come from the host itself.
    pub(super) fn note_frames(&mut self, device: usize) {
        let frame = PopulateMoment::Frame;
        if self.listener.is_none() || !self.machine.deferred_copies.await_moment(frame) {
            return;
        }
        let device = self.machine.devices.get(device);
        if device.and_then(|device| lock(device).device_ref(Net::is_open)) == Some(true) {
            self.machine.deferred_copies.note(frame);
        }
    }

    /// Returns whether copies must be made now. No copies are made during a background copy: pages
    /// are then shared with the writer, so each copy would cause another copy.
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
            Err(_) => self.machine.deferred_copies = DeferredCopies::default(),
        }
    }
}
