//! Arguments of `jiffy agent-shell`, `jiffy history` and `jiffy undo`.

use super::{HookArgs, HostArgs, NetworkSwitch};
use crate::units;
use clap::{Args, Subcommand};
use jiffy_coding_agent::SessionOptions;
use std::path::PathBuf;

/// `jiffy agent-shell`.
#[derive(Debug, Subcommand)]
pub enum AgentShellCommand {
    /// Run a shell command in the sandbox of the project, with a snapshot before it
    #[command(after_help = "Examples:
  jiffy agent-shell exec -- 'make test'
  jiffy agent-shell exec --workdir src -- 'cargo build && ls ../target'
  jiffy agent-shell exec --background -- 'python3 -m http.server'

The project directory is copied to the sandbox before the command, and changes are copied back after
it. The command never runs on this host. Exit status 125: the command was not run, or its changes
were not copied.")]
    Exec(AgentShellExecArgs),
    /// Create the sandbox of the project and copy the project to it, or change its settings
    Start(AgentShellStartArgs),
    /// Show the sandbox of the project
    Status(ProjectArgs),
    /// Remove the sandbox of the project, its snapshots and its history. The project directory is
    /// not changed
    End(ProjectArgs),
    /// Answer the hook of a coding agent: read a call from standard input, and print the call that
    /// runs in the sandbox. Exit status 2 denies the call
    Hook(HookArgs),
}

/// Project of a command.
#[derive(Debug, Clone, Args)]
pub struct ProjectArgs {
    /// Project directory [default: the ancestor of the current directory that has a session, or a
    /// Git repository, otherwise the current directory]
    #[arg(long, value_name = "DIR")]
    pub project: Option<PathBuf>,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy agent-shell exec`.
#[derive(Debug, Args)]
pub struct AgentShellExecArgs {
    /// Working directory [default: the directory in which the previous command ended]
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<PathBuf>,
    /// Run at the same time as later commands
    #[arg(long)]
    pub background: bool,
    /// Attach standard input
    #[arg(short, long)]
    pub interactive: bool,
    /// Read the command from this file, and remove the file
    #[arg(long, value_name = "FILE", conflicts_with = "command")]
    pub file: Option<PathBuf>,
    /// Shell command. If there are several words, each is quoted
    #[arg(required_unless_present = "file", last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
    /// Project of the command.
    #[command(flatten)]
    pub project: ProjectArgs,
}

/// `jiffy agent-shell start`.
#[derive(Debug, Args)]
pub struct AgentShellStartArgs {
    /// Template of the sandbox [default: base]
    #[arg(long, value_name = "NAME")]
    pub template: Option<String>,
    /// Internet access of the sandbox [default: on]
    #[arg(long, value_name = "on|off", value_enum)]
    pub network: Option<NetworkSwitch>,
    /// Maximum number of commands in the history [default: 30]
    #[arg(long, value_name = "N")]
    pub keep: Option<usize>,
    /// Maximum size of the copies of changed and deleted files for undo [default: 1GiB]
    #[arg(long, value_name = "SIZE", value_parser = units::memory_mib)]
    pub saved_size: Option<u32>,
    /// Project of the command.
    #[command(flatten)]
    pub project: ProjectArgs,
}

/// `jiffy history`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy history
  jiffy history -n 1 --json")]
pub struct HistoryArgs {
    /// Number of latest commands to show [default: all]
    #[arg(short = 'n', value_name = "N")]
    pub count: Option<usize>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Project directory [default: as for `jiffy agent-shell`]
    #[arg(long, value_name = "DIR")]
    pub project: Option<PathBuf>,
}

/// `jiffy undo`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy undo               undo the latest command
  jiffy undo 3             undo the latest three commands
  jiffy undo --force       also restore files that were edited on this host afterwards")]
pub struct UndoArgs {
    /// Number of commands
    #[arg(default_value_t = 1, value_name = "N")]
    pub count: usize,
    /// Also restore files that were changed on this host after the command. Their present versions
    /// are stored
    #[arg(long)]
    pub force: bool,
    /// Restore only the project directory, and remove the sandbox
    #[arg(long)]
    pub files_only: bool,
    /// Project of the command.
    #[command(flatten)]
    pub project: ProjectArgs,
}

impl AgentShellStartArgs {
    /// Returns the settings of the session.
    pub fn options(&self) -> SessionOptions {
        SessionOptions {
            template: self.template.clone(),
            internet: self.network.map(|network| network == NetworkSwitch::On),
            commands: self.keep,
            saved_bytes: self.saved_size.map(|mib| u64::from(mib) << 20),
        }
    }
}
