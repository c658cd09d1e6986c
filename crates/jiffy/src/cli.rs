//! What can be typed.

use crate::units;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// Sandboxes for AI agents: a command in its own microVM, with its own kernel, gone when it ends.
#[derive(Debug, Parser)]
#[command(
    name = "jiffy",
    version,
    about,
    propagate_version = true,
    max_term_width = 110
)]
#[command(after_help = "Examples:
  jiffy run -- python3 -c 'print(6 * 7)'      run a command in a fresh guest
  echo hello | jiffy run -i -- tr a-z A-Z     with standard input
  jiffy run -t -- bash                        with a terminal
  jiffy doctor                                check this host")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a command in a fresh guest, stream its output, exit as it did, and destroy the guest
    Run(RunArgs),
    /// Check whether this host can run sandboxes, and say how to mend what is missing
    Doctor(DoctorArgs),
    /// List, build and remove templates
    #[command(subcommand)]
    Template(TemplateCommand),
    /// Measure this host
    Bench(BenchArgs),
    /// Make a sandbox that stays until it is killed
    Create(CreateArgs),
    /// List the sandboxes
    Ls(LsArgs),
    /// Run a command in a sandbox
    Exec(SandboxExecArgs),
    /// Copy a file into a sandbox or out of it
    Cp(CpArgs),
    /// Take a snapshot of a sandbox, which runs on
    Snapshot(SnapshotArgs),
    /// List the snapshots
    Snapshots(SnapshotsArgs),
    /// Make sandboxes that begin as this one is now
    Fork(ForkArgs),
    /// Put a sandbox back to a snapshot; it keeps its id
    Rollback(RollbackArgs),
    /// Put a sandbox to sleep; it holds no memory then
    Pause(OneArgs),
    /// Wake a sandbox
    Resume(OneArgs),
    /// End sandboxes
    Kill(ManyArgs),
    /// Remove sandboxes (running ones are killed) or snapshots
    Rm(ManyArgs),
    /// Keep one child of a fork and remove its siblings
    Promote(OneArgs),
    /// Own the sandboxes of this host; the commands above start it in the background if it does not run
    Serve(ServeArgs),
}

/// `jiffy run`.
#[derive(Debug, Args)]
#[command(after_help = "Exit code:
  that of the command; 128+N when signal N ended it; 127 command not found; 126 not executable;
  124 at --timeout; 125 when Jiffy itself failed (the reason is on standard error).

Examples:
  jiffy run -- python3 -c 'import platform; print(platform.release())'
  jiffy run --cpus 4 --memory 2GiB --disk 10GiB -- make -j4
  jiffy run -e TOKEN=abc -w /tmp -u root -- env
  yes | jiffy run -i -- head -c 1000000 | wc -c
  jiffy run --timeout 10s --json -- python3 script.py")]
pub struct RunArgs {
    /// Template to start from
    #[arg(long, default_value = "base", value_name = "NAME")]
    pub template: String,
    /// Virtual CPUs, 1 to 8
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub cpus: u8,
    /// Memory, 128MiB to 64GiB
    #[arg(long, default_value = "512MiB", value_parser = units::memory_mib, value_name = "SIZE")]
    pub memory: u32,
    /// Writable disk, 64MiB or more
    #[arg(long, default_value = "1GiB", value_parser = units::mebibytes, value_name = "SIZE")]
    pub disk: u64,
    /// What to run in it
    #[command(flatten)]
    pub exec: ExecArgs,
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
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD"
    )]
    pub command: Vec<String>,
}

/// `jiffy create`.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Template to start from
    #[arg(long, default_value = "base", value_name = "NAME")]
    pub template: String,
    /// Start from this snapshot (id, the beginning of it, or name) instead
    #[arg(long, value_name = "SNAPSHOT", conflicts_with_all = ["template", "cpus", "memory", "disk"])]
    pub from: Option<String>,
    /// Virtual CPUs, 1 to 8
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub cpus: u8,
    /// Memory, 128MiB to 64GiB
    #[arg(long, default_value = "512MiB", value_parser = units::memory_mib, value_name = "SIZE")]
    pub memory: u32,
    /// Writable disk, 64MiB or more
    #[arg(long, default_value = "1GiB", value_parser = units::mebibytes, value_name = "SIZE")]
    pub disk: u64,
    /// Set an environment variable for all its commands; without =VALUE, take it from here
    #[arg(short, long = "env", value_name = "KEY[=VALUE]")]
    pub env: Vec<String>,
    /// Print the sandbox as JSON instead of its id
    #[arg(long)]
    pub json: bool,
}

/// `jiffy ls`.
#[derive(Debug, Args)]
pub struct LsArgs {
    /// Also those that were killed
    #[arg(short, long)]
    pub all: bool,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// `jiffy exec`.
#[derive(Debug, Args)]
pub struct SandboxExecArgs {
    /// Sandbox, or the beginning of its id
    pub id: String,
    /// What to run
    #[command(flatten)]
    pub exec: ExecArgs,
}

/// `jiffy cp`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy cp data.csv k3x9:/tmp/data.csv
  jiffy cp k3x9:result.txt .
  tar c . | jiffy cp - k3x9:/tmp/all.tar")]
pub struct CpArgs {
    /// PATH here, `-` for standard input, or SANDBOX:PATH
    pub from: String,
    /// PATH here, `-` for standard output, or SANDBOX:PATH
    pub to: String,
    /// User whose home relative paths begin in, and who owns what is made (default: the template's)
    #[arg(short, long, value_name = "USER")]
    pub user: Option<String>,
}

/// `jiffy snapshot`.
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// Sandbox, or the beginning of its id
    pub id: String,
    /// Name for it
    #[arg(long)]
    pub name: Option<String>,
    /// Print the snapshot as JSON instead of its id
    #[arg(long)]
    pub json: bool,
}

/// `jiffy snapshots`.
#[derive(Debug, Args)]
pub struct SnapshotsArgs {
    /// Only those of this sandbox and its ancestors
    pub id: Option<String>,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// `jiffy fork`.
#[derive(Debug, Args)]
pub struct ForkArgs {
    /// Sandbox, or the beginning of its id
    pub id: String,
    /// How many
    #[arg(short = 'n', long = "count", default_value_t = 1, value_name = "N")]
    pub count: usize,
    /// Print the outcome as JSON instead of the ids
    #[arg(long)]
    pub json: bool,
}

/// `jiffy rollback`.
#[derive(Debug, Args)]
pub struct RollbackArgs {
    /// Sandbox, or the beginning of its id
    pub id: String,
    /// Snapshot: id, the beginning of it, or name
    pub snapshot: String,
    /// Print the sandbox as JSON instead of its id
    #[arg(long)]
    pub json: bool,
}

/// A command on one sandbox.
#[derive(Debug, Args)]
pub struct OneArgs {
    /// Sandbox, or the beginning of its id
    pub id: String,
    /// Print the outcome as JSON
    #[arg(long)]
    pub json: bool,
}

/// A command on several.
#[derive(Debug, Args)]
pub struct ManyArgs {
    /// Ids, or the beginnings of them
    #[arg(required = true)]
    pub ids: Vec<String>,
    /// Print the outcome as JSON
    #[arg(long)]
    pub json: bool,
}

/// `jiffy serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Restored sandboxes kept ready for the next create, per template and size in use
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub warm_pool: usize,
    /// Stop the one that runs; its running sandboxes are lost, paused ones stay
    #[arg(long)]
    pub stop: bool,
}

/// `jiffy bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// What to measure
    #[arg(value_enum)]
    pub task: BenchTask,
    /// Samples
    #[arg(short, default_value_t = 20, value_name = "N")]
    pub number: usize,
    /// How many at a time
    #[arg(short, default_value_t = 1, value_name = "N")]
    pub concurrency: usize,
    /// Rounds to run first and throw away
    #[arg(short, default_value_t = 2, value_name = "N")]
    pub warm_up: usize,
    /// Print JSON with every sample instead of a table
    #[arg(long)]
    pub json: bool,
    /// Also write the JSON to a file
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// What `jiffy bench` can measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchTask {
    /// Cold boot to the agent's answer, split by phase
    Boot,
    /// `true` in a running guest
    Exec,
    /// `jiffy run -- true` end to end
    Run,
    /// Memory of the VMM and of a fresh guest
    Memory,
    /// Create from the template, -c at a time
    Create,
    /// Snapshot a running sandbox, and create from the snapshot
    Snapshot,
    /// Snapshots against the amount written since the last (-n for each size)
    Dirty,
    /// Rollback, -c at a time
    Rollback,
    /// Fork 1, 10 and 20
    Clone,
    /// Pause and resume
    Pause,
    /// Memory of -n idle sandboxes
    Density,
}

/// `jiffy doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print the findings as JSON
    #[arg(long)]
    pub json: bool,
    /// Do not boot a guest
    #[arg(long)]
    pub no_boot: bool,
}

/// `jiffy template`.
#[derive(Debug, Subcommand)]
pub enum TemplateCommand {
    /// List the templates on this host
    Ls {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Build a template from a recipe, unless it is there already
    Build {
        /// A stock template's name, or a directory with a recipe.toml (a path: `./mine`)
        #[arg(default_value = "base")]
        name: String,
    },
    /// Remove a template
    Rm {
        /// Which one
        name: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn arguments_of_the_command_are_left_alone() {
        let cli =
            Cli::try_parse_from(["jiffy", "run", "-i", "--", "ls", "-la", "--timeout"]).unwrap();
        let Command::Run(run) = cli.command else {
            panic!()
        };
        assert_eq!(run.exec.command, ["ls", "-la", "--timeout"]);
        assert!(run.exec.interactive && !run.exec.tty);
    }
}
