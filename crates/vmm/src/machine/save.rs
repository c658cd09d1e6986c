//! Saves the state of a paused machine for a snapshot: vCPUs and devices, without memory and disks.

use super::Machine;
use super::bus::lock;
use super::vcpu::Vcpus;
use crate::error::VmmError;
use crate::snapshot::machine_state::{ClockState, MachineState};

impl Machine {
    /// Returns the whole state except memory and disks. `vcpus` must belong to this machine and be
    /// paused.
    pub fn save(&self, vcpus: &Vcpus) -> Result<MachineState, VmmError> {
        let clock = self
            .vm
            .get_clock()
            .map_err(|e| VmmError::host("KVM_GET_CLOCK", e))?;
        // Save the devices first: interrupts that they raised are then in the vCPUs' local APICs.
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
}
