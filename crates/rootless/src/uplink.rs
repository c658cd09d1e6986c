//! [`Uplink`]: the program that transfers packets between a network namespace of an unprivileged
//! user and the host's sockets. It is pasta or slirp4netns.
//!
//! A *holder* is the process that keeps the namespaces and the uplink open.

use crate::subordinate_ids;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Timeout for the start of an uplink.
const UPLINK_START_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between two checks of the routes.
const ROUTE_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Device that an uplink needs.
const TUN_DEVICE: &str = "/dev/net/tun";

/// Uplink program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uplink {
    /// Path of the program.
    program: PathBuf,
    kind: UplinkKind,
}

/// Program that connects the namespace to the host's network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UplinkKind {
    Pasta,
    Slirp,
}

impl UplinkKind {
    fn name(self) -> &'static str {
        match self {
            Self::Pasta => "pasta",
            Self::Slirp => "slirp4netns",
        }
    }
}

impl Uplink {
    /// Returns the uplink program, or the reason for its absence.
    pub fn find() -> Result<Self, String> {
        // The programs are tried in the order of preference.
        let uplink = [UplinkKind::Pasta, UplinkKind::Slirp]
            .into_iter()
            .find_map(|kind| {
                let program = subordinate_ids::find_program(kind.name())?;
                Some(Self { program, kind })
            });
        let uplink =
            uplink.ok_or("neither pasta (package `passt`) nor slirp4netns is installed")?;
        for name in ["ip", "nft"] {
            if subordinate_ids::find_program(name).is_none() {
                return Err(format!("`{name}` is not installed"));
            }
        }
        match fs::File::options().read(true).write(true).open(TUN_DEVICE) {
            Ok(_) => Ok(uplink),
            Err(e) => Err(format!("{TUN_DEVICE}: cannot open the device: {e}")),
        }
    }

    /// Returns the name of the program.
    pub fn name(&self) -> &'static str {
        self.kind.name()
    }

    /// Returns the path of the program. It is an argument of the holder, which recreates the uplink
    /// with [`Self::at`].
    pub(crate) fn path(&self) -> &Path {
        &self.program
    }

    /// Returns the uplink with the program at `path`.
    pub(crate) fn at(path: &Path) -> Self {
        let is_slirp = path
            .file_name()
            .is_some_and(|name| name == UplinkKind::Slirp.name());
        let kind = if is_slirp {
            UplinkKind::Slirp
        } else {
            UplinkKind::Pasta
        };
        let program = path.to_owned();
        Self { program, kind }
    }

    /// Returns the arguments that connect the network namespace at `namespace` for outgoing
    /// connections only. The namespace cannot reach the loopback network of the host, and no port
    /// is forwarded between host and namespace. With `ipv4_only`, IPv6 is disabled.
    fn arguments(&self, namespace: &Path, ipv4_only: bool) -> Vec<OsString> {
        let words: &[&str] = match self.kind {
            UplinkKind::Pasta => &[
                "--config-net",
                "--foreground",
                "--quiet",
                // Without this, connections to the gateway's address would reach the host.
                "--no-map-gw",
                "--no-dhcp",
                "--no-dhcpv6",
                "--no-ra",
                // No TCP or UDP port is forwarded, in either direction.
                "-t",
                "none",
                "-u",
                "none",
                "-T",
                "none",
                "-U",
                "none",
                "--netns",
            ],
            UplinkKind::Slirp => &[
                "--configure",
                "--disable-host-loopback",
                "--disable-dns",
                "--mtu=65520",
                "--netns-type=path",
            ],
        };
        let mut arguments: Vec<OsString> = Vec::new();
        if self.kind == UplinkKind::Pasta && ipv4_only {
            arguments.push("--ipv4-only".into());
        }
        arguments.extend(words.iter().map(OsString::from));
        arguments.push(namespace.into());
        if self.kind == UplinkKind::Slirp {
            // The name of the device that slirp4netns creates in the namespace.
            arguments.push("tap0".into());
        }
        arguments
    }

    /// Starts the program on this thread, which must be in the network namespace of the host. The
    /// kernel kills the program when the thread exits.
    pub(crate) fn start(&self, namespace: &Path) -> io::Result<Child> {
        // If the host has no IPv6 default route, pasta would add an IPv6 route that leads nowhere.
        let ipv4_only = !is_default6(&routes("ipv6_route"));
        let mut command = Command::new(&self.program);
        command
            .args(self.arguments(namespace, ipv4_only))
            // The program receives no secrets from the environment of the daemon.
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        // SAFETY: the closure makes one system call between fork and exec.
        unsafe {
            command.pre_exec(|| {
                match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) {
                    0 => Ok(()),
                    _ => Err(io::Error::last_os_error()),
                }
            });
        }
        command.spawn()
    }

    /// Waits until the network namespace of this thread has a default route. `error` returns the
    /// error of the program if it has exited.
    pub(crate) fn ready(&self, error: &dyn Fn() -> Option<String>) -> Result<(), String> {
        let deadline = Instant::now() + UPLINK_START_TIMEOUT;
        while !has_default_route() {
            if let Some(reason) = error() {
                return Err(format!("{} failed: {reason}", self.name()));
            }
            if Instant::now() > deadline {
                return Err(format!(
                    "{} did not create a default route within {} s: check that this host has a default route",
                    self.name(),
                    UPLINK_START_TIMEOUT.as_secs()
                ));
            }
            std::thread::sleep(ROUTE_POLL_INTERVAL);
        }
        Ok(())
    }
}

/// Returns whether the network namespace of this thread has a default route.
fn has_default_route() -> bool {
    is_default4(&routes("route")) || is_default6(&routes("ipv6_route"))
}

/// Reads a routing table of the network namespace of this thread.
fn routes(file: &str) -> String {
    fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap_or_default()
}

/// Returns whether a table in the format of `/proc/net/route` has a default route. A reject route
/// (flags 0200) does not count.
fn is_default4(routes: &str) -> bool {
    // The first line has the names of the columns.
    let mut lines = routes.lines().skip(1);
    lines.any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        matches!(words[..], [_, "00000000", _, flags, .., ] if flags != "0200")
            // The mask: a default route covers all addresses.
            && words.get(7) == Some(&"00000000")
    })
}

/// Returns whether a table in the format of `/proc/net/ipv6_route` has a default route. The fields
/// of a line start with the destination and its prefix length, and end with the device. A default
/// route on `lo` is the kernel's reject route and does not count.
fn is_default6(routes: &str) -> bool {
    routes.lines().any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.get(1) == Some(&"00")
            && words
                .first()
                .is_some_and(|to| to.bytes().all(|b| b == b'0'))
            && words.last() != Some(&"lo")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_default_route_is_distinguished_from_others() {
        let head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\n";
        let default = "eth0\t00000000\t010011AC\t0003\t0\t0\t0\t00000000\t0\t0\t0\n";
        let local = "eth0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n";
        assert!(is_default4(&format!("{head}{local}{default}")));
        assert!(!is_default4(&format!("{head}{local}")));
        assert!(!is_default4(""));
        let zero = "0".repeat(32);
        let six = |device: &str, length: &str| {
            format!("{zero} {length} {zero} 00 fe80 00000400 1 0 00000001 {device}\n")
        };
        assert!(is_default6(&six("eth0", "00")));
        assert!(!is_default6(&six("lo", "00")) && !is_default6(&six("eth0", "40")));
    }

    #[test]
    fn an_uplink_does_not_expose_the_loopback_network_of_the_host() {
        let words = |uplink: Uplink| {
            let words = uplink.arguments(Path::new("/proc/1/ns/net"), true);
            let words: Vec<String> = words.iter().map(|w| w.to_string_lossy().into()).collect();
            words.join(" ")
        };
        let pasta = words(Uplink::at(Path::new("/usr/bin/pasta")));
        assert!(pasta.contains("--ipv4-only --config-net"), "{pasta}");
        assert!(pasta.contains("--no-map-gw") && pasta.contains("-t none -u none -T none -U none"));
        let slirp = words(Uplink::at(Path::new("/usr/bin/slirp4netns")));
        assert!(slirp.contains("--disable-host-loopback"), "{slirp}");
    }
}
