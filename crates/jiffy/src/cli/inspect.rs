//! Arguments of commands that inspect, wait for, restart or enter sandboxes.

use super::HostArgs;
use crate::units;
use clap::{Args, ValueEnum};
use jiffy_fleet_core::MemberId;
use std::time::Duration;

/// `jiffy inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Sandboxes and snapshots: names, ids, or unique prefixes of ids
    #[arg(required = true)]
    pub ids: Vec<String>,
    /// Print a JSON list
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy stats`.
#[derive(Debug, Args)]
#[command(after_help = "Columns:
  CPU      usage of all processors of the sandbox since the last sample, at most 10 s ago.
           100 %: all processors are busy
  MEMORY   used memory including the page cache, and the size of the memory
  DISK     bytes written since the last snapshot, and the size of the disk
  SENT, RECEIVED  bytes over the network since the start")]
pub struct StatsArgs {
    /// Names, ids, or unique prefixes of ids [default: all running sandboxes]
    pub ids: Vec<String>,
    /// Print once instead of refreshing until Ctrl-C. Default if the output is not a terminal
    #[arg(long)]
    pub no_stream: bool,
    /// Refresh interval of the table
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = units::duration)]
    pub interval: Duration,
    /// Print JSON once
    #[arg(long)]
    pub json: bool,
    /// Only sandboxes of this host of the fleet (for example h2)
    #[arg(long = "host", value_name = "HOST")]
    pub only_host: Option<MemberId>,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy shell`.
#[derive(Debug, Args)]
pub struct ShellArgs {
    /// Sandbox: name, id, or unique prefix of the id
    pub id: String,
    /// Shell [default: bash if it exists, otherwise sh]
    #[arg(long, value_name = "PROGRAM")]
    pub shell: Option<String>,
    /// Environment variable. Without =VALUE, its current value is used
    #[arg(short, long = "env", value_name = "KEY[=VALUE]")]
    pub env: Vec<String>,
    /// Initial directory [default: home directory of the user]
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// User of the shell [default: user of the template]
    #[arg(short, long, value_name = "USER")]
    pub user: Option<String>,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy wait`.
#[derive(Debug, Args)]
#[command(
    after_help = "Prints the state, or the exit reason of a killed sandbox. Exit status: 0 if all sandboxes
reached the state; 1 if a sandbox terminated first; 124 after --timeout."
)]
pub struct WaitArgs {
    /// Names, ids, or unique prefixes of ids
    #[arg(required = true)]
    pub ids: Vec<String>,
    /// State to wait for
    #[arg(long = "for", value_name = "STATE", value_enum, default_value_t)]
    pub state: AwaitedState,
    /// Maximum waiting time
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    pub timeout: Option<Duration>,
    /// Print the final states as JSON
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// States for `jiffy wait --for`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum AwaitedState {
    /// Killed or broken
    #[default]
    Ended,
    /// Running, with a responding agent
    Running,
    /// Paused
    Paused,
}

/// `jiffy restart`.
#[derive(Debug, Args)]
#[command(
    after_help = "Stops all processes and runs the start command of the template, like `docker restart`. Disk, id,
name, network and keys are retained. A paused sandbox is resumed first. Roll back a broken sandbox
with `jiffy rollback` instead."
)]
pub struct RestartArgs {
    /// Names, ids, or unique prefixes of ids
    #[arg(required = true)]
    pub ids: Vec<String>,
    /// Grace period before processes are killed
    #[arg(short = 't', long, value_name = "TIME", default_value = "10s", value_parser = units::duration_or_zero)]
    pub grace: Duration,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy tree`.
#[derive(Debug, Args)]
#[command(
    after_help = "Below a sandbox are its snapshots and rollbacks, below a snapshot the sandboxes that were
created from it. An arrow marks the object in the argument."
)]
pub struct TreeArgs {
    /// Sandbox or snapshot: name, id, or unique prefix of the id
    pub id: String,
    /// Show each snapshot of a series of pauses and forks
    #[arg(long)]
    pub unfold: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy diff`.
#[derive(Debug, Args)]
#[command(
    after_help = "Each line has A (added), C (changed) or D (deleted), and a path. /dev, /proc, /run, /sys, and
files that are written at every start are not listed.

With two arguments, the contents are compared: A means that only the second object has the file,
and D that only the first object has it. Each line ends with the sizes. Both objects must have the
same template."
)]
pub struct DiffArgs {
    /// Sandbox: name, id, or unique prefix of the id. With a second argument also a snapshot
    pub id: String,
    /// Sandbox or snapshot to compare with [default: the template]
    pub other: Option<String>,
    /// Maximum number of files
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub limit: u32,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}
