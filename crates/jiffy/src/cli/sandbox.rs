//! Arguments of commands for sandboxes and snapshots.

use super::HostArgs;
use crate::units;
use clap::{Args, ValueEnum};
use jiffy_client::SnapshotAck;
use jiffy_fleet_core::MemberId;
use std::time::Duration;

/// Size of a sandbox.
#[derive(Debug, Args)]
pub struct SizeArgs {
    /// Virtual CPUs, 1 to 8 [default: value of the template, otherwise 2]
    #[arg(long, visible_alias = "cpu", value_name = "N")]
    pub cpus: Option<u8>,
    /// Memory, 128MiB to 64GiB, also as 4Gi or 4g [default: value of the template, otherwise
    /// 512MiB]
    #[arg(long, value_parser = units::memory_mib, value_name = "SIZE")]
    pub memory: Option<u32>,
    /// Writable disk, at least 64MiB [default: value of the template]
    #[arg(long, value_parser = units::mebibytes, value_name = "SIZE")]
    pub disk: Option<u64>,
}

/// Command in a guest.
#[derive(Debug, Args)]
pub struct ExecArgs {
    /// Environment variable. Without =VALUE, its current value is used
    #[arg(short, long = "env", value_name = "KEY[=VALUE]")]
    pub env: Vec<String>,
    /// Working directory of the command [default: home directory of the user]
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// User of the command [default: user of the template]
    #[arg(short, long, value_name = "USER")]
    pub user: Option<String>,
    /// Kill the command after this time and exit with status 124
    #[arg(long, value_parser = units::duration, value_name = "TIME")]
    pub timeout: Option<Duration>,
    /// Attach standard input
    #[arg(short, long)]
    pub interactive: bool,
    /// Allocate a terminal and attach standard input
    #[arg(short, long)]
    pub tty: bool,
    /// Capture the output, and print one JSON object with output, exit code and times
    #[arg(long, conflicts_with = "tty")]
    pub json: bool,
    /// Command and arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<String>,
}

/// `jiffy engines`.
#[derive(Debug, Args)]
pub struct EnginesArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy exec`.
#[derive(Debug, Args)]
pub struct SandboxExecArgs {
    /// Sandbox: name, id, or unique prefix of the id
    pub id: String,
    /// Command and arguments
    #[command(flatten)]
    pub exec: ExecArgs,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy logs`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy logs k3x9 -n 20               last 20 lines of the console
  jiffy logs -f k3x9 | grep error     and new lines, until the sandbox ends
  jiffy logs k3x9 --network           connections")]
pub struct LogsArgs {
    /// Sandbox: name, id, or unique prefix of the id
    pub id: String,
    /// Print new lines of the console as they appear, until interrupted or until the sandbox ends
    #[arg(short, long, conflicts_with = "network")]
    pub follow: bool,
    /// Show connections and DNS queries instead: time, destination, bytes, allowed or denied
    #[arg(long)]
    pub network: bool,
    /// Number of last lines to show, at most 1000
    #[arg(short = 'n', long, default_value_t = 1000, value_name = "N", value_parser = clap::value_parser!(u16).range(..=1000))]
    pub lines: u16,
    /// Print JSON. With --follow, one object per line
    #[arg(long)]
    pub json: bool,
    /// Use only this host of the fleet (for example h2)
    #[arg(long = "host", value_name = "HOST")]
    pub only_host: Option<MemberId>,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy port-forward`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy port-forward k3x9 8080:80       127.0.0.1:8080 to port 80 in the sandbox
  jiffy port-forward k3x9 5432 :6379    5432 to the same port; any free port to 6379

Servers that listen on loopback in the sandbox are reachable as well. Exits on Ctrl-C, or with an
error when the sandbox terminates.")]
pub struct PortForwardArgs {
    /// Sandbox: name, id, or unique prefix of the id
    pub id: String,
    /// Ports: LOCAL:REMOTE, PORT for equal ports, or :REMOTE for any free local port
    #[arg(required = true, value_name = "[LOCAL:]REMOTE", value_parser = port)]
    pub ports: Vec<Forwarding>,
    /// Local address to bind to. An address other than loopback exposes the sandbox to the network
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    pub address: std::net::IpAddr,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// Forwarding of a port of this host to a port of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forwarding {
    /// Port of this host. 0: any free port.
    pub local: u16,
    /// Port in the sandbox.
    pub remote: u16,
}

/// Parses `LOCAL:REMOTE`, `PORT` or `:REMOTE`.
pub(super) fn port(text: &str) -> Result<Forwarding, String> {
    let (local, remote) = text.split_once(':').unwrap_or((text, text));
    let number = |text: &str| text.parse().ok().filter(|&port: &u16| port != 0);
    let local = match local {
        "" => Some(0),
        local => number(local),
    };
    match (local, number(remote)) {
        (Some(local), Some(remote)) => Ok(Forwarding { local, remote }),
        _ => Err(format!(
            "`{text}` is not a pair of ports: use for example 8080:80, 8080 or :80"
        )),
    }
}

/// `jiffy cp`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy cp data.csv k3x9:/tmp/data.csv
  jiffy cp k3x9:result.txt .
  jiffy cp -r project k3x9:            into the home directory, as `project`
  jiffy cp -r k3x9:/var/log/. logs     contents of /var/log
  tar c . | jiffy cp -r - k3x9:/srv    unpacked; without -r, a file
  jiffy cp -r k3x9:/srv - | tar t

With -r, as in `docker cp`: if the destination directory exists, the tree is placed in it;
otherwise the tree gets the name of the destination. Files from a sandbox are never written through
symbolic links, contain no devices and no setuid bits, and belong to the caller.")]
pub struct CpArgs {
    /// Copy directories recursively. `-` is a tar archive in this mode
    #[arg(short, long)]
    pub recursive: bool,
    /// Source: local PATH, `-` for standard input, or SANDBOX:PATH
    pub from: String,
    /// Destination: local PATH, `-` for standard output, or SANDBOX:PATH
    pub to: String,
    /// User who owns created files. Paths without a leading / are relative to the home directory of
    /// this user [default: user of the template]
    #[arg(short, long, value_name = "USER")]
    pub user: Option<String>,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy snapshot`.
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// Sandbox: name, id, or unique prefix of the id
    pub id: String,
    /// Name of the snapshot
    #[arg(long)]
    pub name: Option<String>,
    /// Return after the snapshot is stored in the shared store. Needs a daemon with --store
    #[arg(long)]
    durable: bool,
    /// Return after the memory is captured but not yet written (captured), or after the files are
    /// complete on this host (stored) [default: value of the key, otherwise of the daemon]
    #[arg(long, value_name = "WHEN", conflicts_with = "durable")]
    ack: Option<AckMode>,
    /// Store the disk without the memory: sandboxes boot from the snapshot
    #[arg(long)]
    pub disk_only: bool,
    /// Print the snapshot as JSON instead of its id
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// Time at which a request for a snapshot is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AckMode {
    Captured,
    Stored,
}

impl From<AckMode> for jiffy_api_types::SnapshotAck {
    fn from(mode: AckMode) -> Self {
        match mode {
            AckMode::Captured => Self::Captured,
            AckMode::Stored => Self::Stored,
        }
    }
}

impl SnapshotArgs {
    pub fn ack(&self) -> SnapshotAck {
        match self.ack {
            _ if self.durable => SnapshotAck::Durable,
            Some(AckMode::Captured) => SnapshotAck::Captured,
            Some(AckMode::Stored) => SnapshotAck::Stored,
            None => SnapshotAck::Default,
        }
    }
}

/// `jiffy snapshots`.
#[derive(Debug, Args)]
pub struct SnapshotsArgs {
    /// Only snapshots of this sandbox and its ancestors
    pub id: Option<String>,
    /// Verify the checksums of this snapshot and its ancestors, and repair damaged data from the
    /// store. Exit status 0: intact
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "id")]
    pub verify: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy fork`.
#[derive(Debug, Args)]
pub struct ForkArgs {
    /// Sandbox: name, id, or unique prefix of the id
    pub id: String,
    /// Number of children
    #[arg(short = 'n', long = "count", default_value_t = 1, value_name = "N")]
    pub count: usize,
    /// Print the result as JSON instead of the ids
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy rollback`.
#[derive(Debug, Args)]
pub struct RollbackArgs {
    /// Sandbox: name, id, or unique prefix of the id
    pub id: String,
    /// Snapshot: id, unique prefix of the id, or name
    pub snapshot: String,
    /// Print the sandbox as JSON instead of its id
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy rename`.
#[derive(Debug, Args)]
pub struct RenameArgs {
    /// Sandbox: name, id, or unique prefix of the id
    pub id: String,
    /// New name. An empty value removes the name
    pub name: String,
    /// Print the sandbox as JSON instead of its id
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy timeout`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy timeout web 2h                     killed or paused in two hours
  jiffy timeout web none                   no timeout
  jiffy timeout web --idle 10m             paused after 10 minutes without use
  jiffy timeout web 12h --idle 0           no idle timeout")]
pub struct TimeoutArgs {
    /// Sandbox: name, id, or unique prefix of the id
    pub id: String,
    /// Timeout from now: 90s, 30m, 12h, 2d, or `none`
    #[arg(value_name = "TIME", value_parser = units::timeout, required_unless_present = "idle")]
    pub time: Option<units::Timeout>,
    /// Pause the sandbox after this time without use, counted from now: 90s, 30m, 12h. A request
    /// resumes it. 0 means never
    #[arg(long, value_name = "TIME", value_parser = units::idle_timeout)]
    pub idle: Option<u64>,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// Arguments of commands for one sandbox.
#[derive(Debug, Args)]
pub struct SandboxIdArgs {
    /// Sandbox: name, id, or unique prefix of the id
    pub id: String,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy pause`.
#[derive(Debug, Args)]
pub struct PauseArgs {
    /// Sandboxes
    #[command(flatten)]
    pub many: SandboxIdsArgs,
    /// Return after the memory is stored in the shared store. Needs a daemon with --store
    #[arg(long)]
    pub durable: bool,
    /// Discard the memory: the sandbox boots from its disk at the next resume and runs the start
    /// command of its template
    #[arg(long)]
    pub disk_only: bool,
}

/// `jiffy resume`.
#[derive(Debug, Args)]
pub struct ResumeArgs {
    /// Sandboxes
    #[command(flatten)]
    pub many: SandboxIdsArgs,
    /// State to use if the host of a sandbox was lost: `stored` uses the newest state in the store,
    /// which may be older than the state on that host
    #[arg(long, value_name = "STATE")]
    pub from: Option<ResumeState>,
    /// Discard the memory of the pause: boot from the disk and run the start command of the
    /// template
    #[arg(long)]
    pub reboot: bool,
}

/// State from which a sandbox is resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ResumeState {
    /// Newest state in the store
    Stored,
}

/// Arguments of commands for several sandboxes.
#[derive(Debug, Args)]
pub struct SandboxIdsArgs {
    /// Names, ids, or unique prefixes of ids
    #[arg(required = true)]
    pub ids: Vec<String>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}
