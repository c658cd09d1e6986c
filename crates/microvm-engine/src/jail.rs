//! Jail of VMM processes: empty namespaces made once for all, and a PID namespace for each.
//!
//! A VMM then confines itself: `crates/vmm/src/jail.rs`.

use crate::host_kvm;
use crate::spare_vmms::{FreshVmm, SpareVmms};
use crate::vm::BootError;
use crate::vmm_limits::VmmLimits;
use jiffy_cgroup::{CgroupError, Cgroups};
use jiffy_engine_api::ChildMessages;
use jiffy_proto::channel::Channel;
use jiffy_proto::cpu_level::CpuLevel;
use jiffy_proto::vm::jail::{ENTER_ARGUMENT, FIRST_UID, MAKE_ARGUMENT, NAMESPACES, READY, UIDS};
use jiffy_proto::vm::{DiskLimits, FdIndex, Request};
use nix::sched::{CloneFlags, setns, unshare};
use parking_lot::Mutex;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use tokio::process::Child;

/// Task that moves a VMM to its control groups. A guest counts as up only when it is done.
pub(crate) type LimitTask = tokio::task::JoinHandle<Result<(), CgroupError>>;

/// VMM program, and the confinement of its processes.
#[derive(Debug, Clone)]
pub struct Vmm {
    path: PathBuf,
    /// None: they run as the user that starts them.
    jail: Option<Arc<Mutex<Option<JailNamespaces>>>>,
    cgroups: Option<Cgroups>,
    disk_limits: DiskLimits,
    cpu_level: CpuLevel,
    /// None: each process is started when a guest needs it.
    spares: Option<Arc<SpareVmms>>,
}

/// Failure to make the VMM's namespaces.
#[derive(Debug, thiserror::Error)]
#[error("cannot confine the VMM: {what}: {source}; {}", remedy())]
pub struct JailError {
    what: &'static str,
    source: io::Error,
}

fn remedy() -> String {
    match jiffy_rootless::is_chroot() {
        true => format!(
            "a chroot forbids user namespaces: {}",
            jiffy_rootless::CHROOT_REMEDY
        ),
        false => "allow user namespaces on this host (sysctl user.max_user_namespaces), or set \
                  JIFFY_JAIL=off to run VMMs as the user who starts them"
            .to_owned(),
    }
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> JailError {
    move |source| JailError { what, source }
}

/// Descriptors of [`NAMESPACES`].
type JailNamespaces = Vec<OwnedFd>;

impl Vmm {
    /// Creates the program at `path`. With `jailed` its processes have users and namespaces of
    /// their own, for which the caller must be root.
    pub fn new(path: PathBuf, jailed: bool) -> Self {
        let jail = jailed.then(Arc::default);
        Self {
            path,
            jail,
            cgroups: None,
            disk_limits: DiskLimits::default(),
            cpu_level: CpuLevel::Host,
            spares: None,
        }
    }

    /// Limits its processes by control groups.
    pub fn with_cgroups(mut self, cgroups: Option<Cgroups>) -> Self {
        self.cgroups = cgroups;
        self
    }

    /// Limits the rates of its guests' disks.
    pub fn with_disk_limits(mut self, limits: DiskLimits) -> Self {
        self.disk_limits = limits;
        self
    }

    /// Keeps so many processes ready for the next guests. Its clones share them; to be called after
    /// [`Self::with_cgroups`].
    pub fn with_spares(mut self, count: usize) -> Self {
        self.spares = (count > 0).then(|| Arc::new(SpareVmms::new(count)));
        self
    }

    pub(crate) fn spares(&self) -> Option<&SpareVmms> {
        self.spares.as_deref()
    }

    /// The same with guests that see a processor of `level`.
    pub fn with_cpu_level(mut self, level: CpuLevel) -> Self {
        self.cpu_level = level;
        self
    }

    /// Processor that guests see.
    pub fn cpu_level(&self) -> CpuLevel {
        self.cpu_level
    }

    /// Rate limits of its guests' disks.
    pub(crate) fn disk_limits(&self) -> DiskLimits {
        self.disk_limits
    }

    /// Path of the program.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns true if control groups limit its processes.
    pub fn is_limited(&self) -> bool {
        self.cgroups.is_some()
    }

    /// Returns true if its processes are jailed.
    pub fn is_jailed(&self) -> bool {
        self.jail.is_some()
    }

    /// Makes the namespaces in advance. Otherwise the first process waits for them.
    pub fn prepare(&self) -> Result<(), JailError> {
        self.namespaces().map(drop)
    }

    /// Returns the namespaces that a process is to enter.
    pub fn namespaces(&self) -> Result<Option<Vec<OwnedFd>>, JailError> {
        let Some(jail) = &self.jail else {
            return Ok(None);
        };
        let mut made = jail.lock();
        if made.is_none() {
            *made = Some(make_namespaces(&self.path)?);
        }
        let duplicates = made.iter().flatten().map(OwnedFd::try_clone);
        let duplicates = duplicates.collect::<io::Result<_>>();
        Ok(Some(duplicates.map_err(failed("duplicating descriptors"))?))
    }

    /// Starts a process and connects to it. Must be called inside a tokio runtime.
    pub(crate) fn spawn(&self, limits: VmmLimits) -> Result<FreshVmm, BootError> {
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
    pub(crate) fn spawn_spare(&self, memory_mib: u32) -> Result<(Channel, Child), BootError> {
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
    pub(crate) fn limit_spare(&self, spare: &Child, limits: VmmLimits) -> Option<LimitTask> {
        let (cgroups, pid) = self.cgroups.clone().zip(spare.id())?;
        let set = move || cgroups.set_limits(pid, limits.into());
        Some(tokio::task::spawn_blocking(set))
    }

    /// Returns true if the kernel killed an ended process at its group's memory limit.
    pub(crate) fn ran_out_of_memory(&self, pid: u32) -> bool {
        let cgroups = self.cgroups.as_ref();
        cgroups.is_some_and(|cgroups| cgroups.memory_kills(pid) > 0)
    }

    /// Removes control groups of ended processes, also of those that another daemon started.
    pub fn gc(&self) {
        if let Some(cgroups) = &self.cgroups {
            cgroups.gc();
        }
    }

    /// Ends spare processes, and removes all control groups when no more processes are started.
    /// Blocks for a second at most.
    pub fn close(&self) {
        if let Some(spares) = &self.spares {
            spares.close();
        }
        if let Some(cgroups) = &self.cgroups {
            cgroups.close();
        }
    }

    /// Removes the control groups of an ended process.
    pub(crate) fn remove_group(&self, pid: u32) {
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
            unsafe { command.pre_exec(jiffy_rootless::drop_privileges) };
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

/// Runs `start` on this thread; the one process that it starts is process 1 of a new PID namespace.
fn in_new_pid_namespace<T>(start: impl FnOnce() -> T) -> Result<T, JailError> {
    let own = File::open("/proc/self/ns/pid").map_err(failed("opening /proc/self/ns/pid"))?;
    unshare(CloneFlags::CLONE_NEWPID)
        .map_err(|e| failed("making a process namespace")(e.into()))?;
    let started = start();
    // Otherwise the thread could not start further processes.
    setns(&own, CloneFlags::CLONE_NEWPID)
        .map_err(|e| failed("going back to the process namespace")(e.into()))?;
    Ok(started)
}

/// Makes the program create the namespaces, and opens them.
fn make_namespaces(program: &Path) -> Result<JailNamespaces, JailError> {
    let mut maker = Command::new(program)
        .arg(MAKE_ARGUMENT)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed("starting the VMM program"))?;
    let (stdin, stdout) = (maker.stdin.take(), maker.stdout.take());
    let made = match (stdin, stdout) {
        (Some(stdin), Some(stdout)) => open_namespaces(maker.id(), stdin, stdout),
        _ => Err(io::ErrorKind::BrokenPipe.into()),
    };
    // It exits when its standard input is closed.
    let left = maker.wait_with_output();
    made.map_err(|e| {
        let said = left.map(|left| String::from_utf8_lossy(&left.stderr).trim().to_owned());
        let said = said.ok().filter(|said| !said.is_empty());
        failed("making namespaces")(said.map_or(e, io::Error::other))
    })
}

fn open_namespaces(
    maker: u32,
    mut say: impl Write,
    mut said: impl Read,
) -> io::Result<JailNamespaces> {
    let mut wait = || {
        let mut word = [0];
        said.read_exact(&mut word)?;
        match word {
            [READY] => Ok(()),
            _ => Err(io::Error::other("the VMM program is of another version")),
        }
    };
    let process = PathBuf::from(format!("/proc/{maker}"));
    wait()?;
    let map = format!("0 {FIRST_UID} {UIDS}");
    for file in ["uid_map", "gid_map"] {
        fs::write(process.join(file), &map)?;
    }
    say.write_all(&[READY])?;
    wait()?;
    let open = |name| File::open(process.join("ns").join(name)).map(OwnedFd::from);
    NAMESPACES.iter().map(open).collect()
}
