//! Commands that look at sandboxes, wait for them, or are in them.

use super::HostArgs;
use crate::units;
use clap::{Args, ValueEnum};
use std::time::Duration;

/// `jiffy inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Names, ids or the beginnings of ids of sandboxes and snapshots
    #[arg(required = true)]
    pub ids: Vec<String>,
    /// As JSON: a list of all that is known
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy stats`.
#[derive(Debug, Args)]
#[command(after_help = "Columns:
  CPU      of all its processors together since the last sample, at most 10 s ago; 100 % is all of them
  MEMORY   what it touched and did not give back, page cache and all, of what it has
  DISK     written since its last snapshot, of what it has
  SENT, RECEIVED  over its network since it came up")]
pub struct StatsArgs {
    /// Names, ids or the beginnings of ids (default: all that run)
    pub ids: Vec<String>,
    /// Once, rather than until Ctrl-C; always so where the output is no terminal
    #[arg(long)]
    pub no_stream: bool,
    /// Time between two looks
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = units::duration)]
    pub interval: Duration,
    /// As JSON, once
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy shell`.
#[derive(Debug, Args)]
pub struct ShellArgs {
    /// Sandbox: its name, its id or the beginning of that
    pub id: String,
    /// Shell to run (default: bash where there is one, else sh)
    #[arg(long, value_name = "PROGRAM")]
    pub shell: Option<String>,
    /// Set an environment variable; without =VALUE, take it from here
    #[arg(short, long = "env", value_name = "KEY[=VALUE]")]
    pub env: Vec<String>,
    /// Directory to begin in (default: the user's home)
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// User to be (default: the template's)
    #[arg(short, long, value_name = "USER")]
    pub user: Option<String>,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy wait`.
#[derive(Debug, Args)]
#[command(
    after_help = "Prints why each ended, or the state that was waited for. Exits with 0, with 1 if a sandbox ended or broke
first, with 124 when --timeout is over."
)]
pub struct WaitArgs {
    /// Names, ids or the beginnings of ids
    #[arg(required = true)]
    pub ids: Vec<String>,
    /// State to wait for
    #[arg(long = "for", value_name = "STATE", value_enum, default_value_t)]
    pub state: AwaitedState,
    /// Longest time to wait
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    pub timeout: Option<Duration>,
    /// Print what became of each as JSON
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// States that can be waited for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum AwaitedState {
    /// It was killed, or lost its guest
    #[default]
    Ended,
    /// It runs, and its agent answers
    Running,
    /// It sleeps
    Paused,
}

/// `jiffy restart`.
#[derive(Debug, Args)]
#[command(
    after_help = "All processes end, and what the template starts is started again. Disk, id, name, network and kernel
stay: it is what `docker restart` does, and no reboot of the machine, whose disk does not outlive its memory. A
sandbox that sleeps is woken first; of one that is broken `jiffy rollback` brings back a snapshot."
)]
pub struct RestartArgs {
    /// Names, ids or the beginnings of ids
    #[arg(required = true)]
    pub ids: Vec<String>,
    /// Time that processes have to end by themselves
    #[arg(short = 't', long, value_name = "TIME", default_value = "10s", value_parser = units::duration_or_zero)]
    pub grace: Duration,
    /// Print the outcome as JSON
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy diff`.
#[derive(Debug, Args)]
#[command(
    after_help = "Each line is A (it is new), C (it is another) or D (it is gone), and a path. Left out is what belongs to a
boot: /dev, /proc, /run, /sys, and files that the sandbox is given when it comes up."
)]
pub struct DiffArgs {
    /// Sandbox: its name, its id or the beginning of that
    pub id: String,
    /// Most files to show
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub limit: u32,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}
