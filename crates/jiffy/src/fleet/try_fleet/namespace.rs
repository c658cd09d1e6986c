//! Network and process namespaces of the hosts of `jiffy fleet try`.
//!
//! The namespaces have no names below `/run/netns`: processes hold them, and they end with those
//! processes. The host's own network is not changed.

use anyhow::Context;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Maximum time until the first process of a namespace runs.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which the start and the end of the first process are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Network, mount and process namespace. All of its processes end when the value is dropped.
pub struct Namespace {
    holder: Child,
    /// First process.
    init: u32,
    has_ended: bool,
}

impl Namespace {
    /// Creates a namespace.
    pub fn new() -> anyhow::Result<Self> {
        // The first process waits for orphaned processes. The kernel ends it with its parent, and
        // its parent with this process.
        let script = "mount -t tmpfs none /run && while :; do sleep 3600 & wait $!; done";
        let mut holder = Command::new("setpriv")
            .args([
                "--pdeathsig",
                "KILL",
                "unshare",
                "--net",
                "--mount",
                "--pid",
            ])
            .args([
                "--fork",
                "--kill-child=KILL",
                "--mount-proc",
                "sh",
                "-c",
                script,
            ])
            .stdin(Stdio::null())
            .spawn()
            .context("cannot start unshare: install util-linux, and run as root")?;
        let started = Instant::now();
        let init = loop {
            if let Some(init) = first_child(holder.id()) {
                break init;
            }
            if let Some(status) = holder.try_wait()? {
                anyhow::bail!("cannot create namespaces ({status}): run as root");
            }
            anyhow::ensure!(
                started.elapsed() < START_TIMEOUT,
                "the first process of a namespace did not start"
            );
            std::thread::sleep(POLL_INTERVAL);
        };
        Ok(Self {
            holder,
            init,
            has_ended: false,
        })
    }

    /// Returns a command that runs in the namespace.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &self.init.to_string()])
            .args(["--net", "--mount", "--pid", "--"])
            .arg(program)
            .stdin(Stdio::null());
        command
    }

    /// Returns the number of the first process.
    pub fn process(&self) -> u32 {
        self.init
    }

    /// Returns whether a server in the namespace accepts connections at an address.
    pub fn accepts(&self, address: &str, port: u16) -> bool {
        let probe = format!("exec 3<>/dev/tcp/{address}/{port}");
        let connected = self.command("bash").args(["-c", &probe]).output();
        connected.is_ok_and(|output| output.status.success())
    }

    /// Runs `ip` in the namespace.
    pub fn ip(&self, arguments: &str) -> anyhow::Result<()> {
        // Outside the process namespace, in which other namespaces have no process ids.
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &self.init.to_string(), "--net", "--", "ip"])
            .args(arguments.split(' '));
        let output = command
            .output()
            .context("cannot run nsenter: install util-linux and iproute2")?;
        anyhow::ensure!(
            output.status.success(),
            "`ip {arguments}` failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(())
    }

    /// Connects another namespace to the bridge `br0` of this one, with an interface `eth0`.
    pub fn connect(&self, host: &Self, number: usize, address: &str) -> anyhow::Result<()> {
        let init = host.init;
        // The kernel removes the interface of an ended namespace later.
        let _ = self.ip(&format!("link del v{number}"));
        self.ip(&format!(
            "link add v{number} type veth peer name eth0 netns {init}"
        ))?;
        self.ip(&format!("link set v{number} master br0 up"))?;
        host.ip(&format!("addr add {address}/24 dev eth0"))?;
        host.ip("link set eth0 up")?;
        host.ip("link set lo up")
    }

    /// Connects or disconnects the interface of a connected namespace.
    pub fn set_link(&self, number: usize, up: bool) -> anyhow::Result<()> {
        let state = if up { "up" } else { "down" };
        self.ip(&format!("link set v{number} {state}"))
    }

    /// Ends all processes of the namespace.
    pub fn end(&mut self) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        // `--kill-child` ends the first process, and the kernel all others of its namespace.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
        let path = format!("/proc/{}", self.init);
        let started = Instant::now();
        while Path::new(&path).exists() && started.elapsed() < START_TIMEOUT {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        self.end();
    }
}

/// Sends a signal to a process of this program. A process that has ended is no error.
pub fn send(process: u32, signal: Signal) -> anyhow::Result<()> {
    let pid = i32::try_from(process).context("the process id is invalid")?;
    // 0 denotes the own group of processes.
    anyhow::ensure!(pid > 0, "it does not run");
    match kill(Pid::from_raw(pid), signal) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot send {signal} to {process}")),
    }
}

/// Returns the first child of a process.
pub fn first_child(process: u32) -> Option<u32> {
    let path = format!("/proc/{process}/task/{process}/children");
    let children = std::fs::read_to_string(path).ok()?;
    children.split_whitespace().next()?.parse().ok()
}
