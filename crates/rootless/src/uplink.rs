//! The program that carries packets between a network namespace of an ordinary user and the host's
//! sockets: pasta, or else slirp4netns.

use crate::ranges;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time that a way out has to come up.
const START_LIMIT: Duration = Duration::from_secs(5);
/// Time between two looks at the routes.
const LOOK: Duration = Duration::from_millis(2);
/// What it needs.
const TUN: &str = "/dev/net/tun";

/// A program that leads out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uplink {
    /// Where it is.
    program: PathBuf,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Pasta,
    Slirp,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Pasta => "pasta",
            Self::Slirp => "slirp4netns",
        }
    }
}

impl Uplink {
    /// The one to use; why there is none.
    pub fn find() -> Result<Self, String> {
        let found = [Kind::Pasta, Kind::Slirp].into_iter().find_map(|kind| {
            let program = ranges::program(kind.name())?;
            Some(Self { program, kind })
        });
        let found = found.ok_or("neither pasta (package `passt`) nor slirp4netns is installed")?;
        for name in ["ip", "nft"] {
            if ranges::program(name).is_none() {
                return Err(format!("`{name}` is not installed"));
            }
        }
        match fs::File::options().read(true).write(true).open(TUN) {
            Ok(_) => Ok(found),
            Err(e) => Err(format!("{TUN} cannot be opened: {e}")),
        }
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.kind.name()
    }

    /// As a holder is told of it.
    pub(crate) fn path(&self) -> &Path {
        &self.program
    }

    /// The one at `path`.
    pub(crate) fn at(path: &Path) -> Self {
        let kind = match path
            .file_name()
            .is_some_and(|name| name == Kind::Slirp.name())
        {
            true => Kind::Slirp,
            false => Kind::Pasta,
        };
        let program = path.to_owned();
        Self { program, kind }
    }

    /// Arguments that lead the network namespace at `namespace` out, and nothing in: neither the
    /// host's loopback nor its ports are to be had, in whichever direction.
    fn arguments(&self, namespace: &Path, ipv4_only: bool) -> Vec<OsString> {
        let words: &[&str] = match self.kind {
            Kind::Pasta => &[
                "--config-net",
                "--foreground",
                "--quiet",
                "--no-map-gw",
                "--no-dhcp",
                "--no-dhcpv6",
                "--no-ra",
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
            Kind::Slirp => &[
                "--configure",
                "--disable-host-loopback",
                "--disable-dns",
                "--mtu=65520",
                "--netns-type=path",
            ],
        };
        let mut arguments: Vec<OsString> = Vec::new();
        if self.kind == Kind::Pasta && ipv4_only {
            arguments.push("--ipv4-only".into());
        }
        arguments.extend(words.iter().map(OsString::from));
        arguments.push(namespace.into());
        if self.kind == Kind::Slirp {
            arguments.push("tap0".into());
        }
        arguments
    }

    /// Starts it on this thread, which is in the network that packets go out to; it ends with the
    /// thread at the latest.
    pub(crate) fn start(&self, namespace: &Path) -> io::Result<Child> {
        // Otherwise it gives the namespace a way that leads nowhere.
        let ipv4_only = !is_default6(&routes("ipv6_route"));
        let mut command = Command::new(&self.program);
        command
            .args(self.arguments(namespace, ipv4_only))
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        // SAFETY: one system call between fork and exec.
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

    /// Waits on a thread in its network namespace until it leads out.
    pub(crate) fn ready(&self, failed: &dyn Fn() -> Option<String>) -> Result<(), String> {
        let limit = Instant::now() + START_LIMIT;
        while !has_default_route() {
            if let Some(why) = failed() {
                return Err(format!("{} failed: {why}", self.name()));
            }
            if Instant::now() > limit {
                return Err(format!(
                    "{} found no way out within {} s: this host may have no default route",
                    self.name(),
                    START_LIMIT.as_secs()
                ));
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}

/// Tells if the network namespace of this thread has a default route.
fn has_default_route() -> bool {
    is_default4(&routes("route")) || is_default6(&routes("ipv6_route"))
}

/// Routes of this thread's network namespace, as the kernel lists them.
fn routes(file: &str) -> String {
    fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap_or_default()
}

fn is_default4(routes: &str) -> bool {
    let mut lines = routes.lines().skip(1);
    lines.any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        matches!(words[..], [_, "00000000", _, flags, .., ] if flags != "0200")
            && words.get(7) == Some(&"00000000")
    })
}

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
    fn a_default_route_is_told_from_others() {
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
    fn nothing_leads_from_a_sandbox_to_the_hosts_loopback_or_back() {
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
