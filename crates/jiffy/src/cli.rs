//! What can be typed.

use crate::serve::confinement::ConfinementArgs;
use crate::serve::network::NetworkArgs;
use crate::units;
use clap::{Args, Parser, Subcommand, ValueEnum};
use jiffy_host::Limits;
use std::net::SocketAddr;
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
    /// List, build, take along and remove templates
    #[command(subcommand)]
    Template(TemplateCommand),
    /// Make, list and revoke the API keys of this host
    #[command(subcommand)]
    Key(KeyCommand),
    /// Measure this host
    Bench(BenchArgs),
    /// Make a sandbox that stays until it is killed
    Create(CreateArgs),
    /// List the sandboxes
    Ls(LsArgs),
    /// Run a command in a sandbox
    Exec(SandboxExecArgs),
    /// Show the last lines of a sandbox's console, or what it reached over the network
    Logs(LogsArgs),
    /// Copy a file or a directory into a sandbox or out of it
    Cp(CpArgs),
    /// Lead ports of this host to ports of a sandbox
    PortForward(PortForwardArgs),
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
    /// Start, stop and look at the daemon in the background
    #[command(subcommand)]
    Daemon(DaemonCommand),
}

/// `jiffy daemon`.
#[derive(Debug, Subcommand)]
pub enum DaemonCommand {
    /// Start it, unless it runs
    Start {
        /// Options of `jiffy serve`
        #[arg(
            trailing_var_arg = true,
            allow_hyphen_values = true,
            value_name = "OPTION"
        )]
        options: Vec<String>,
    },
    /// Say what it does; exits with 3 if it does not run
    Status {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Stop it; what is under way may finish, and its sandboxes run on until the next one takes them over
    Stop {
        /// End the running sandboxes too, also those of a daemon that is gone; paused ones and snapshots stay
        #[arg(long)]
        kill_sandboxes: bool,
    },
    /// Stop and start it, with the options it had unless others are given; its sandboxes run on
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

/// How the daemon logs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people
    #[default]
    Text,
    /// One JSON object per line
    Json,
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
    /// Resources
    #[command(flatten)]
    pub size: SizeArgs,
    /// What to run in it
    #[command(flatten)]
    pub exec: ExecArgs,
}

/// How large a sandbox is to be.
#[derive(Debug, Args)]
pub struct SizeArgs {
    /// Virtual CPUs, 1 to 8 (default: the template's, else 2)
    #[arg(long, value_name = "N")]
    pub cpus: Option<u8>,
    /// Memory, 128MiB to 64GiB (default: the template's, else 512MiB)
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
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD"
    )]
    pub command: Vec<String>,
}

/// Whose sandboxes a command is about.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Another host")]
pub struct HostArgs {
    /// Ask the daemon at this address, as in https://jiffy.example (default: $JIFFY_URL, else this host's)
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    /// File with the API key for it (default: the key in $JIFFY_API_KEY)
    #[arg(long, value_name = "FILE")]
    pub key_file: Option<PathBuf>,
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
    /// Resources
    #[command(flatten)]
    pub size: SizeArgs,
    /// Set an environment variable for all its commands; without =VALUE, take it from here
    #[arg(short, long = "env", value_name = "KEY[=VALUE]")]
    pub env: Vec<String>,
    /// Print the sandbox as JSON instead of its id
    #[arg(long)]
    pub json: bool,
    /// Where
    #[command(flatten)]
    pub host: HostArgs,
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
    /// Where
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy exec`.
#[derive(Debug, Args)]
pub struct SandboxExecArgs {
    /// Sandbox, or the beginning of its id
    pub id: String,
    /// What to run
    #[command(flatten)]
    pub exec: ExecArgs,
    /// Where
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Sandbox, or the beginning of its id
    pub id: String,
    /// Its connections and questions about names instead: when, where to, how much, allowed or refused
    #[arg(long)]
    pub network: bool,
    /// How many lines, at most 1000
    #[arg(short = 'n', long, default_value_t = 1000, value_name = "N", value_parser = clap::value_parser!(u16).range(..=1000))]
    pub lines: u16,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Where
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy port-forward`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy port-forward k3x9 8080:80       127.0.0.1:8080 leads to port 80 in the sandbox
  jiffy port-forward k3x9 5432 :6379    5432 to the same port; any free port to 6379

Also servers that listen on the sandbox's loopback only are reached. Ends with Ctrl-C.")]
pub struct PortForwardArgs {
    /// Sandbox, or the beginning of its id
    pub id: String,
    /// Port of this host and port of the sandbox: LOCAL:REMOTE, PORT for the same, :REMOTE for any that is free
    #[arg(required = true, value_name = "[LOCAL:]REMOTE", value_parser = forwarding)]
    pub ports: Vec<Forwarding>,
    /// Address of this host to listen at; others than loopback open the sandbox to the network
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    pub address: std::net::IpAddr,
    /// Where
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

fn forwarding(text: &str) -> Result<Forwarding, String> {
    let (local, remote) = text.split_once(':').unwrap_or((text, text));
    let port = |text: &str| text.parse().ok().filter(|&port: &u16| port != 0);
    let local = match local {
        "" => Some(0),
        local => port(local),
    };
    match (local, port(remote)) {
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
    /// Where
    #[command(flatten)]
    pub host: HostArgs,
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
    /// Where
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy snapshots`.
#[derive(Debug, Args)]
pub struct SnapshotsArgs {
    /// Only those of this sandbox and its ancestors
    pub id: Option<String>,
    /// Compare this snapshot, and all it needs, with the checksums it was sealed with; success means that it is sound
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "id")]
    pub verify: Option<String>,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Where
    #[command(flatten)]
    pub host: HostArgs,
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
    /// Where
    #[command(flatten)]
    pub host: HostArgs,
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
    /// Where
    #[command(flatten)]
    pub host: HostArgs,
}

/// A command on one sandbox.
#[derive(Debug, Args)]
pub struct OneArgs {
    /// Sandbox, or the beginning of its id
    pub id: String,
    /// Print the outcome as JSON
    #[arg(long)]
    pub json: bool,
    /// Where
    #[command(flatten)]
    pub host: HostArgs,
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
    /// Where
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Restored sandboxes kept ready for the next create, per template and size in use
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub warm_pool: usize,
    /// Answer the API and reach sandboxes' ports at this address; port 0 takes any that is free
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:3000")]
    pub listen: SocketAddr,
    /// Listen on the data directory's socket only
    #[arg(long, conflicts_with = "listen")]
    pub no_listen: bool,
    /// Registry (HOST or HOST:PORT) that templates are built from images of without TLS
    #[arg(long, value_name = "HOST")]
    pub plain_http: Vec<String>,
    /// Most templates that are built at once; others wait
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub builds: u8,
    /// Remove steps of builds and uploaded files that no build used for so many days; 0: never
    #[arg(long, value_name = "DAYS", default_value = "14", value_parser = clap::value_parser!(u16).range(..=3650))]
    pub build_cache_days: u16,
    /// Domain whose names `<port>-<id>.<domain>` lead here
    #[arg(long, value_name = "NAME")]
    pub domain: Vec<String>,
    /// Further host name under which clients may come
    #[arg(long, value_name = "NAME")]
    pub allow_host: Vec<String>,
    /// Speak TLS, with a certificate made for the domains
    #[arg(long)]
    pub tls: bool,
    /// Speak TLS, with the certificate chain in this PEM file
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Its private key
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Most sandboxes that run at once (default: as many as memory allows)
    #[arg(long, value_name = "N")]
    pub max_sandboxes: Option<usize>,
    /// What all running sandboxes may grow to together, in multiples of this host's memory
    #[arg(long, value_name = "FACTOR", default_value_t = Limits::default().memory_overcommit, value_parser = units::factor)]
    pub memory_overcommit: f64,
    /// Memory that stays available on this host (default: 512MiB or 5 %)
    #[arg(long, value_name = "SIZE", value_parser = units::mebibytes)]
    pub reserve_memory: Option<u64>,
    /// Disk space that stays free (default: 1GiB or 1 %)
    #[arg(long, value_name = "SIZE", value_parser = units::mebibytes)]
    pub reserve_disk: Option<u64>,
    /// The limits of VMMs
    #[command(flatten)]
    pub confinement: ConfinementArgs,
    /// The network of sandboxes
    #[command(flatten)]
    pub network: NetworkArgs,
    /// How to log, to standard error; JIFFY_LOG=debug says more, JIFFY_LOG=warn less
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// File that standard error is, to be kept short
    #[arg(long, hide = true, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Stop the one that runs; its sandboxes run on, and the next daemon takes them over
    #[arg(long)]
    pub stop: bool,
    /// With --stop: end the running sandboxes too, also those of a daemon that is gone; paused ones and snapshots stay
    #[arg(long, requires = "stop")]
    pub kill_sandboxes: bool,
}

impl ServeArgs {
    /// What the host may be used for.
    pub fn limits(&self) -> Limits {
        Limits {
            sandboxes: self.max_sandboxes,
            memory_overcommit: self.memory_overcommit,
            reserve_memory_mib: self.reserve_memory,
            reserve_disk_mib: self.reserve_disk,
            ..Limits::default()
        }
    }
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
    /// Where
    #[command(flatten)]
    pub host: HostArgs,
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
    /// Snapshot running sandboxes, -c at a time, and create from the snapshots
    Snapshot,
    /// Snapshots against the amount written since the last (-n for each size)
    Dirty,
    /// Restore a snapshot without the daemon, -c at a time
    Restore,
    /// Rollback, -c at a time
    Rollback,
    /// Fork 1, 10 and 20, of -c sandboxes at a time
    Clone,
    /// Pause and resume, -c at a time
    Pause,
    /// Memory of -n idle sandboxes
    Density,
    /// Exec, files and silent streams through the gateway, and straight
    Gateway,
    /// The first piece of code in a new code-interpreter-v1
    Code,
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
    /// Look at what protects sandboxes from each other and the host from them instead
    #[arg(long, conflicts_with = "measure")]
    pub security: bool,
    /// Measure what restores cost under each memory policy, and use the best one on this host from now on
    #[arg(long, conflicts_with = "no_boot")]
    pub measure: bool,
    /// Restores per policy
    #[arg(long, default_value_t = 20, value_name = "N", requires = "measure")]
    pub rounds: usize,
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
    /// Build a template, unless it is there already: from a recipe, or of an image
    Build(Box<TemplateBuildArgs>),
    /// Show what is known about a template
    Inspect {
        /// Which one
        name: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Show how a template was made
    History {
        /// Which one
        name: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Give what a template is now another name as well
    Tag {
        /// Which one
        from: String,
        /// NAME or NAME:TAG
        to: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Write a template to one file, which `import` takes on any host
    Export {
        /// Which one
        name: String,
        /// Where to (`-`: standard output)
        file: PathBuf,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Make the template that such a file holds
    Import {
        /// Which file (`-`: standard input)
        file: PathBuf,
        /// Name of the template (default: as it was called)
        #[arg(long)]
        name: Option<String>,
        /// Print the template as JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove templates: NAME, or NAME:TAG; what was made with them goes on
    Rm {
        /// Which ones
        #[arg(required = true)]
        names: Vec<String>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove images and versions that no template, snapshot or sandbox needs, and what only makes later builds faster
    Prune {
        /// Of what makes builds faster (finished steps, uploaded files), only what no build used for so long
        #[arg(long, value_name = "TIME", value_parser = units::duration)]
        older_than: Option<Duration>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
}

/// `jiffy template build`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy template build                                    the stock template `base`
  jiffy template build ./mine                             the recipe in a directory
  jiffy template build --image python:3.12-slim           an image, as template `python-3.12-slim`
  jiffy template build --image ghcr.io/me/app --name app --start-image-command --ready-port 8080
  docker save app | jiffy template build --from-tar - --name app
  jiffy template build --from-dir ./rootfs --name mine

Credentials for a registry: JIFFY_REGISTRY_USER and JIFFY_REGISTRY_PASSWORD, else those of `docker login`.")]
pub struct TemplateBuildArgs {
    /// A directory with a Dockerfile or a recipe.toml (a path: `.`, `./mine`), or a stock template's name [default: base]
    #[arg(conflicts_with = "source")]
    pub recipe: Option<String>,
    /// The Dockerfile, if it is not CONTEXT/Dockerfile (`-`: standard input)
    #[arg(short, long, value_name = "FILE", conflicts_with = "source")]
    pub file: Option<PathBuf>,
    /// Value of an ARG of the Dockerfile; without =VALUE, from here
    #[arg(long, value_name = "KEY[=VALUE]", conflicts_with = "source")]
    pub build_arg: Vec<String>,
    /// Stage of the Dockerfile that becomes the template (default: the last)
    #[arg(long, value_name = "STAGE", conflicts_with = "source")]
    pub target: Option<String>,
    /// Take up nothing that earlier builds did
    #[arg(long, conflicts_with = "source")]
    pub no_cache: bool,
    /// A further tag
    #[arg(long, value_name = "TAG", conflicts_with = "source")]
    pub tag: Vec<String>,
    /// Of what
    #[command(flatten)]
    pub source: TemplateSource,
    /// Name of the template, perhaps with a tag (default: after the directory, image or file)
    #[arg(long)]
    pub name: Option<String>,
    /// vCPUs its sandboxes get unless their creator says otherwise, 1 to 8
    #[arg(long, value_name = "N")]
    pub cpus: Option<u8>,
    /// Memory they get, likewise
    #[arg(long, value_parser = units::memory_mib, value_name = "SIZE")]
    pub memory: Option<u32>,
    /// Writable disk they get, likewise
    #[arg(long, value_parser = units::mebibytes, value_name = "SIZE")]
    pub disk: Option<u64>,
    /// Run this once with /bin/sh -c, before the template's snapshot
    #[arg(long, value_name = "COMMAND", conflicts_with = "start_image_command")]
    pub start: Option<String>,
    /// Run the image's own command once, before the template's snapshot
    #[arg(long)]
    pub start_image_command: bool,
    /// Take the snapshot when this port in the sandbox accepts connections
    #[arg(long, value_name = "PORT")]
    pub ready_port: Option<u16>,
    /// Take it when this page on the port answers with 2xx
    #[arg(long, requires = "ready_port", value_name = "PATH")]
    pub ready_path: Option<String>,
    /// Take it when this command, run with /bin/sh -c, succeeds
    #[arg(long, value_name = "COMMAND", conflicts_with = "ready_port")]
    pub ready_command: Option<String>,
    /// Longest to wait for that
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = units::duration)]
    pub ready_timeout: Duration,
    /// Speak to this registry (HOST or HOST:PORT) without TLS
    #[arg(long, requires = "image", value_name = "HOST")]
    pub plain_http: Vec<String>,
    /// Where a Dockerfile is built
    #[command(flatten)]
    pub host: HostArgs,
    /// Print the template as JSON
    #[arg(long)]
    pub json: bool,
}

impl TemplateBuildArgs {
    /// Whether they say something about the template that a recipe says itself.
    pub fn describes(&self) -> bool {
        let size = self.cpus.is_some() || self.memory.is_some() || self.disk.is_some();
        let ready = self.ready_port.is_some() || self.ready_command.is_some();
        let dockerfile = !self.build_arg.is_empty() || self.target.is_some() || self.no_cache;
        let start = self.start.is_some() || self.start_image_command;
        size || ready || dockerfile || start || self.name.is_some() || !self.tag.is_empty()
    }
}

/// What image a template is made of.
#[derive(Debug, Args)]
#[group(id = "source", multiple = false)]
pub struct TemplateSource {
    /// An image in a registry: [HOST[:PORT]/]NAME[:TAG|@DIGEST]
    #[arg(long, value_name = "REF")]
    pub image: Option<String>,
    /// A tar file (`-`: standard input): an OCI layout, what `docker save` writes, or a root file system
    #[arg(long, value_name = "FILE")]
    pub from_tar: Option<PathBuf>,
    /// A directory: an OCI layout, or a root file system
    #[arg(long, value_name = "DIR")]
    pub from_dir: Option<PathBuf>,
}

/// `jiffy key`.
#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// Make a key and print it; it is shown this once
    Create(KeyCreateArgs),
    /// List the keys
    Ls {
        /// Also those that were revoked
        #[arg(short, long)]
        all: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Revoke a key; its sandboxes stay
    Revoke {
        /// Id of the key, or its name
        key: String,
        /// Print the key as JSON instead of its id
        #[arg(long)]
        json: bool,
    },
}

/// `jiffy key create`.
#[derive(Debug, Args)]
pub struct KeyCreateArgs {
    /// Name for it
    #[arg(long, default_value = "unnamed")]
    pub name: String,
    /// What it is good for
    #[arg(long, value_enum, default_value_t = KeyScope::Create)]
    pub scope: KeyScope,
    /// Most running sandboxes
    #[arg(long, value_name = "N")]
    pub max_sandboxes: Option<u32>,
    /// Most virtual CPUs of all of them
    #[arg(long, value_name = "N")]
    pub max_cpus: Option<u32>,
    /// Most memory of all of them
    #[arg(long, value_parser = units::memory_mib, value_name = "SIZE")]
    pub max_memory: Option<u32>,
    /// Most new sandboxes in any 60 s
    #[arg(long, value_name = "N")]
    pub creates_per_minute: Option<u32>,
    /// Print the key with everything about it as JSON
    #[arg(long)]
    pub json: bool,
}

/// What an API key is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KeyScope {
    /// Everything on this host, also others' sandboxes, templates and pools
    Admin,
    /// Sandboxes of its own
    Create,
    /// Looking, without secrets
    Read,
}

impl From<KeyScope> for jiffy_api::Scope {
    fn from(scope: KeyScope) -> Self {
        match scope {
            KeyScope::Admin => Self::Admin,
            KeyScope::Create => Self::Create,
            KeyScope::Read => Self::Read,
        }
    }
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
