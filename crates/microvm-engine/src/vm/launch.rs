//! Starts a VMM process, and the driver task that serves its control socket.
//!
//! The *identity* of a sandbox consists of id, host name, entropy and clock. A guest receives it
//! before its sandbox can be used.
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran. The *greeting* is the
//! first message of the agent. A *hook* is an executable in the guest that the agent runs before
//! the state of the guest is stored, and after the guest continues.

use super::{ConnectGate, MicroVm, VmmRequests};
use crate::boot_error::BootError;
use crate::boot_steps::{BootStep, NextSteps};
use crate::control_socket::ControlSocket;
use crate::snapshot_context::SnapshotContext;
use crate::vmm::Vmm;
use crate::vmm_driver::VmmDriver;
use crate::vmm_launcher::FreshVmm;
use crate::vmm_limits::VmmLimits;
use crate::vmm_process::{DetachedSocket, VmmProcess};
use jiffy_engine_api::{BootMode, BootReport};
use jiffy_proto::agent::Identity;
use jiffy_proto::console::ConsoleRing;
use jiffy_proto::vm::Request;
use jiffy_snapshot::Hold;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use tokio::sync::{Mutex, mpsc, watch};

/// Components of a [`MicroVm`].
pub(crate) struct MicroVmParts {
    pub link: ControlSocket,
    pub vmm: Vmm,
    pub process: VmmProcess,
    pub pid: u32,
    pub detached_socket: DetachedSocket,
    pub console: ConsoleRing,
    pub overlay: File,
    /// Parent snapshot.
    pub parent: Option<(String, Hold)>,
    /// True if the VM has a network interface.
    pub net: bool,
    /// Checksum of the image with the kernel modules. `None` without modules.
    pub modules: Option<String>,
    /// `None` if the identity is assigned later.
    pub identity: Option<Identity>,
    pub report: BootReport,
    /// Optional requests that the VMM supports.
    pub supported_requests: VmmRequests,
    /// Receives the steps of the boot. `None` if the guest is running.
    pub steps: Option<mpsc::Sender<BootStep>>,
    /// True if the memory is not based on the memory of a snapshot.
    pub fresh_memory: bool,
}

/// Values that differ between a boot and a restore.
pub(crate) struct LaunchSpec<'a> {
    pub vmm: &'a Vmm,
    pub limits: VmmLimits,
    /// `None` if the identity is assigned later.
    pub identity: Option<Identity>,
    pub mode: BootMode,
    /// Snapshot from which the VM is restored, or from whose disks it boots.
    pub parent: Option<(String, Hold)>,
    /// True if the VM has a network interface.
    pub net: bool,
    /// Checksum of the image with the kernel modules. `None` without modules.
    pub modules: Option<String>,
}

pub(crate) fn console_ring() -> Result<ConsoleRing, BootError> {
    ConsoleRing::create().map_err(|e| BootError::Host {
        what: "cannot create the console ring",
        source: e.into(),
    })
}

impl MicroVm {
    /// Starts a VMM and sends the first request to it. Returns the VM and the steps of its boot.
    /// Must be called inside a tokio runtime.
    pub(crate) fn launch(
        launch: LaunchSpec<'_>,
        request: &Request,
        fds: &[BorrowedFd<'_>],
        console: ConsoleRing,
        overlay: File,
    ) -> Result<(Self, mpsc::Receiver<BootStep>), BootError> {
        let FreshVmm {
            channel,
            child,
            limit_task,
        } = launch.vmm.fresh(launch.limits)?;
        // `id` returns `None` only after the process was waited for, which is not the case here.
        let pid = child.id().unwrap_or(0);
        let detached_socket = DetachedSocket::default();
        let process = VmmProcess::child(child, detached_socket.clone());
        // From here on, an error drops `process`, which kills the VMM.
        channel.send(request, fds)?;
        // A boot has three steps, so the driver rarely waits for the receiver.
        let (step_sender, steps) = mpsc::channel(4);
        let mut vm = Self::assemble(MicroVmParts {
            link: ControlSocket::new(channel)?,
            vmm: launch.vmm.clone(),
            process,
            pid,
            detached_socket,
            console,
            overlay,
            parent: launch.parent,
            net: launch.net,
            modules: launch.modules,
            identity: launch.identity,
            report: BootReport {
                mode: launch.mode,
                vmm_us: 0,
                kernel_us: 0,
                init_us: 0,
                agent_us: 0,
                total_us: 0,
            },
            supported_requests: VmmRequests::ALL,
            steps: Some(step_sender),
            fresh_memory: launch.mode == BootMode::Cold,
        });
        vm.limit_task = limit_task;
        Ok((vm, steps))
    }

    /// Creates the VM and starts the driver of its VMM.
    pub(crate) fn assemble(parts: MicroVmParts) -> Self {
        let link = Arc::new(parts.link);
        let console = Arc::new(parts.console);
        let (kill, killed) = mpsc::channel(1);
        let (end_sender, end) = watch::channel(None);
        let (halted_sender, halted) = watch::channel(false);
        let (reply_sender, replies) = mpsc::unbounded_channel();
        let (identity, identity_receiver) = watch::channel(parts.identity);
        let disk_failure = Arc::new(OnceLock::new());
        let next_steps = NextSteps::default();
        // Without `steps`, the guest is adopted. Its greeting is unknown, so it may have hooks.
        let hooks = Arc::new(AtomicBool::new(parts.steps.is_none()));
        let driver = VmmDriver {
            link: link.clone(),
            vmm: parts.vmm,
            pid: parts.pid,
            process: parts.process,
            detached_socket: parts.detached_socket.clone(),
            console: console.clone(),
            identity: identity_receiver,
            // Without `steps`, the guest is adopted, and may have been restored.
            restored: parts.steps.is_none() || parts.report.mode != BootMode::Cold,
            steps: parts.steps,
            hooks: hooks.clone(),
            next_steps: next_steps.clone(),
            killed,
            cause: None,
            halted: halted_sender,
            disk_failure: disk_failure.clone(),
            replies: reply_sender,
        };
        Self {
            link,
            connect_gate: ConnectGate::default(),
            console,
            end,
            halted,
            driver: tokio::spawn(driver.run(end_sender)),
            kill,
            report: parts.report,
            pid: parts.pid,
            detached_socket: parts.detached_socket,
            context: Arc::new(Mutex::new(SnapshotContext::new(
                replies,
                parts.overlay,
                parts.parent,
                parts.net,
                parts.modules,
                parts.fresh_memory,
            ))),
            identity,
            limit_task: None,
            disk_failure,
            next_steps,
            hooks,
            supported_requests: parts.supported_requests,
        }
    }
}
