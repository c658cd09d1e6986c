//! A paused machine's state as a value.

use super::Machine;
use super::bus::lock;
use super::vcpu::Vcpus;
use crate::error::VmmError;
use crate::snapshot::state::{ClockState, MachineState};

impl Machine {
    /// Reads everything but memory and disks; `vcpus`, which belong to this machine, must be paused.
    pub fn save(&self, vcpus: &Vcpus) -> Result<MachineState, VmmError> {
        let clock = self
            .vm
            .get_clock()
            .map_err(|e| VmmError::host("KVM_GET_CLOCK", e))?;
        // Devices first: what they had raised by then is in the vCPUs' interrupt controllers.
        let devices = self.devices.iter().map(|d| lock(d).save()).collect();
        let (ioapic, serial) = self.bus.save();
        Ok(MachineState {
            shape: self.shape.clone(),
            vcpus: vcpus.save(&self.msrs)?,
            clock: ClockState { ns: clock.clock },
            ioapic,
            serial,
            devices,
        })
    }

    /// Has every device look at its queues and interrupt once, as after a restore.
    pub fn wake_devices(&self) {
        for device in &self.devices {
            lock(device).wake();
        }
    }
}
