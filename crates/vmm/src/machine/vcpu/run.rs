//! Runs a vCPU once (`KVM_RUN`), and handles its exit.

use super::super::bus::{Bus, BusEffect};
use crate::error::VmmError;
use kvm_ioctls::{VcpuExit, VcpuFd};
use nix::errno::Errno;

/// Reason why a vCPU thread ended.
#[derive(Debug)]
pub enum VcpuEnd {
    /// The guest requested a reset.
    Reset,
    /// The vCPU, or the handling of its exit, failed.
    Failed(VmmError),
}

/// Result of one `KVM_RUN`.
#[derive(Debug)]
pub(super) enum VcpuStep {
    /// The exit was served.
    Served,
    /// No exit: the vCPU was kicked because a command is pending, or can be entered again at once.
    Kicked,
    /// The vCPU will not run again.
    End(VcpuEnd),
}

/// Enters the guest once and handles its exit.
pub(super) fn run_once(vcpu: &mut VcpuFd, bus: &Bus) -> VcpuStep {
    match serve(vcpu, bus) {
        Ok(step) => step,
        Err(e) => VcpuStep::End(VcpuEnd::Failed(e)),
    }
}

/// Enters the guest, and handles its next exit.
fn serve(vcpu: &mut VcpuFd, bus: &Bus) -> Result<VcpuStep, VmmError> {
    let exit = match vcpu.run() {
        Ok(exit) => exit,
        // EINTR: the kick signal. EAGAIN: a secondary vCPU has received its start-up interrupt and
        // can be entered now.
        Err(e) if e.errno() == libc::EINTR || e.errno() == libc::EAGAIN => {
            return Ok(VcpuStep::Kicked);
        }
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
                return Ok(VcpuStep::End(VcpuEnd::Reset));
            }
        }
        // A kernel without another method reboots by a triple fault.
        VcpuExit::Shutdown | VcpuExit::SystemEvent(..) => return Ok(VcpuStep::End(VcpuEnd::Reset)),
        // No action is required. The I/O APIC ignores EOIs because all interrupts are edges.
        VcpuExit::Intr | VcpuExit::IoapicEoi(_) | VcpuExit::IrqWindowOpen => {}
        // Unexpected: KVM handles HLT itself if the local APIC is in the kernel.
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
    Ok(VcpuStep::Served)
}
