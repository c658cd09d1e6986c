//! Arguments of `jiffy run`, and hints for options of `docker run`.

use super::sandbox::port;
use super::site::SiteArgs;
use super::{ExecArgs, Forwarding, HostArgs, SizeArgs};
use crate::cli::EngineArgs;
use crate::cli::FeatureSwitch;
use clap::Args;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

/// `jiffy run`.
#[derive(Debug, Args)]
#[command(after_help = "Exit status:
  The exit status of the command; 128+N if signal N killed the command; 127 command not found;
  126 not executable; 124 after --timeout; 125 if Jiffy failed (the reason is on standard error).

If a daemon runs, the sandbox belongs to the daemon and is removed when this command exits.
Otherwise the sandbox is a child process of this command.

Examples:
  jiffy run -- python3 -c 'import platform; print(platform.release())'
  jiffy run --cpus 4 --memory 2GiB --disk 10GiB -- make -j4
  jiffy run -e TOKEN=abc -w /tmp -u root -- env
  yes | jiffy run -i -- head -c 1000000 | wc -c
  jiffy run -v .:/work -w /work -- make       changes are copied back
  jiffy run -p 8080:80 -u root -- python3 -m http.server 80
  jiffy run --timeout 10s --json -- python3 script.py")]
pub struct RunArgs {
    /// Template to start from
    #[arg(long, default_value = "base", value_name = "NAME")]
    pub template: String,
    /// Image of a registry to start from, for example python:3.12. The daemon imports it
    #[arg(long, value_name = "REF", conflicts_with_all = ["template", "no_daemon"])]
    pub image: Option<String>,
    /// Name of the sandbox while the command runs. Needs a daemon
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Isolation engine
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Resources
    #[command(flatten)]
    pub size: SizeArgs,
    /// Copy a directory or file into the sandbox before the command, and copy changes back
    /// afterwards unless `:ro` is given. The directory is not shared while the command runs
    #[arg(short, long = "volume", value_name = "HOST:GUEST[:ro]", value_parser = volume)]
    pub volumes: Vec<Volume>,
    /// Forward a port of this host to the sandbox while the command runs. Binds to loopback unless
    /// an address is given
    #[arg(short, long = "publish", value_name = "[IP:][LOCAL:]REMOTE", value_parser = publication)]
    pub publish: Vec<Publication>,
    /// Network access of the sandbox: the internet, except this host and private
    /// networks
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    pub network: FeatureSwitch,
    /// Certificate authorities and proxy.
    #[command(flatten)]
    pub site: SiteArgs,
    /// Accepted for compatibility: the sandbox is always removed
    #[arg(long)]
    pub rm: bool,
    /// Run the sandbox as a child of this command even if a daemon runs
    #[arg(long)]
    pub no_daemon: bool,
    /// Command and arguments
    #[command(flatten)]
    pub exec: ExecArgs,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// Directory or file of this host that is copied into the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// Path on this host.
    pub host: PathBuf,
    /// Absolute path in the guest.
    pub guest: String,
    /// True if changes are not copied back.
    pub read_only: bool,
}

/// Parses `HOST:GUEST[:ro]`.
fn volume(text: &str) -> Result<Volume, String> {
    const VOLUME_FORM: &str = "use HOST:GUEST or HOST:GUEST:ro, for example ./src:/work";
    // `:rw` is the default, and accepted because Docker has it.
    let (rest, read_only) = match text.strip_suffix(":ro") {
        Some(rest) => (rest, true),
        None => (text.strip_suffix(":rw").unwrap_or(text), false),
    };
    // Split at the last colon: a path of the host may contain colons.
    let (host, guest) = rest.rsplit_once(':').ok_or(VOLUME_FORM)?;
    let guest = guest.trim_end_matches('/');
    // The part before the leading slash is empty.
    let parts = guest.split('/').skip(1);
    // The path must be below `/`, and must not contain an empty, `.` or `..` part.
    let plain = parts.clone().count() > 0
        && parts
            .clone()
            .all(|part| !matches!(part, "" | "." | "..") && !part.contains('\0'));
    if host.is_empty() || !guest.starts_with('/') || !plain {
        return Err(format!(
            "`{text}`: {VOLUME_FORM}; the path in the guest must be absolute and not /"
        ));
    }
    Ok(Volume {
        host: PathBuf::from(host),
        guest: guest.to_owned(),
        read_only,
    })
}

/// Forwarding of a port of this host to a port of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Publication {
    /// Address of this host to bind to.
    pub address: IpAddr,
    /// Ports.
    pub ports: Forwarding,
}

/// Parses `[IP:][LOCAL:]REMOTE`.
fn publication(text: &str) -> Result<Publication, String> {
    let invalid = || {
        format!(
            "`{text}` is not a port to publish: use for example 8080:80, 80, :80 or 192.0.2.1:8080:80"
        )
    };
    // Docker's notation for a protocol is accepted for TCP.
    let ports_of = |text: &str| text.strip_suffix("/tcp").unwrap_or(text).to_owned();
    // The brackets separate the colons of an IPv6 address from the colons of ports.
    let (address, ports) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, ports) = rest.split_once("]:").ok_or_else(invalid)?;
            (Some(address), ports_of(ports))
        }
        None => {
            let ports = ports_of(text);
            match ports.matches(':').count() {
                2 => {
                    let (address, ports) = text.split_once(':').ok_or_else(invalid)?;
                    (Some(address), ports_of(ports))
                }
                _ => (None, ports),
            }
        }
    };
    let address = match address {
        Some(address) => address.parse().map_err(|_| invalid())?,
        None => IpAddr::V4(Ipv4Addr::LOCALHOST),
    };
    let ports = port(&ports).map_err(|_| invalid())?;
    Ok(Publication { address, ports })
}

/// Options of `docker run`, and the equivalents in Jiffy. Options that `jiffy run` accepts, such as
/// `--rm`, are listed for other commands, such as `jiffy exec`.
const FOREIGN_OPTIONS: [(&[&str], &str); 13] = [
    (
        &["--rm"],
        "a sandbox exists until `jiffy rm`; `jiffy run` always removes its sandbox",
    ),
    (
        &["-d", "--detach", "--restart"],
        "`jiffy create` creates a sandbox that continues to run; `jiffy exec` runs commands in it",
    ),
    (
        &["-p", "--publish"],
        "`jiffy port-forward` and `jiffy run -p` forward ports of this host to a sandbox",
    ),
    (
        &["-P", "--publish-all", "--expose"],
        "specify the ports: `jiffy run -p 8080:80`",
    ),
    (
        &["-v", "--volume"],
        "`jiffy cp` copies files to and from a sandbox; `jiffy run -v` copies them before and after its command",
    ),
    (&["--mount"], "use `-v HOST:GUEST` or `-v HOST:GUEST:ro`"),
    (&["--net"], "use `--network on` or `--network off`"),
    (&["-m"], "use `--memory SIZE`"),
    (
        &["-c", "--cpu-shares", "--cpuset-cpus"],
        "use `--cpus N`: the guest has its own virtual CPUs",
    ),
    (
        &["--entrypoint"],
        "write the program and its arguments after `--`",
    ),
    (
        &[
            "--privileged",
            "--cap-add",
            "--security-opt",
            "--device",
            "--init",
        ],
        "omit the option: the guest is a separate machine, in which the command may use `sudo`",
    ),
    (&["--gpus"], "GPUs are not supported in sandboxes"),
    (
        &["--env-file"],
        "use `-e KEY=VALUE` for each variable, or `-e KEY` to pass its current value",
    ),
];

/// Returns the hint for an unknown option that other tools have.
pub fn option_hint(option: &str) -> Option<&'static str> {
    let mut entries = FOREIGN_OPTIONS.iter();
    let entry = entries.find(|(options, _)| options.contains(&option));
    entry.map(|(_, hint)| *hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_has_two_paths_and_may_be_read_only() {
        let of = |host: &str, guest: &str, read_only| {
            let (host, guest) = (PathBuf::from(host), guest.to_owned());
            Ok(Volume {
                host,
                guest,
                read_only,
            })
        };
        assert_eq!(volume("./src:/work"), of("./src", "/work", false));
        assert_eq!(volume("/a:b:/c/d/:ro"), of("/a:b", "/c/d", true));
        assert_eq!(volume("a:/b:rw"), of("a", "/b", false));
        for bad in [
            "",
            "/a",
            ":/b",
            "/a:",
            "/a:b",
            "/a:/",
            "/a:/b/../c",
            "/a:/b//c",
        ] {
            assert!(volume(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_port_is_published_on_loopback_unless_an_address_is_given() {
        let of = |address: &str, local, remote| {
            let address = address.parse().unwrap();
            let ports = Forwarding { local, remote };
            Ok(Publication { address, ports })
        };
        assert_eq!(publication("8080:80"), of("127.0.0.1", 8080, 80));
        assert_eq!(publication("80"), of("127.0.0.1", 80, 80));
        assert_eq!(publication(":80/tcp"), of("127.0.0.1", 0, 80));
        assert_eq!(publication("0.0.0.0:8080:80"), of("0.0.0.0", 8080, 80));
        assert_eq!(publication("[::1]:8080:80"), of("::1", 8080, 80));
        for bad in ["", "x", "80:", "1:2:3", "70000", "[::1]80", "8080:80/udp"] {
            assert!(publication(bad).is_err(), "{bad}");
        }
    }
}
