//! What a vCPU does when it leaves the guest.

use super::super::bus::{Bus, BusEffect};
use crate::error::VmmError;
use kvm_ioctls::{VcpuExit, VcpuFd};
use nix::errno::Errno;

/// Why a vCPU thread ended.
#[derive(Debug)]
pub enum VcpuEnd {
    /// The guest asked for a reset.
    Reset,
    /// Something went wrong.
    Failed(VmmError),
}

/// What one stay in the guest led to.
#[derive(Debug)]
pub(super) enum Step {
    /// An exit that was served.
    Served,
    /// Somebody wants the vCPU's attention.
    Kicked,
    /// The vCPU will not run again.
    End(VcpuEnd),
}

/// Enters the guest once and serves the exit.
pub(super) fn step(vcpu: &mut VcpuFd, bus: &Bus) -> Step {
    match serve(vcpu, bus) {
        Ok(step) => step,
        Err(e) => Step::End(VcpuEnd::Failed(e)),
    }
}

fn serve(vcpu: &mut VcpuFd, bus: &Bus) -> Result<Step, VmmError> {
    let exit = match vcpu.run() {
        Ok(exit) => exit,
        Err(e) if e.errno() == libc::EINTR || e.errno() == libc::EAGAIN => return Ok(Step::Kicked),
        Err(e) => {
            return Err(VmmError::host("KVM_RUN", Errno::from_raw(e.errno())));
        }
    };
    match exit {
        VcpuExit::MmioRead(address, data) => bus.mmio_read(address, data),
        VcpuExit::MmioWrite(address, data) => bus.mmio_write(address, data)?,
        VcpuExit::IoIn(port, data) => bus.port_read(port, data),
        VcpuExit::IoOut(port, data) => {
            if bus.port_write(port, data) == BusEffect::Reset {
                return Ok(Step::End(VcpuEnd::Reset));
            }
        }
        // The guest's triple fault is how a kernel without other means reboots.
        VcpuExit::Shutdown | VcpuExit::SystemEvent(..) => return Ok(Step::End(VcpuEnd::Reset)),
        VcpuExit::Intr | VcpuExit::IoapicEoi(_) | VcpuExit::IrqWindowOpen => {}
        VcpuExit::Hlt => {
            return Err(VmmError::Guest("halted with interrupts off".to_owned()));
        }
        VcpuExit::FailEntry(reason, cpu) => {
            return Err(VmmError::host(
                "KVM_RUN",
                format!("entry failed on CPU {cpu}, reason {reason:#x}"),
            ));
        }
        VcpuExit::InternalError => {
            return Err(VmmError::Guest(
                "the guest reached a state that KVM cannot run (internal error)".to_owned(),
            ));
        }
        other => {
            return Err(VmmError::Guest(format!("unexpected exit {other:?}")));
        }
    }
    Ok(Step::Served)
}
