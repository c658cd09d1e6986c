//! [`Place`]: the data directory of a test with one engine, and the guests in it.
//!
//! An *unassigned* guest is started but does not belong to a sandbox yet: it waits for its
//! *identity*, which consists of id, host name, entropy and clock.

use crate::support::{self, LIMIT, programs, skip, until};
use jiffy_agent_client::{AgentClient, ExitStatus, Process, ProcessEvent, ProcessSpec};
use jiffy_engine_api::{
    AfterSnapshot, Engine, EngineError, EngineName, Engines, Guest, SandboxIdentity, SandboxSize,
    SnapshotRequest, UnassignedGuest, new_id,
};
use jiffy_engines::{Host, Programs, open_engines};
use jiffy_image::Home;
use jiffy_microvm_engine::Cgroups;
use jiffy_proto::agent::ENVD_PORT;
use std::fs;
use std::io;
use std::ops::Deref;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use tempfile::TempDir;

/// Template of all guests in these tests.
pub const TEMPLATE: &str = "base";
/// Maximum output of a command in a guest, in bytes.
const MAX_OUTPUT: usize = 1 << 20;

/// Separate data directory. Files that take long to build are links to the real data directory.
pub struct Place {
    dir: TempDir,
    /// Engine under test.
    pub engine: EngineName,
}

impl Place {
    /// Creates a directory for `engine`. If this machine does not support the engine, `test` is
    /// recorded as skipped.
    pub fn of(engine: EngineName, test: &str) -> Option<Self> {
        if let Some(why) = missing(engine) {
            skip(test, &why);
            return None;
        }
        let real = Home::locate().unwrap().path().to_owned();
        if !real.join("templates").join(TEMPLATE).exists() {
            skip(test, &format!("template {TEMPLATE} is not built"));
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        for name in ["templates", "images", "kernel", "disks"] {
            symlink(real.join(name), dir.path().join(name)).unwrap();
        }
        Some(Self { dir, engine })
    }

    /// Opens the engines like a daemon.
    pub async fn open(&self) -> Opened {
        self.open_with(self.engine, programs()).await
    }

    /// Opens the engines like a daemon with these programs and the default engine `default`.
    pub async fn open_with(&self, default: EngineName, programs: Programs) -> Opened {
        let mut host = Host::new(Home::at(self.dir.path()).unwrap(), programs);
        if nix::unistd::geteuid().is_root() {
            host.limit_vmms(Cgroups::find().unwrap());
        }
        let engines = open_engines(host, None, default, None).await.unwrap();
        let engine = engines.get(&self.engine.to_string()).unwrap().clone();
        Opened { engine, engines }
    }

    /// Waits until no process, control group or file refers to the directory.
    pub async fn wait_empty(&self) {
        let own = self.dir.path();
        until("no process", async || processes_of(own), Vec::is_empty).await;
        self.wait_without_guests().await;
    }

    /// Waits until no file of a guest exists. Processes of the engine itself may remain.
    pub async fn wait_without_guests(&self) {
        let run = self.dir.path().join("run");
        let remaining = async || {
            let mut paths = entries(&run.join("vmm"));
            paths.extend(entries(&run.join("gvisor")));
            paths.extend(entries(&run.join("gvisor/state")));
            // The directory `state` itself remains. Only its entries belong to guests.
            paths.retain(|path| !path.ends_with("gvisor/state"));
            paths
        };
        until("all files to be removed", remaining, Vec::is_empty).await;
    }

    /// Boots a guest with a new identity.
    pub async fn guest(&self, engine: &Opened) -> Running {
        let unassigned = engine.boot(TEMPLATE, size()).await.unwrap();
        Running::assign_identity(unassigned, &new_identity()).await
    }

    /// Restores a guest from a snapshot with a new identity.
    pub async fn restored(&self, engine: &Opened, id: &str) -> Running {
        let unassigned = engine.restore(id, None).await.unwrap();
        Running::assign_identity(unassigned, &new_identity()).await
    }
}

/// Engines of a daemon, and the engine under test.
pub struct Opened {
    engine: Arc<dyn Engine>,
    pub engines: Engines,
}

impl Deref for Opened {
    type Target = dyn Engine;

    fn deref(&self) -> &Self::Target {
        &*self.engine
    }
}

/// Returns the reason why this machine does not support the engine. `None` if it does.
pub fn missing(engine: EngineName) -> Option<String> {
    let why = match engine {
        EngineName::MicroVm => jiffy_microvm_engine::host_kvm::open().err()?.to_string(),
        EngineName::Gvisor if !nix::unistd::geteuid().is_root() => {
            "gVisor sandboxes are for root".to_owned()
        }
        EngineName::Gvisor => programs().gvisor.err()?.to_string(),
    };
    Some(format!("the engine {engine}: {why}"))
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// Returns the processes, except this one, whose command lines or open files refer to the
/// directory.
fn processes_of(directory: &Path) -> Vec<PathBuf> {
    let name = directory.to_str().unwrap();
    let own = std::process::id().to_string();
    let mut processes = entries(Path::new("/proc"));
    processes.retain(|process| {
        let is_process = process
            .file_name()
            .is_some_and(|n| n.to_string_lossy().bytes().all(|b| b.is_ascii_digit()));
        let command = || fs::read(process.join("cmdline")).unwrap_or_default();
        let named = || String::from_utf8_lossy(&command()).contains(name);
        let has_open_files = || {
            entries(&process.join("fd"))
                .iter()
                .any(|fd| fs::read_link(fd).is_ok_and(|to| to.starts_with(directory)))
        };
        is_process && !process.ends_with(&own) && (named() || has_open_files())
    });
    processes
}

/// Returns the size of a small guest.
pub fn size() -> SandboxSize {
    SandboxSize {
        vcpus: 1,
        memory_mib: 256,
        disk_mib: 256,
    }
}

/// Returns a new identity.
pub fn new_identity() -> SandboxIdentity {
    SandboxIdentity {
        id: new_id().unwrap(),
        ..SandboxIdentity::default()
    }
}

/// Returns a new id for a snapshot.
pub fn name() -> String {
    new_id().unwrap()
}

/// Guest and a client of its agent.
pub struct Running {
    pub guest: Arc<dyn Guest>,
    pub agent: AgentClient,
}

impl Running {
    /// Assigns the identity.
    pub async fn assign_identity(
        unassigned: Box<dyn UnassignedGuest>,
        sandbox_identity: &SandboxIdentity,
    ) -> Self {
        Self::of(unassigned.assign_identity(sandbox_identity).await.unwrap())
    }

    /// Creates the value for a running guest.
    pub fn of(guest: Arc<dyn Guest>) -> Self {
        // The client must not keep the guest alive.
        let weak: Weak<dyn Guest> = Arc::downgrade(&guest);
        let agent = AgentClient::new(move || {
            let weak = weak.clone();
            async move {
                let guest = weak.upgrade().ok_or(io::ErrorKind::NotConnected)?;
                guest.connect(ENVD_PORT).await
            }
        });
        Self { guest, agent }
    }

    /// Starts a program as root.
    pub async fn start(&self, command: &[&str]) -> Process {
        let mut spec = ProcessSpec::new(command[0], command[1..].iter().copied());
        spec.user = Some("root".to_owned());
        self.agent.start(&spec).await.unwrap()
    }

    /// Runs a shell script as root. Returns the exit status, stdout and stderr.
    pub async fn script(&self, script: &str) -> (ExitStatus, String, String) {
        let process = self.start(&["sh", "-c", script]).await;
        let (status, stdout, stderr) = process.output(MAX_OUTPUT).await.unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
        (status, text(&stdout), text(&stderr))
    }

    /// Runs a shell script that must succeed, and returns its output.
    pub async fn sh(&self, script: &str) -> String {
        let (status, stdout, stderr) = self.script(script).await;
        assert_eq!(status.exit_code, 0, "{script}: {stdout}\n{stderr}");
        stdout
    }

    /// Starts a process that counts in its memory and writes the count to the file `counted`.
    pub async fn count(&self) {
        let program = "import itertools, os, time
for n in itertools.count():
    with open('/root/new', 'w') as f: f.write(f'{os.getpid()} {n}')
    os.rename('/root/new', '/root/counted')
    time.sleep(0.01)";
        self.sh(&format!(
            "nohup python3 -c \"{program}\" >/dev/null 2>&1 </dev/null & until [ -s /root/counted ]; do sleep 0.01; done"
        ))
        .await;
    }

    /// Returns the id of the counting process and its count.
    pub async fn counted(&self) -> (u32, u64) {
        let text = self.sh("cat /root/counted").await;
        let (pid, count) = text.split_once(' ').unwrap();
        (pid.parse().unwrap(), count.parse().unwrap())
    }

    /// Waits until the same process has counted further than `from`. Returns its id and count.
    pub async fn wait_count_above(&self, from: (u32, u64)) -> (u32, u64) {
        let query = async || self.counted().await;
        let now = until("the process to count", query, |now| now.1 > from.1).await;
        assert_eq!(now.0, from.0, "another process counts");
        now
    }

    /// Takes a snapshot and returns its id.
    pub async fn snapshot(&self, then: AfterSnapshot) -> Result<String, EngineError> {
        let id = name();
        let taken = self.guest.take_snapshot(SnapshotRequest::new(&id, then));
        taken.await?;
        Ok(id)
    }

    /// Stops the guest and checks that its process has exited.
    pub async fn stop(self) {
        let pid = self.guest.pid();
        self.guest.stop().await;
        assert!(!pid.is_some_and(alive), "its process has not exited");
    }
}

/// Returns whether a process exists. Zombies do not count because they hold no resources.
pub fn alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().unwrap_or_default().trim();
    !state.is_empty() && !state.starts_with('Z')
}

/// Waits until a process has exited.
pub async fn exited(pid: u32) {
    until("a process to exit", async || alive(pid), |alive| !alive).await;
}

/// Returns the next part of a process's output.
pub async fn next_output(process: &mut Process) -> String {
    loop {
        let event = tokio::time::timeout(LIMIT, process.next_event());
        match event.await.unwrap().unwrap() {
            Some(ProcessEvent::Stdout(text)) => return String::from_utf8_lossy(&text).into_owned(),
            Some(ProcessEvent::KeepAlive) => {}
            other => panic!("{other:?}"),
        }
    }
}

pub use support::within;
