//! A data directory of a test's own with one engine, and guests in it.

use crate::support::{self, LIMIT, programs, skip, until};
use jiffy_agent_client::{AgentClient, ExitStatus, Process, ProcessEvent, ProcessSpec};
use jiffy_engine_api::{
    AfterSnapshot, Engine, EngineError, EngineName, Engines, Guest, SandboxIdentity, SandboxSize,
    UnassignedGuest, new_id,
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

/// The template of all guests here.
pub const TEMPLATE: &str = "base";
/// Most output of a command in a guest.
const MAX_OUTPUT: usize = 1 << 20;

/// A data directory of its own, which borrows what takes long to build from the real one.
pub struct Place {
    dir: TempDir,
    /// The engine that is asked.
    pub engine: EngineName,
}

impl Place {
    /// One for `engine`; if this machine cannot have it, `test` is counted as skipped.
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

    /// Opens the engines as a daemon does.
    pub async fn open(&self) -> Opened {
        self.open_with(self.engine, programs()).await
    }

    /// Opens the engines as a daemon with these programs does whose default engine is `default`.
    pub async fn open_with(&self, default: EngineName, programs: Programs) -> Opened {
        let mut host = Host::new(Home::at(self.dir.path()).unwrap(), programs);
        if nix::unistd::geteuid().is_root() {
            host.limit_vmms(Cgroups::find().unwrap());
        }
        let engines = open_engines(host, None, default, None).await.unwrap();
        let engine = engines.get(&self.engine.to_string()).unwrap().clone();
        Opened { engine, engines }
    }

    /// Waits until nothing is left: no process, no control group, nothing in a directory.
    pub async fn is_empty(&self) {
        let own = self.dir.path();
        until("no process", async || processes_of(own), Vec::is_empty).await;
        self.is_empty_but_for_the_engine().await;
    }

    /// Waits until nothing of a guest is left.
    pub async fn is_empty_but_for_the_engine(&self) {
        let run = self.dir.path().join("run");
        let left = async || {
            let mut left = entries(&run.join("vmm"));
            left.extend(entries(&run.join("gvisor")));
            left.extend(entries(&run.join("gvisor/state")));
            left.retain(|path| !path.ends_with("gvisor/state"));
            left
        };
        until("nothing to be left", left, Vec::is_empty).await;
    }

    /// A guest that was booted, as somebody new.
    pub async fn guest(&self, engine: &Opened) -> Running {
        let unassigned = engine.boot(TEMPLATE, size()).await.unwrap();
        Running::assign_identity(unassigned, &somebody()).await
    }

    /// A guest made from a snapshot, as somebody new.
    pub async fn restored(&self, engine: &Opened, id: &str) -> Running {
        let unassigned = engine.restore(id, None).await.unwrap();
        Running::assign_identity(unassigned, &somebody()).await
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

/// Why this machine cannot have the engine; none: it can.
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

/// Processes whose command line or open files are in the directory, and those that another program
/// left behind.
fn processes_of(directory: &Path) -> Vec<PathBuf> {
    let name = directory.to_str().unwrap();
    let own = std::process::id().to_string();
    let mut found = entries(Path::new("/proc"));
    found.retain(|process| {
        let is_process = process
            .file_name()
            .is_some_and(|n| n.to_string_lossy().bytes().all(|b| b.is_ascii_digit()));
        let command = || fs::read(process.join("cmdline")).unwrap_or_default();
        let named = || String::from_utf8_lossy(&command()).contains(name);
        let holds = || {
            entries(&process.join("fd"))
                .iter()
                .any(|fd| fs::read_link(fd).is_ok_and(|to| to.starts_with(directory)))
        };
        is_process && !process.ends_with(&own) && (named() || holds())
    });
    found
}

/// A small guest.
pub fn size() -> SandboxSize {
    SandboxSize {
        vcpus: 1,
        memory_mib: 256,
        disk_mib: 256,
    }
}

/// Makes an identity that no guest had before.
pub fn somebody() -> SandboxIdentity {
    SandboxIdentity {
        id: new_id().unwrap(),
        ..SandboxIdentity::default()
    }
}

/// A name for a snapshot.
pub fn name() -> String {
    new_id().unwrap()
}

/// A guest and a client of its agent.
pub struct Running {
    pub guest: Arc<dyn Guest>,
    pub agent: AgentClient,
}

impl Running {
    /// One that is told who it is.
    pub async fn assign_identity(
        unassigned: Box<dyn UnassignedGuest>,
        sandbox_identity: &SandboxIdentity,
    ) -> Self {
        Self::of(unassigned.assign_identity(sandbox_identity).await.unwrap())
    }

    /// One that is there.
    pub fn of(guest: Arc<dyn Guest>) -> Self {
        // Dropping the guest drops all of it.
        let way: Weak<dyn Guest> = Arc::downgrade(&guest);
        let agent = AgentClient::new(move || {
            let way = way.clone();
            async move {
                let guest = way.upgrade();
                let guest = guest.ok_or(io::ErrorKind::NotConnected)?;
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

    /// Runs a shell script as root; how it ended, and what it wrote to stdout and stderr.
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

    /// Has a process count in its memory, and write how far it came to the file `counted`.
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

    /// Returns the process that counts, and how far it came.
    pub async fn counted(&self) -> (u32, u64) {
        let text = self.sh("cat /root/counted").await;
        let (pid, count) = text.split_once(' ').unwrap();
        (pid.parse().unwrap(), count.parse().unwrap())
    }

    /// Waits until it has counted on from `from`, as the same process.
    pub async fn counts_on(&self, from: (u32, u64)) -> (u32, u64) {
        let ask = async || self.counted().await;
        let now = until("it to count on", ask, |now| now.1 > from.1).await;
        assert_eq!(now.0, from.0, "another process counts");
        now
    }

    /// Takes a snapshot and gives its name.
    pub async fn snapshot(&self, then: AfterSnapshot) -> Result<String, EngineError> {
        let id = name();
        let taken = self.guest.take_snapshot(&id, None, then, None, None);
        taken.await?;
        Ok(id)
    }

    /// Ends it; nothing of it is left.
    pub async fn stop(self) {
        let pid = self.guest.pid();
        self.guest.stop().await;
        assert!(!pid.is_some_and(alive), "its process is still there");
    }
}

/// True if a process exists (zombies count as gone: they hold nothing).
pub fn alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().unwrap_or_default().trim();
    !state.is_empty() && !state.starts_with('Z')
}

/// Waits until a process is gone.
pub async fn gone(pid: u32) {
    until("a process to go", async || alive(pid), |alive| !alive).await;
}

/// The next line or piece that a process writes.
pub async fn heard(process: &mut Process) -> String {
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
