//! Guests for the tests of this crate, and the recording of skipped tests.
// Each test program uses only a part of this module. Tests may panic.
#![allow(dead_code, clippy::unwrap_used, clippy::panic)]

pub mod script;
pub mod wire;

use jiffy_agent_client::{AgentClient, ProcessSpec};
use jiffy_engine_api::ExitReason;
use jiffy_engines::{Host, PreparedTemplate, ProgramError, Programs, SandboxSpec};
use jiffy_image::Home;
use jiffy_microvm_engine::{Connector, MicroVm, NetSpec};
use jiffy_proto::agent::ENVD_PORT;
use std::fs::{self, OpenOptions};
use std::future::Future;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::net::UnixStream;

/// Timeout of every operation. The slowest hosts need a fraction of it.
pub const LIMIT: Duration = Duration::from_secs(180);
/// Maximum output of a command in a guest, in bytes.
const MAX_OUTPUT: usize = 1 << 20;

/// Returns the release builds of `jiffy-vmm` and `jiffy-agent`, and `jiffy-gvisor` if it was built.
pub fn programs() -> Programs {
    let directory = std::env::var_os("JIFFY_BIN_DIR").map_or_else(
        || {
            let own = std::env::current_exe().unwrap();
            own.ancestors().nth(3).unwrap().join("release")
        },
        PathBuf::from,
    );
    let program = |name: &str| {
        let path = directory.join(name);
        assert!(
            path.exists(),
            "{} is missing: run `make build` first",
            path.display()
        );
        path
    };
    Programs {
        vmm: jiffy_microvm_engine::Vmm::new(
            program("jiffy-vmm"),
            nix::unistd::Uid::effective().is_root(),
        ),
        agent: program("jiffy-agent"),
        gvisor: Some(directory.join("jiffy-gvisor"))
            .filter(|path| path.exists())
            .ok_or(ProgramError::Missing {
                name: "jiffy-gvisor",
                searched: format!("searched {}", directory.display()),
                remedy: "run `make build`",
                variable: "JIFFY_BIN_DIR",
            }),
        functions: Ok(directory.join("jiffy-functions")),
    }
}

/// Opens the template `base`. If guests cannot run on this machine, `test` is recorded as skipped
/// with the reason.
pub fn base(test: &str) -> Option<PreparedTemplate> {
    if let Err(e) = jiffy_microvm_engine::host_kvm::open() {
        skip(test, &e.to_string());
        return None;
    }
    let host = Host::new(Home::locate().unwrap(), programs());
    match host.prepare("base", &mut |_| ()) {
        Ok(prepared) => Some(prepared),
        Err(e) if !nix::unistd::geteuid().is_root() => {
            skip(test, &format!("template base is missing: {e}"));
            None
        }
        Err(e) => panic!("template base: {e}"),
    }
}

/// Records `test` as skipped.
pub fn skip(test: &str, reason: &str) {
    eprintln!("SKIPPED {test}: {reason}");
    if let Some(log) = std::env::var_os("JIFFY_SKIP_LOG") {
        let mut log = OpenOptions::new()
            .append(true)
            .create(true)
            .open(log)
            .unwrap();
        writeln!(log, "{test}: {reason}").unwrap();
    }
}

/// Returns a size with the default disk.
pub fn size(vcpus: u8, memory_mib: u32) -> SandboxSpec {
    let mut spec = SandboxSpec::default();
    spec.size.vcpus = vcpus;
    spec.size.memory_mib = memory_mib;
    spec
}

/// Booted guest.
pub struct Guest {
    pub vm: MicroVm,
    pub agent: AgentClient,
}

impl Guest {
    /// Boots a guest.
    pub async fn boot(prepared: &PreparedTemplate, spec: &SandboxSpec) -> Self {
        Self::with(prepared, spec, None).await
    }

    /// Boots a guest with a network interface.
    pub async fn with(
        prepared: &PreparedTemplate,
        spec: &SandboxSpec,
        net: Option<NetSpec>,
    ) -> Self {
        match prepared.boot_with(spec, net).await {
            Ok(vm) => Self::of(vm),
            Err(e) => panic!("{spec:?} does not boot: {e}"),
        }
    }

    /// Creates the value for a running VM.
    pub fn of(vm: MicroVm) -> Self {
        let agent = jiffy_engines::agent(&vm);
        Self { vm, agent }
    }

    /// Runs a program as root, which must succeed. Returns its output.
    pub async fn run(&self, command: &[&str]) -> String {
        let mut spec = ProcessSpec::new(command[0], command[1..].iter().copied());
        spec.user = Some("root".to_owned());
        let output = async { self.agent.start(&spec).await?.output(MAX_OUTPUT).await };
        let done = within(&format!("{command:?}"), output).await;
        let (status, stdout, stderr) =
            done.unwrap_or_else(|e| panic!("{command:?}: {e}; the guest: {:?}", self.vm.end()));
        let (stdout, stderr) = (
            String::from_utf8_lossy(&stdout).into_owned(),
            String::from_utf8_lossy(&stderr),
        );
        assert_eq!(
            status.exit_code, 0,
            "{command:?}: {status:?}\n{stdout}\n{stderr}"
        );
        stdout
    }

    /// Runs a Python program, which must succeed. Returns its output.
    pub async fn python(&self, program: &str) -> String {
        self.run(&["python3", "-c", program]).await
    }

    /// Returns a value of `/proc/meminfo` in MiB.
    pub async fn meminfo(&self, name: &str) -> u64 {
        kib_line(&self.run(&["cat", "/proc/meminfo"]).await, name) / 1024
    }

    /// Returns the resident memory of the VMM process, in MiB.
    pub fn resident(&self) -> u64 {
        self.memory("VmRSS")
    }

    /// Returns the maximum resident memory so far, in MiB: a guest returns memory that it does not
    /// use.
    pub fn peak_resident(&self) -> u64 {
        self.memory("VmHWM")
    }

    fn memory(&self, line: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.vm.vmm_pid())).unwrap();
        kib_line(&status, line) / 1024
    }

    /// Stops the guest, which must still be running. Checks that the VMM has exited, and did not
    /// violate its system call filter.
    pub async fn finish(self) {
        assert_eq!(self.vm.end(), None, "{}", self.vm.console_tail());
        let vmm = format!("/proc/{}", self.vm.vmm_pid());
        let end = self.vm.stop().await;
        assert_eq!(end, ExitReason::Requested);
        assert!(!Path::new(&vmm).exists(), "the VMM has not exited");
    }
}

/// Connects to the agent.
pub async fn connect(connector: &Connector) -> io::Result<UnixStream> {
    connector.connect(ENVD_PORT).await.map_err(io::Error::other)
}

/// Parses a line `name: number kB`.
fn kib_line(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|l| l.strip_prefix(name)).unwrap();
    let number = line.trim_start_matches(':').split_whitespace().next();
    number.unwrap().parse().unwrap()
}

/// Returns the memory in MiB that the host can give to programs.
pub fn host_available() -> u64 {
    kib_line(
        &fs::read_to_string("/proc/meminfo").unwrap(),
        "MemAvailable",
    ) / 1024
}

/// Waits for `work` for at most [`LIMIT`].
pub async fn within<F: Future>(what: &str, work: F) -> F::Output {
    match tokio::time::timeout(LIMIT, work).await {
        Ok(output) => output,
        Err(_) => panic!("{what}: not done after {LIMIT:?}"),
    }
}

/// Repeats `query` until `is_expected` accepts the result, for at most [`LIMIT`].
pub async fn until<T: std::fmt::Debug>(
    what: &str,
    mut query: impl AsyncFnMut() -> T,
    is_expected: impl Fn(&T) -> bool,
) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        let answer = query().await;
        if is_expected(&answer) {
            return answer;
        }
        assert!(
            Instant::now() < end,
            "timed out waiting for {what}: {answer:?}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
