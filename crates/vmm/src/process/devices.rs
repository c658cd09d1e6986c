//! Work of the event loop on all devices except disks. Failures and warnings of a device are
//! reported after its lock was released.

use super::Vm;
use crate::machine::bus::{SharedDevice, lock};
use crate::machine::report_device;
use crate::virtio::mmio::MmioDevice;
use crate::virtio::{DeviceError, VirtioDevice};
use std::sync::MutexGuard;

impl Vm {
    /// Calls `work` with device number `index`, and then reports its failures.
    pub(super) fn on_device(&mut self, index: usize, work: impl FnOnce(&SharedDevice)) {
        if let Some(device) = self.machine.devices.get(index).cloned() {
            work(&device);
            self.report(lock(&device));
        }
    }

    /// Reports a failure or warning of the device to the controller. Releases the device's lock.
    pub(super) fn report(&self, device: MutexGuard<'_, MmioDevice>) {
        report_device(device, &self.machine.bus, |event| {
            self.link.send(event, &[]);
        });
    }

    /// Changes the device of type `T`, if the machine has one.
    pub(super) fn update_device<T: VirtioDevice>(
        &mut self,
        work: impl FnOnce(&mut T) -> Result<(), DeviceError>,
    ) {
        let mut work = Some(work);
        for device in self.machine.devices_of_event_loop() {
            if lock(&device).device_ref(|_: &T| ()).is_some() {
                if let Some(work) = work.take() {
                    lock(&device).update(work);
                }
                self.report(lock(&device));
            }
        }
    }
}
