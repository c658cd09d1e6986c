//! Commands about sandboxes and snapshots.

use super::HostArgs;
use crate::units;
use clap::{Args, ValueEnum};
use jiffy_client::SnapshotAck;
use std::time::Duration;

/// Size of a sandbox.
#[derive(Debug, Args)]
pub struct SizeArgs {
    /// Virtual CPUs, 1 to 8 (default: the template's, else 2)
    #[arg(long, visible_alias = "cpu", value_name = "N")]
    pub cpus: Option<u8>,
    /// Memory, 128MiB to 64GiB, also as 4Gi or 4g (default: the template's, else 512MiB)
    #[arg(long, value_parser = units::memory_mib, value_name = "SIZE")]
    pub memory: Option<u32>,
    /// Writable disk, 64MiB or more (default: the template's)
    #[arg(long, value_parser = units::mebibytes, value_name = "SIZE")]
    pub disk: Option<u64>,
}

/// A command in a guest.
#[derive(Debug, Args)]
pub struct ExecArgs {
    /// Set an environment variable; without =VALUE, take it from here
    #[arg(short, long = "env", value_name = "KEY[=VALUE]")]
    pub env: Vec<String>,
    /// Working directory of the command (default: the user's home)
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// User to run as (default: the template's)
    #[arg(short, long, value_name = "USER")]
    pub user: Option<String>,
    /// Kill the command after this long and exit with 124
    #[arg(long, value_parser = units::duration, value_name = "TIME")]
    pub timeout: Option<Duration>,
    /// Give the command our standard input
    #[arg(short, long)]
    pub interactive: bool,
    /// Give the command a terminal (and our standard input)
    #[arg(short, long)]
    pub tty: bool,
    /// Capture the output and print one JSON object with it, the exit code and all times
    #[arg(long, conflicts_with = "tty")]
    pub json: bool,
    /// Command and arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub command: Vec<String>,
}

/// `jiffy engines`.
#[derive(Debug, Args)]
pub struct EnginesArgs {
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy exec`.
#[derive(Debug, Args)]
pub struct SandboxExecArgs {
    /// Sandbox: its name, its id or the beginning of that
    pub id: String,
    /// Command and arguments
    #[command(flatten)]
    pub exec: ExecArgs,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Sandbox: its name, its id or the beginning of that
    pub id: String,
    /// Its connections and questions about names instead: when, where to, how much, allowed or
    /// refused
    #[arg(long)]
    pub network: bool,
    /// Lines to print, at most 1000
    #[arg(short = 'n', long, default_value_t = 1000, value_name = "N", value_parser = clap::value_parser!(u16).range(..=1000))]
    pub lines: u16,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy port-forward`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy port-forward k3x9 8080:80       127.0.0.1:8080 leads to port 80 in the sandbox
  jiffy port-forward k3x9 5432 :6379    5432 to the same port; any free port to 6379

Also servers that listen on the sandbox's loopback only are reached. Ends with Ctrl-C, or with an error
when the sandbox has ended.")]
pub struct PortForwardArgs {
    /// Sandbox: its name, its id or the beginning of that
    pub id: String,
    /// Port of this host and port of the sandbox: LOCAL:REMOTE, PORT for the same, :REMOTE for any
    /// that is free
    #[arg(required = true, value_name = "[LOCAL:]REMOTE", value_parser = port)]
    pub ports: Vec<Forwarding>,
    /// Address of this host to listen at; others than loopback open the sandbox to the network
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    pub address: std::net::IpAddr,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// A port of this host that leads to one of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forwarding {
    /// 0: any that is free.
    pub local: u16,
    /// In the sandbox.
    pub remote: u16,
}

/// Reads `LOCAL:REMOTE`, `PORT` or `:REMOTE`.
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
            "`{text}` is no pair of ports, as in 8080:80, 8080 or :80"
        )),
    }
}

/// `jiffy cp`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy cp data.csv k3x9:/tmp/data.csv
  jiffy cp k3x9:result.txt .
  jiffy cp -r project k3x9:            into the home directory, as `project`
  jiffy cp -r k3x9:/var/log/. logs     what is in /var/log
  tar c . | jiffy cp -r - k3x9:/srv    unpacked; without -r, a file
  jiffy cp -r k3x9:/srv - | tar t

With -r, as `docker cp` does it: a directory that is there gets the tree under its own name, one that is not
becomes the tree. What comes out of a sandbox is never put through symbolic links, and has no devices and no
setuid; it belongs to you.")]
pub struct CpArgs {
    /// Directories, with all in them; `-` is a tar archive then
    #[arg(short, long)]
    pub recursive: bool,
    /// PATH here, `-` for standard input, or SANDBOX:PATH
    pub from: String,
    /// PATH here, `-` for standard output, or SANDBOX:PATH
    pub to: String,
    /// User whose home relative paths begin in, and who owns what is made (default: the template's)
    #[arg(short, long, value_name = "USER")]
    pub user: Option<String>,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy snapshot`.
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// Sandbox: its name, its id or the beginning of that
    pub id: String,
    /// Name for it
    #[arg(long)]
    pub name: Option<String>,
    /// Return when the store that hosts share has it (a daemon with --store)
    #[arg(long)]
    durable: bool,
    /// Return when it is captured, its memory frozen and its files yet to be written, or when it
    /// is stored on the host's disk
    #[arg(
        long,
        value_name = "WHEN",
        default_value = "stored",
        conflicts_with = "durable"
    )]
    ack: AckMode,
    /// Print the snapshot as JSON instead of its id
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// When `jiffy snapshot` returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum AckMode {
    Captured,
    Stored,
}

impl SnapshotArgs {
    pub fn ack(&self) -> SnapshotAck {
        match self.ack {
            _ if self.durable => SnapshotAck::Durable,
            AckMode::Captured => SnapshotAck::Captured,
            AckMode::Stored => SnapshotAck::Stored,
        }
    }
}

/// `jiffy snapshots`.
#[derive(Debug, Args)]
pub struct SnapshotsArgs {
    /// Only those of this sandbox and its ancestors
    pub id: Option<String>,
    /// Compare this snapshot, and all it needs, with the checksums it was sealed with, and fetch
    /// what is damaged anew if a store has it; success means that it is sound
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "id")]
    pub verify: Option<String>,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy fork`.
#[derive(Debug, Args)]
pub struct ForkArgs {
    /// Sandbox: its name, its id or the beginning of that
    pub id: String,
    /// Number of children
    #[arg(short = 'n', long = "count", default_value_t = 1, value_name = "N")]
    pub count: usize,
    /// Print the outcome as JSON instead of the ids
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy rollback`.
#[derive(Debug, Args)]
pub struct RollbackArgs {
    /// Sandbox: its name, its id or the beginning of that
    pub id: String,
    /// Snapshot: id, the beginning of it, or name
    pub snapshot: String,
    /// Print the sandbox as JSON instead of its id
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy rename`.
#[derive(Debug, Args)]
pub struct RenameArgs {
    /// Sandbox: its name, its id or the beginning of that
    pub id: String,
    /// Its new name; empty for none
    pub name: String,
    /// Print the sandbox as JSON instead of its id
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// A command on one sandbox.
#[derive(Debug, Args)]
pub struct OneArgs {
    /// Sandbox: its name, its id or the beginning of that
    pub id: String,
    /// Print the outcome as JSON
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy pause`.
#[derive(Debug, Args)]
pub struct PauseArgs {
    /// Sandboxes
    #[command(flatten)]
    pub many: ManyArgs,
    /// Return when the store that hosts share has what they sleep in (a daemon with --store)
    #[arg(long)]
    pub durable: bool,
}

/// A command on several.
#[derive(Debug, Args)]
pub struct ManyArgs {
    /// Names, ids, or the beginnings of ids
    #[arg(required = true)]
    pub ids: Vec<String>,
    /// Print the outcome as JSON
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}
