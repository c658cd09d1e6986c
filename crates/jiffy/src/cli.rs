//! Command-line arguments: the options and help texts of all commands. `cli-reference.md` is
//! generated from them.

mod agent_shell;
mod audit;
mod bench_doctor;
mod confinement;
mod create;
mod engine;
mod events;
mod fleet;
mod front;
mod function;
mod hints;
mod inspect;
mod integrate;
mod key;
mod list;
mod mcp;
mod network;
mod processes;
#[cfg(test)]
mod reference;
mod remove;
mod run;
mod sandbox;
mod secret;
mod serve;
mod site;
mod skill;
mod store;
mod store_args;
mod template;
mod top;
mod usage;
mod volume;
mod webhook;

use clap::error::{ContextKind, ContextValue};
use clap::{Args, Parser, Subcommand, ValueEnum};
use jiffy_client::ServerOptions;
use std::path::PathBuf;

pub use agent_shell::{
    AgentShellCommand, AgentShellExecArgs, AgentShellStartArgs, HistoryArgs, ProjectArgs, UndoArgs,
};
pub use audit::AuditArgs;
pub use bench_doctor::{BenchArgs, BenchTask, DoctorArgs};
pub use confinement::ConfinementArgs;
pub use create::{CreateArgs, NetworkSwitch, TimeoutAction};
pub use engine::{EngineArgs, EngineSelection};
pub use events::EventsArgs;
pub use fleet::{
    FleetCommand, FleetInitArgs, FleetJoinArgs, FleetMemberArgs, FleetTokenArgs, FleetTryArgs,
    MemberAddressArgs, TryRecords,
};
pub use front::FrontArgs;
pub use function::{
    FunctionArgs, FunctionBuildArgs, FunctionCommand, FunctionDeployArgs, FunctionInvokeArgs,
    FunctionLanguage, FunctionLogsArgs, FunctionNewArgs, FunctionOutputArgs,
};
pub use inspect::{
    AwaitedState, DiffArgs, InspectArgs, RestartArgs, ShellArgs, StatsArgs, TreeArgs, WaitArgs,
};
pub use integrate::{CodingAgent, HookArgs, IntegrateArgs};
pub use key::{KeyCommand, KeyCreateArgs, KeyLimitArgs, KeyLimitName};
pub use list::{Filter, LsArgs};
pub use mcp::{McpArgs, McpCommand, McpInstallArgs};
pub use network::{FeatureSwitch, NetworkArgs};
pub use processes::{ProcessOrder, ProcessesArgs, SignalArgs};
pub use remove::{PruneArgs, RmArgs};
pub use run::{Publication, RunArgs, Volume};
pub use sandbox::{
    CpArgs, EnginesArgs, ExecArgs, ForkArgs, Forwarding, LogsArgs, PauseArgs, PortForwardArgs,
    RenameArgs, ResumeArgs, ResumeState, RollbackArgs, SandboxExecArgs, SandboxIdArgs,
    SandboxIdsArgs, SizeArgs, SnapshotArgs, SnapshotsArgs, TimeoutArgs,
};
pub use secret::{SecretCommand, SecretCreateArgs};
pub use serve::{ConsoleAddress, ServeArgs};
pub use site::SiteArgs;
pub use skill::{SkillCommand, SkillInstallArgs};
pub use store::{
    StoreCheckArgs, StoreCommand, StoreGcArgs, StoreLocationArgs, StoreRotateArgs, StoreVerifyArgs,
};
pub use store_args::{StoreArgs, StoreTargetArgs};
pub use template::{
    SignatureArgs, TemplateBuildArgs, TemplateCommand, TemplateImportArgs, TemplateSource,
};
pub use top::{SortColumn, TopArgs};
pub use usage::UsageArgs;
pub use volume::{VolumeCommand, VolumeCreateArgs};
pub use webhook::{WebhookCommand, WebhookCreateArgs, WebhookNames};

/// Run commands of AI agents in sandboxes: microVMs, each with its own kernel
#[derive(Debug, Parser)]
#[command(
    name = "jiffy",
    version,
    about,
    propagate_version = true,
    // Longer lines of help are hard to read on wide terminals.
    max_term_width = 110
)]
#[command(after_help = "Examples:
  jiffy run -- python3 -c 'print(6 * 7)'      run a command in a new sandbox
  echo hello | jiffy run -i -- tr a-z A-Z     with standard input
  jiffy run -t -- bash                        with a terminal
  jiffy doctor                                check this host")]
pub struct Cli {
    /// Subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a command in a new sandbox and remove the sandbox afterwards
    Run(RunArgs),
    /// Check whether this host can run sandboxes, and explain how to fix missing requirements
    Doctor(DoctorArgs),
    /// List, build, export, import and remove templates
    #[command(subcommand)]
    Template(TemplateCommand),
    /// Deploy and manage WebAssembly functions that answer HTTP requests
    #[command(subcommand)]
    Function(FunctionCommand),
    /// Create, list and revoke API keys of this host
    #[command(subcommand)]
    Key(KeyCommand),
    /// Create, list and remove volumes, and copy their files
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Store, list and remove secrets of an API key
    #[command(subcommand)]
    Secret(SecretCommand),
    /// Post events of sandboxes to HTTP servers
    #[command(subcommand)]
    Webhook(WebhookCommand),
    /// Verify the shared snapshot store, remove its garbage, and show its size
    #[command(subcommand)]
    Store(StoreCommand),
    /// Create a fleet of hosts, add hosts, and show and change its members
    #[command(subcommand)]
    Fleet(FleetCommand),
    /// Measure start times, memory usage and throughput on this host
    Bench(BenchArgs),
    /// Create a sandbox that runs until it is killed
    Create(CreateArgs),
    /// List sandboxes
    #[command(visible_aliases = ["ps", "list"])]
    Ls(LsArgs),
    /// Show details of sandboxes and snapshots
    Inspect(InspectArgs),
    /// Show processor, memory, disk and network usage of sandboxes
    Stats(StatsArgs),
    /// Show the processes inside a sandbox
    Processes(ProcessesArgs),
    /// Send a signal to a process inside a sandbox
    Signal(SignalArgs),
    /// Show a live table of all sandboxes, and pause, fork, snapshot or kill them by keys
    Top(TopArgs),
    /// Open a shell in a sandbox
    Shell(ShellArgs),
    /// Run a command in a sandbox
    Exec(SandboxExecArgs),
    /// Show the last console lines or the network connections of a sandbox
    Logs(LogsArgs),
    /// Show events of sandboxes, builds, keys and secrets
    Events(EventsArgs),
    /// Show calls of the API with their callers and results
    Audit(AuditArgs),
    /// Show the usage of API keys by day
    Usage(UsageArgs),
    /// Copy a file or directory to or from a sandbox
    Cp(CpArgs),
    /// Forward ports of this host to a sandbox
    PortForward(PortForwardArgs),
    /// Take a snapshot of a sandbox, which continues to run
    Snapshot(SnapshotArgs),
    /// List snapshots
    Snapshots(SnapshotsArgs),
    /// Create copies of a running sandbox, with memory and processes
    Fork(ForkArgs),
    /// Roll back a sandbox to a snapshot
    Rollback(RollbackArgs),
    /// Pause sandboxes: store their memory on disk and release it
    Pause(PauseArgs),
    /// Resume paused sandboxes
    Resume(ResumeArgs),
    /// Stop all processes of sandboxes and run the start command of their template
    Restart(RestartArgs),
    /// Wait until sandboxes reach a state, and print the exit reason
    Wait(WaitArgs),
    /// Show the lineage of a sandbox or snapshot: its ancestors, forks, snapshots and rollbacks
    Tree(TreeArgs),
    /// List files that a sandbox changed relative to its template, or compare two sandboxes or
    /// snapshots
    Diff(DiffArgs),
    /// Rename a sandbox
    Rename(RenameArgs),
    /// Set the timeout or the idle timeout of a sandbox
    Timeout(TimeoutArgs),
    /// Kill sandboxes
    Kill(SandboxIdsArgs),
    /// Remove sandboxes or snapshots. Running sandboxes are killed
    Rm(RmArgs),
    /// Remove unused data
    Prune(PruneArgs),
    /// Keep one child of a fork and remove all others
    Promote(SandboxIdArgs),
    /// List the isolation engines, their availability and capabilities
    Engines(EnginesArgs),
    /// Serve sandboxes as tools of a coding agent, over standard input and output (Model Context
    /// Protocol)
    Mcp(McpArgs),
    /// Run shell commands of a coding agent in the sandbox of a project directory
    #[command(subcommand)]
    AgentShell(AgentShellCommand),
    /// List the commands that ran in the sandbox of a project directory, and the files that they
    /// changed
    History(HistoryArgs),
    /// Undo commands: roll back the sandbox of a project directory and restore the directory
    Undo(UndoArgs),
    /// Configure a coding agent to run its shell commands in sandboxes, and show the change of its
    /// configuration file
    Integrate(IntegrateArgs),
    /// Describe sandboxes to coding agents that load skills
    #[command(subcommand)]
    Skill(SkillCommand),
    /// Run the daemon in the foreground. Other commands start a daemon in the background if none
    /// runs
    Serve(Box<ServeArgs>),
    /// Run a front of a fleet in the foreground: it passes API calls and requests to sandboxes to
    /// the hosts, and runs no sandboxes. Needs neither root nor KVM
    Front(FrontArgs),
    /// Open the web console: print its address with a code for signing in, and open it in a browser
    /// if a display exists. Starts the daemon if none runs
    Console {
        /// Do not open a browser
        #[arg(long)]
        no_open: bool,
    },
    /// Start, stop and inspect the background daemon
    #[command(subcommand)]
    Daemon(DaemonCommand),
    /// Print the completion script for a shell
    #[command(after_help = "Examples:
  source <(jiffy completions bash)                             for this shell
  jiffy completions zsh > ~/.zfunc/_jiffy
  jiffy completions fish > ~/.config/fish/completions/jiffy.fish")]
    Completions {
        /// Shell
        shell: CompletionShell,
    },
    /// Write the image of the guest agent for packages
    #[command(hide = true)]
    AgentImage {
        /// Directory of the image
        directory: PathBuf,
    },
    /// Write manual pages
    #[command(hide = true)]
    Man {
        /// Directory of the pages
        directory: PathBuf,
    },
}

/// Shells with completions.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum CompletionShell {
    /// GNU Bash
    Bash,
    /// Z shell
    Zsh,
    /// fish
    Fish,
}

impl CompletionShell {
    /// Name of the program.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bash => "bash",
            Self::Zsh => "zsh",
            Self::Fish => "fish",
        }
    }
}

/// `jiffy daemon`.
#[derive(Debug, Subcommand)]
pub enum DaemonCommand {
    /// Start the daemon if none runs
    Start {
        /// Options of `jiffy serve`
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            value_name = "OPTION"
        )]
        options: Vec<String>,
    },
    /// Show the status of the daemon. Exit status 3: no daemon runs
    Status {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Stop the daemon after its in-flight operations complete. Sandboxes continue to run and are
    /// adopted by the next daemon
    Stop {
        /// Also kill running sandboxes, even if the daemon has exited. Paused sandboxes and
        /// snapshots are retained
        #[arg(long)]
        kill_sandboxes: bool,
    },
    /// Restart the daemon. It retains its options unless options are given, and sandboxes continue
    /// to run
    Restart {
        /// Options of `jiffy serve`
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            value_name = "OPTION"
        )]
        options: Vec<String>,
    },
}

/// Host whose sandboxes a command uses.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Another host")]
pub struct HostArgs {
    /// URL of a remote daemon, for example https://jiffy.example [default: $JIFFY_URL, otherwise
    /// the daemon of this host]
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    /// File with the API key of the remote daemon [default: $JIFFY_API_KEY]
    #[arg(long, value_name = "FILE")]
    pub key_file: Option<PathBuf>,
}

impl HostArgs {
    /// Returns the options of an API client.
    pub fn server(&self) -> ServerOptions {
        ServerOptions {
            url: self.url.clone(),
            key_file: self.key_file.clone(),
        }
    }
}

impl Cli {
    /// Parses the command line. Exits with an error message, and a hint if one exists, when the
    /// arguments are invalid. Also exits after `--help` and `--version`.
    pub fn read() -> Self {
        Self::try_parse().unwrap_or_else(|error| {
            let hint = option_hint(&error).or_else(|| hints::command_hint(&error));
            // Standard error may be closed. The exit code reports the error in any case.
            let _ = error.print();
            if let Some(hint) = hint {
                errln!("\n{hint}");
            }
            std::process::exit(error.exit_code())
        })
    }
}

/// Returns a hint for an unknown option that exists in other tools.
fn option_hint(error: &clap::Error) -> Option<&'static str> {
    let Some(ContextValue::String(typed)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    run::option_hint(typed.split('=').next()?)
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
    fn arguments_of_the_command_are_not_parsed() {
        let cli =
            Cli::try_parse_from(["jiffy", "run", "-i", "--", "ls", "-la", "--timeout"]).unwrap();
        let Command::Run(run) = cli.command else {
            panic!()
        };
        assert_eq!(run.exec.command, ["ls", "-la", "--timeout"]);
        assert!(run.exec.interactive && !run.exec.tty);
        let cli = Cli::try_parse_from(["jiffy", "exec", "k3x9", "ls", "-la", "--all"]).unwrap();
        let Command::Exec(exec) = cli.command else {
            panic!()
        };
        assert_eq!(exec.exec.command, ["ls", "-la", "--all"]);
    }

    #[test]
    fn command_lines_of_docker_run_are_accepted() {
        let line = "jiffy run --rm -it --network none -v /a:/b:ro -p 8080:80 -w /b -- make -v x";
        let cli = Cli::try_parse_from(line.split(' ')).unwrap();
        let Command::Run(run) = cli.command else {
            panic!()
        };
        assert!(run.rm && run.exec.interactive && run.exec.tty);
        assert_eq!((run.volumes.len(), run.publish.len()), (1, 1));
        assert_eq!(run.network, FeatureSwitch::Off);
        assert_eq!(run.exec.command, ["make", "-v", "x"]);
    }

    #[test]
    fn the_documented_create_line_is_accepted() {
        let line = "jiffy create --image python:3.12 --cpu 2 --memory 4Gi --persist";
        let cli = Cli::try_parse_from(line.split(' ')).unwrap();
        let Command::Create(create) = cli.command else {
            panic!()
        };
        assert_eq!(
            (create.size.cpus, create.size.memory, create.timeout),
            (Some(2), Some(4096), None)
        );
    }

    #[test]
    fn foreign_commands_get_a_hint_and_typos_a_suggestion() {
        let parse_error = |word: &str| Cli::try_parse_from(["jiffy", word]).unwrap_err();
        for word in ["stop", "images", "ssh", "commit"] {
            assert!(hints::command_hint(&parse_error(word)).is_some(), "{word}");
        }
        for (typo, suggestion) in [
            ("crate", "create"),
            ("snapshts", "snapshots"),
            ("exce", "exec"),
        ] {
            let error = parse_error(typo);
            assert!(
                error.to_string().contains(&format!("'{suggestion}'")),
                "{error}"
            );
            assert_eq!(hints::command_hint(&error), None);
        }
    }

    #[test]
    fn an_unknown_option_is_not_taken_for_the_command() {
        let lines: [(&[&str], bool); 5] = [
            (&["run", "-d", "--", "true"], true),
            (&["run", "--mount", "/a:/b", "true"], true),
            (&["run", "--net=none", "true"], true),
            (&["run", "--frobnicate", "true"], false),
            (&["exec", "k3x9", "--rm", "true"], true),
        ];
        for (words, has_hint) in lines {
            let line = ["jiffy"].iter().chain(words);
            let error = Cli::try_parse_from(line).unwrap_err();
            assert_eq!(error.kind(), clap::error::ErrorKind::UnknownArgument);
            assert_eq!(option_hint(&error).is_some(), has_hint, "{words:?}");
        }
    }
}
