//! Starts VMM processes, jailed and in control groups.
//!
//! A VMM process (`jiffy-vmm`) runs one guest. A *spare* process is started in advance.

use crate::boot_error::BootError;
use crate::host_kvm;
use crate::jail_namespaces::{JailError, JailNamespaces, in_new_pid_namespace};
use crate::vmm_limits::VmmLimits;
use jiffy_confinement::{CapabilitySet, CgroupError, Cgroups, limit_privileges};
use jiffy_engine_api::ChildMessages;
use jiffy_proto::channel::Channel;
use jiffy_proto::vm::jail::ENTER_ARGUMENT;
use jiffy_proto::vm::{FdIndex, Request};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use tokio::process::Child;

/// Background task that limits a VMM by its control groups while the guest boots. The boot
/// completes only after this task.
pub(crate) type LimitTask = tokio::task::JoinHandle<Result<(), CgroupError>>;

/// VMM process that has not received a request yet.
#[derive(Debug)]
pub(crate) struct FreshVmm {
    pub channel: Channel,
    pub child: Child,
    /// Task that limits the process. `None` if processes are not limited.
    pub limit_task: Option<LimitTask>,
}

/// VMM program and the confinement of its processes.
#[derive(Debug, Clone)]
pub(crate) struct VmmLauncher {
    pub path: PathBuf,
    /// `None` if processes run as the user of this process.
    pub jail: Option<JailNamespaces>,
    pub cgroups: Option<Cgroups>,
}

impl VmmLauncher {
    /// Returns the namespaces that a process enters. `None` if processes are not jailed.
    pub fn namespaces(&self) -> Result<Option<Vec<OwnedFd>>, JailError> {
        let jail = self.jail.as_ref();
        jail.map(|jail| jail.get(&self.path)).transpose()
    }

    /// Starts a process and creates its control socket. Must be called inside a tokio runtime.
    pub fn spawn(&self, limits: VmmLimits) -> Result<FreshVmm, BootError> {
        let (channel, child) = self.spawn_unlimited()?;
        let cgroups = self.cgroups.clone().zip(child.id());
        // Moving a process takes about 15 ms in the kernel, so the task runs while the guest boots.
        let limit_task = cgroups.map(|(cgroups, pid)| {
            tokio::task::spawn_blocking(move || cgroups.limit(pid, limits.into()))
        });
        Ok(FreshVmm {
            channel,
            child,
            limit_task,
        })
    }

    /// Starts a process, moves it to its control groups without limits, and makes it create its KVM
    /// objects. `memory_mib` is the expected memory of the next guest, or 0 if unknown. Blocks
    /// while the kernel moves the process. Must be called inside a tokio runtime.
    pub fn spawn_spare(&self, memory_mib: u32) -> Result<(Channel, Child), BootError> {
        let kvm = host_kvm::open()?;
        let (channel, mut child) = self.spawn_unlimited()?;
        if let (Some(cgroups), Some(pid)) = (&self.cgroups, child.id())
            && let Err(e) = cgroups.enter(pid)
        {
            // Ignore the error: the process has exited already.
            let _ = child.start_kill();
            return Err(e.into());
        }
        let prepare = Request::Prepare {
            kvm: FdIndex(0),
            memory_mib,
        };
        if let Err(e) = channel.send(&prepare, &[kvm.as_fd()]) {
            let _ = child.start_kill();
            return Err(e.into());
        }
        Ok((channel, child))
    }

    /// Starts a task that sets the limits of a spare process. `None` if processes are not limited.
    pub fn limit_spare(&self, spare: &Child, limits: VmmLimits) -> Option<LimitTask> {
        let (cgroups, pid) = self.cgroups.clone().zip(spare.id())?;
        let set = move || cgroups.set_limits(pid, limits.into());
        Some(tokio::task::spawn_blocking(set))
    }

    /// Returns whether the kernel killed the exited process at the memory limit of its group.
    pub fn ran_out_of_memory(&self, pid: u32) -> bool {
        let cgroups = self.cgroups.as_ref();
        cgroups.is_some_and(|cgroups| cgroups.memory_kills(pid) > 0)
    }

    /// Removes the control groups of exited processes, including processes of other daemons.
    pub fn gc(&self) {
        if let Some(cgroups) = &self.cgroups {
            cgroups.gc();
        }
    }

    /// Removes the control groups of an exited process.
    pub fn remove_group(&self, pid: u32) {
        if let Some(cgroups) = &self.cgroups {
            cgroups.remove_group(pid);
        }
    }

    /// Starts a process whose control socket is its standard input. The process receives no other
    /// descriptors before it runs: they would require fork instead of vfork. Fork copies the page
    /// tables of this process, which then faults on every page again. The namespaces are sent over
    /// the socket.
    fn spawn_unlimited(&self) -> Result<(Channel, Child), BootError> {
        let failed = |source| BootError::Spawn {
            path: self.path.clone(),
            source,
        };
        let (channel, theirs) = Channel::pair()?;
        let messages = ChildMessages::new().map_err(failed)?;
        let mut command = Command::new(&self.path);
        command
            // The environment of this process may contain secrets.
            .env_clear()
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(messages.stderr().map_err(failed)?);
        let namespaces = self.namespaces()?;
        if let Some(namespaces) = &namespaces {
            command.arg(ENTER_ARGUMENT);
            let namespaces: Vec<_> = namespaces.iter().map(AsFd::as_fd).collect();
            // Send the namespaces before the process starts. The message waits in the socket's
            // buffer.
            channel.send(&(), &namespaces)?;
        } else if jiffy_rootless::current().is_some() {
            // A guest that escapes must not become root in the user namespace of an unprivileged
            // user.
            // SAFETY: the closure only makes system calls, which are safe between fork and exec.
            unsafe { command.pre_exec(|| limit_privileges(CapabilitySet::empty())) };
        }
        let start = || tokio::process::Command::from(command).spawn();
        let child = if namespaces.is_some() {
            in_new_pid_namespace(start)?
        } else {
            start()
        }
        .map_err(failed)?;
        if let Some(pid) = child.id() {
            messages.forward("jiffy-vmm", pid);
        }
        Ok((channel, child))
    }
}
