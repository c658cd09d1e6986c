//! Pages that a guest writes when it is first used: copied ahead in steps between events. From its
//! start on, if it starts alone; its agent greets meanwhile. Otherwise from its first use on: that
//! work would be on the way of others that start at the same time.

use super::Vm;
use crate::machine::bus::lock;
use crate::snapshot::linear_memory::LinearMemory;
use crate::snapshot::populate::DeferredCopies;
use crate::virtio::net::Net;
use jiffy_proto::snapshot::PopulateMoment;

impl Vm {
    /// Notes a use of the guest if `device` is its network interface, which has an event. Frames
    /// that come before the guest is handed out are the host's own.
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

    /// True if there are copies to make now. A snapshot that is being written shares its pages with
    /// the guest, and copies of them would be copied once more.
    pub(super) fn copies_are_due(&self) -> bool {
        self.background_copy.is_none() && self.machine.deferred_copies.are_due()
    }

    /// Makes some of them.
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
