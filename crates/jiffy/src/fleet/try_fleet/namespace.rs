//! Network and process namespaces of the hosts of `jiffy fleet try`.
//!
//! The namespaces have no names below `/run/netns`: processes hold them, and they end with those
//! processes. The host's own network is not changed.

use anyhow::Context;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Maximum time until the first process of a namespace runs.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Network, mount and process namespace. All of its processes end when the value is dropped.
pub struct Namespace {
    holder: Child,
    /// First process.
    init: u32,
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
            std::thread::sleep(Duration::from_millis(5));
        };
        Ok(Self { holder, init })
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
        self.ip(&format!(
            "link add v{number} type veth peer name eth0 netns {init}"
        ))?;
        self.ip(&format!("link set v{number} master br0 up"))?;
        host.ip(&format!("addr add {address}/24 dev eth0"))?;
        host.ip("link set eth0 up")?;
        host.ip("link set lo up")
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // `--kill-child` ends the first process, and the kernel all others of its namespace.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
        let path = format!("/proc/{}", self.init);
        let started = Instant::now();
        while Path::new(&path).exists() && started.elapsed() < START_TIMEOUT {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Returns the first child of a process.
fn first_child(process: u32) -> Option<u32> {
    let path = format!("/proc/{process}/task/{process}/children");
    let children = std::fs::read_to_string(path).ok()?;
    children.split_whitespace().next()?.parse().ok()
}
