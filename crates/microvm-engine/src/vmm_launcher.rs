//! Start of VMM processes, jailed and in control groups.

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

/// Task that moves a VMM to its control groups. A guest counts as up only when it is done.
pub(crate) type LimitTask = tokio::task::JoinHandle<Result<(), CgroupError>>;

/// VMM process that has received no request yet.
#[derive(Debug)]
pub(crate) struct FreshVmm {
    pub channel: Channel,
    pub child: Child,
    /// Task that limits the process. `None` if processes are not limited.
    pub limit_task: Option<LimitTask>,
}

/// VMM program, and the confinement of its processes.
#[derive(Debug, Clone)]
pub(crate) struct VmmLauncher {
    pub path: PathBuf,
    /// `None` if processes run as the user that starts them.
    pub jail: Option<JailNamespaces>,
    pub cgroups: Option<Cgroups>,
}

impl VmmLauncher {
    /// Returns the namespaces that a process enters. `None` if processes are not jailed.
    pub fn namespaces(&self) -> Result<Option<Vec<OwnedFd>>, JailError> {
        let jail = self.jail.as_ref();
        jail.map(|jail| jail.get(&self.path)).transpose()
    }

    /// Starts a process and connects to it. Must be called inside a tokio runtime.
    pub fn spawn(&self, limits: VmmLimits) -> Result<FreshVmm, BootError> {
        let (channel, child) = self.spawn_unlimited()?;
        let cgroups = self.cgroups.clone().zip(child.id());
        // Moving a process takes some 15 ms in the kernel; the guest boots meanwhile.
        let limit_task = cgroups.map(|(cgroups, pid)| {
            tokio::task::spawn_blocking(move || cgroups.limit(pid, limits.into()))
        });
        Ok(FreshVmm {
            channel,
            child,
            limit_task,
        })
    }

    /// Starts a process that is in its control groups, without limits yet, and has it make KVM's
    /// objects. Blocks while the kernel moves it. Must be called inside a tokio runtime.
    pub fn spawn_spare(&self, memory_mib: u32) -> Result<(Channel, Child), BootError> {
        let kvm = host_kvm::open()?;
        let (channel, mut child) = self.spawn_unlimited()?;
        if let (Some(cgroups), Some(pid)) = (&self.cgroups, child.id())
            && let Err(e) = cgroups.enter(pid)
        {
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

    /// Limits a spare process.
    pub fn limit_spare(&self, spare: &Child, limits: VmmLimits) -> Option<LimitTask> {
        let (cgroups, pid) = self.cgroups.clone().zip(spare.id())?;
        let set = move || cgroups.set_limits(pid, limits.into());
        Some(tokio::task::spawn_blocking(set))
    }

    /// Returns true if the kernel killed an ended process at its group's memory limit.
    pub fn ran_out_of_memory(&self, pid: u32) -> bool {
        let cgroups = self.cgroups.as_ref();
        cgroups.is_some_and(|cgroups| cgroups.memory_kills(pid) > 0)
    }

    /// Removes control groups of ended processes, also of those that another daemon started.
    pub fn gc(&self) {
        if let Some(cgroups) = &self.cgroups {
            cgroups.gc();
        }
    }

    /// Removes the control groups of an ended process.
    pub fn remove_group(&self, pid: u32) {
        if let Some(cgroups) = &self.cgroups {
            cgroups.remove_group(pid);
        }
    }

    /// Starts a process whose control socket is its standard input. Nothing else is put to a number
    /// of its own before it runs: that would take a fork, which copies the page tables of all our
    /// memory and has us fault on each page again. The namespaces travel over the socket.
    fn spawn_unlimited(&self) -> Result<(Channel, Child), BootError> {
        let failed = |source| BootError::Spawn {
            path: self.path.clone(),
            source,
        };
        let (channel, theirs) = Channel::pair()?;
        let messages = ChildMessages::new().map_err(failed)?;
        let mut command = Command::new(&self.path);
        command
            .env_clear()
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(messages.stderr().map_err(failed)?);
        let namespaces = self.namespaces()?;
        if let Some(namespaces) = &namespaces {
            command.arg(ENTER_ARGUMENT);
            let namespaces: Vec<_> = namespaces.iter().map(AsFd::as_fd).collect();
            channel.send(&(), &namespaces)?;
        } else if jiffy_rootless::current().is_some() {
            // A guest that breaks out must not become root of an ordinary user's namespace.
            // SAFETY: only system calls between fork and exec.
            unsafe { command.pre_exec(|| limit_privileges(CapabilitySet::empty())) };
        }
        let start = || tokio::process::Command::from(command).spawn();
        let child = match namespaces.is_some() {
            true => in_new_pid_namespace(start)?,
            false => start(),
        };
        let child = child.map_err(failed)?;
        if let Some(pid) = child.id() {
            messages.forward("jiffy-vmm", pid);
        }
        Ok((channel, child))
    }
}
