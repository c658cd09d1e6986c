//! Arguments of `jiffy function` and its subcommands.

use super::HostArgs;
use crate::units;
use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// `jiffy function`.
#[derive(Debug, Subcommand)]
pub enum FunctionCommand {
    /// Create a directory with an example function and a test
    New(FunctionNewArgs),
    /// Build a function from source in a sandbox without deploying it
    Build(FunctionBuildArgs),
    /// Deploy a module as a new version
    Deploy(Box<FunctionDeployArgs>),
    /// List functions
    #[command(visible_alias = "list")]
    Ls {
        /// Include functions of all keys
        #[arg(short, long)]
        all: bool,
        /// Output format and daemon.
        #[command(flatten)]
        output: FunctionOutputArgs,
    },
    /// Show details of a function, without the values of its environment variables
    Info(FunctionArgs),
    /// Show output and failures of a function
    Logs(FunctionLogsArgs),
    /// List the versions of a function
    Versions(FunctionArgs),
    /// Roll back a function to a previous version
    Rollback {
        /// Name of the function
        name: String,
        /// Version number [default: the previous version]
        #[arg(id = "to_version", value_name = "VERSION")]
        version: Option<u64>,
        /// Output format and daemon.
        #[command(flatten)]
        output: FunctionOutputArgs,
    },
    /// Disable a function without removing it
    Disable(FunctionArgs),
    /// Enable a function
    Enable(FunctionArgs),
    /// Remove functions with all their versions
    Rm {
        /// Names of functions
        #[arg(required = true)]
        names: Vec<String>,
        /// Output format and daemon.
        #[command(flatten)]
        output: FunctionOutputArgs,
    },
    /// Send a request to a function and print the response
    Invoke(FunctionInvokeArgs),
}

/// Language of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FunctionLanguage {
    /// Component with the interface wasi:http/proxy
    Rust,
    /// Component with the interface wasi:http/proxy
    #[value(alias = "javascript")]
    Js,
    /// Component with the interface wasi:http/proxy
    Python,
    /// Module with the interface jiffy-core/1
    Go,
    /// Module with the interface jiffy-core/1
    C,
}

/// Rights of a function over sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FunctionKeyScope {
    /// Create, use and kill sandboxes of the deploying key
    Create,
    /// Read-only access to these sandboxes
    Read,
}

impl FunctionKeyScope {
    /// Name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Read => "read",
        }
    }
}

/// `jiffy function new`.
#[derive(Debug, Args)]
pub struct FunctionNewArgs {
    /// Name: a-z, 0-9 and single dashes, at most 48 characters
    pub name: String,
    /// Language
    #[arg(long, value_enum)]
    pub lang: FunctionLanguage,
}

/// `jiffy function build`.
#[derive(Debug, Args)]
pub struct FunctionBuildArgs {
    /// Directory with a program `build` that creates function.wasm
    pub directory: PathBuf,
    /// Output file [default: function.wasm in the directory]
    #[arg(short = 'o', long = "output", value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// Output format and daemon of a command.
#[derive(Debug, Args)]
pub struct FunctionOutputArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// Arguments of commands for one function.
#[derive(Debug, Args)]
pub struct FunctionArgs {
    /// Name of the function
    pub name: String,
    /// Output format and daemon.
    #[command(flatten)]
    pub output: FunctionOutputArgs,
}

/// `jiffy function deploy`.
#[derive(Debug, Args)]
#[command(
    after_help = "Omitted settings of an existing function are retained, except for --sandbox-key: without it, an
existing sandbox key is revoked.

Examples:
  jiffy function deploy hello hello.wasm --public
  jiffy function new --lang rust count && jiffy function deploy count count
  jiffy function deploy report report.wasm --env TOKEN --schedule '*/5 * * * *'
  jiffy function deploy agent agent.wasm --sandbox-key create --timeout 5m
  jiffy function deploy hello --digest blake3:6e5c..."
)]
pub struct FunctionDeployArgs {
    /// Name: a-z, 0-9 and single dashes, at most 48 characters
    pub name: String,
    /// WebAssembly module or component, or a directory with a program `build` that creates
    /// function.wasm. The program runs in a sandbox of the template functions-builder
    #[arg(value_name = "FILE|DIRECTORY", required_unless_present = "digest")]
    pub source: Option<PathBuf>,
    /// Digest of a module that the caller deployed before, on this host or on a host with the same
    /// store. `info` and `versions` show the digest
    #[arg(long, value_name = "DIGEST", conflicts_with = "source")]
    pub digest: Option<String>,
    /// Environment variable. Without =VALUE, its current value is used
    #[arg(short, long = "env", value_name = "KEY[=VALUE]")]
    pub env: Vec<String>,
    /// Memory limit of a request [default: 128MiB]
    #[arg(long, value_name = "SIZE", value_parser = units::memory_mib)]
    pub memory: Option<u32>,
    /// Processor time limit of a request in milliseconds [default: 50]
    #[arg(long, value_name = "N")]
    pub cpu_ms: Option<u32>,
    /// Timeout of a request [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    pub timeout: Option<Duration>,
    /// Maximum number of concurrent requests [default: 64]
    #[arg(long, value_name = "N")]
    pub concurrency: Option<u32>,
    /// Host that the function may access. Can be repeated
    #[arg(long, value_name = "HOST")]
    pub allow: Vec<String>,
    /// Scope of the sandbox key of the function: `create` or `read`. Without this option, an
    /// existing sandbox key is revoked
    #[arg(long, value_enum, value_name = "SCOPE")]
    pub sandbox_key: Option<FunctionKeyScope>,
    /// Replace the existing sandbox key
    #[arg(long, requires = "sandbox_key")]
    pub renew_sandbox_key: bool,
    /// Accept requests without a key
    #[arg(long, conflicts_with = "private")]
    pub public: bool,
    /// Accept requests with a key only
    #[arg(long)]
    pub private: bool,
    /// Cron schedule, in UTC unless it ends with a time zone. An empty value removes the schedule
    #[arg(long, value_name = "CRON")]
    pub schedule: Option<String>,
    /// Output format and daemon.
    #[command(flatten)]
    pub output: FunctionOutputArgs,
}

/// `jiffy function logs`.
#[derive(Debug, Args)]
pub struct FunctionLogsArgs {
    /// Name of the function
    pub name: String,
    /// Follow the output until Ctrl-C
    #[arg(short, long)]
    pub follow: bool,
    /// Output format and daemon.
    #[command(flatten)]
    pub output: FunctionOutputArgs,
}

/// `jiffy function invoke`.
#[derive(Debug, Args)]
pub struct FunctionInvokeArgs {
    /// Name of the function
    pub name: String,
    /// Path and query of the request
    #[arg(default_value = "/")]
    pub path: String,
    /// Method [default: GET, or POST with a body]
    #[arg(short = 'X', long, value_name = "METHOD")]
    pub method: Option<String>,
    /// Body. @FILE: read from a file, @-: from standard input
    #[arg(short, long, value_name = "DATA")]
    pub data: Option<String>,
    /// Request header. Can be repeated
    #[arg(short = 'H', long, value_name = "NAME: VALUE")]
    pub header: Vec<String>,
    /// Output format and daemon.
    #[command(flatten)]
    pub output: FunctionOutputArgs,
}
