//! [`Vmm`]: the program `jiffy-vmm` with the confinement and settings of its processes. The engine
//! starts one process per guest with it.
//!
//! A *spare* is a VMM process that the daemon starts in advance for the next guest.

use crate::boot_error::BootError;
use crate::jail_namespaces::{JailError, JailNamespaces};
use crate::spare_vmms::SpareVmms;
use crate::vmm_launcher::{FreshVmm, VmmLauncher};
use crate::vmm_limits::VmmLimits;
use jiffy_confinement::Cgroups;
use jiffy_proto::cpu_level::CpuLevel;
use jiffy_proto::vm::DiskLimits;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// VMM program, confinement of its processes, and settings of their guests.
#[derive(Debug, Clone)]
pub struct Vmm {
    launcher: VmmLauncher,
    disk_limits: DiskLimits,
    cpu_level: CpuLevel,
    /// `None` if each process is started when a guest needs it.
    spares: Option<Arc<SpareVmms>>,
}

impl Vmm {
    /// Creates a handle for the program at `path`. If `jailed`, its processes have users and
    /// namespaces of their own, which requires root.
    pub fn new(path: PathBuf, jailed: bool) -> Self {
        Self {
            launcher: VmmLauncher {
                path,
                jail: jailed.then(JailNamespaces::default),
                cgroups: None,
            },
            disk_limits: DiskLimits::default(),
            cpu_level: CpuLevel::Host,
            spares: None,
        }
    }

    /// Limits the processes by control groups.
    #[must_use]
    pub fn with_cgroups(mut self, cgroups: Option<Cgroups>) -> Self {
        self.launcher.cgroups = cgroups;
        self
    }

    /// Limits the rates of the guests' disks.
    #[must_use]
    pub fn with_disk_limits(mut self, limits: DiskLimits) -> Self {
        self.disk_limits = limits;
        self
    }

    /// Holds `count` spare processes ready for the next guests. Clones share the spares. Must be
    /// called after [`Self::with_cgroups`].
    #[must_use]
    pub fn with_spares(mut self, count: usize) -> Self {
        let launcher = self.launcher.clone();
        self.spares = (count > 0).then(|| Arc::new(SpareVmms::new(launcher, count)));
        self
    }

    /// Sets the processor level that guests see.
    #[must_use]
    pub fn with_cpu_level(mut self, level: CpuLevel) -> Self {
        self.cpu_level = level;
        self
    }

    /// Returns the processor level that guests see.
    pub fn cpu_level(&self) -> CpuLevel {
        self.cpu_level
    }

    /// Returns the rate limits of the guests' disks.
    pub(crate) fn disk_limits(&self) -> DiskLimits {
        self.disk_limits
    }

    /// Returns the path of the program.
    pub fn path(&self) -> &Path {
        &self.launcher.path
    }

    /// Returns whether control groups limit the processes.
    pub fn is_limited(&self) -> bool {
        self.launcher.cgroups.is_some()
    }

    /// Returns whether the processes are jailed.
    pub fn is_jailed(&self) -> bool {
        self.launcher.jail.is_some()
    }

    /// Creates the namespaces in advance. Otherwise the first process waits for their creation.
    pub fn prepare(&self) -> Result<(), JailError> {
        self.namespaces().map(drop)
    }

    /// Returns the namespaces that a process enters. `None` if processes are not jailed.
    pub fn namespaces(&self) -> Result<Option<Vec<OwnedFd>>, JailError> {
        self.launcher.namespaces()
    }

    /// Returns a spare process, or starts a process. Must be called inside a tokio runtime.
    pub(crate) fn fresh(&self, limits: VmmLimits) -> Result<FreshVmm, BootError> {
        match &self.spares {
            Some(spares) => spares.take_or_spawn(limits),
            None => self.launcher.spawn(limits),
        }
    }

    /// Returns whether no other guest was started recently.
    pub(crate) fn starts_alone(&self) -> bool {
        // Without spares, starts are not recorded, so the guest is assumed to start alone.
        let spares = self.spares.as_ref();
        spares.is_none_or(|spares| spares.starts_alone())
    }

    /// Starts the missing spare processes when no guest is starting. Must be called inside a tokio
    /// runtime.
    pub fn refill_spares(&self) {
        if let Some(spares) = &self.spares {
            spares.refill();
        }
    }

    /// Returns whether the kernel killed the exited process at the memory limit of its group.
    pub(crate) fn ran_out_of_memory(&self, pid: u32) -> bool {
        self.launcher.ran_out_of_memory(pid)
    }

    /// Removes the control groups of an exited process.
    pub(crate) fn remove_group(&self, pid: u32) {
        self.launcher.remove_group(pid);
    }

    /// Removes the control groups of exited processes, including processes of other daemons.
    pub fn gc(&self) {
        self.launcher.gc();
    }

    /// Terminates spare processes and removes all control groups. No processes may be started
    /// afterwards. Blocks until terminated processes have left their groups, or for the timeout of
    /// [`Cgroups::close`].
    pub fn close(&self) {
        if let Some(spares) = &self.spares {
            spares.close();
        }
        if let Some(cgroups) = &self.launcher.cgroups {
            cgroups.close();
        }
    }
}
