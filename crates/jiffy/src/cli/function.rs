//! `jiffy function`.

use super::HostArgs;
use crate::units;
use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// `jiffy function`.
#[derive(Debug, Subcommand)]
pub enum FunctionCommand {
    /// Write a working function with a test to start with, into a directory of its name
    New(FunctionNewArgs),
    /// Build a function from source in a sandbox, without deploying it
    Build(FunctionBuildArgs),
    /// Deploy a module as a new version, which answers as soon as it has been proved
    Deploy(Box<FunctionDeployArgs>),
    /// List the functions
    #[command(visible_alias = "list")]
    Ls {
        /// Also those of all keys
        #[arg(short, long)]
        all: bool,
        /// Output and host
        #[command(flatten)]
        output: FunctionOutputArgs,
    },
    /// Show all that is known about a function; values of its environment are not
    Info(FunctionArgs),
    /// Show output and failures of a function
    Logs(FunctionLogsArgs),
    /// List the versions that a function can be rolled back to
    Versions(FunctionArgs),
    /// Let an earlier version answer again
    Rollback {
        /// Name of the function
        name: String,
        /// Number of the version (default: the one before)
        #[arg(id = "to_version", value_name = "VERSION")]
        version: Option<u64>,
        /// Output and host
        #[command(flatten)]
        output: FunctionOutputArgs,
    },
    /// Refuse requests to a function; it stays deployed
    Disable(FunctionArgs),
    /// Answer requests to a function again
    Enable(FunctionArgs),
    /// Remove functions with all their versions
    Rm {
        /// Names of functions
        #[arg(required = true)]
        names: Vec<String>,
        /// Output and host
        #[command(flatten)]
        output: FunctionOutputArgs,
    },
    /// Send a request to a function and print the response
    Invoke(FunctionInvokeArgs),
    /// Measure requests to a function
    Bench(FunctionBenchArgs),
}

/// Language of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FunctionLanguage {
    /// A component of wasi:http/proxy
    Rust,
    /// A component of wasi:http/proxy
    #[value(alias = "javascript")]
    Js,
    /// A component of wasi:http/proxy
    Python,
    /// A module of jiffy-core/1
    Go,
    /// A module of jiffy-core/1
    C,
}

/// Rights of a function over sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FunctionKeyScope {
    /// Sandboxes of the deploying key: makes, uses and ends them
    Create,
    /// Looks at them, and changes nothing
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
    /// Name: a-z, 0-9 and single dashes, 48 characters at most
    pub name: String,
    /// Language
    #[arg(long, value_enum)]
    pub lang: FunctionLanguage,
}

/// `jiffy function build`.
#[derive(Debug, Args)]
pub struct FunctionBuildArgs {
    /// Directory with a program `build` that makes function.wasm
    pub directory: PathBuf,
    /// File for the module (default: function.wasm in the directory)
    #[arg(short = 'o', long = "output", value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// Output and host of a command.
#[derive(Debug, Args)]
pub struct FunctionOutputArgs {
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// One function.
#[derive(Debug, Args)]
pub struct FunctionArgs {
    /// Name of the function
    pub name: String,
    /// Output and host
    #[command(flatten)]
    pub output: FunctionOutputArgs,
}

/// `jiffy function deploy`.
#[derive(Debug, Args)]
#[command(
    after_help = "Settings that are not given stay as they are in a function that exists, except for
--sandbox-key, which is handed in each time.

Examples:
  jiffy function deploy hello hello.wasm --public
  jiffy function new --lang rust count && jiffy function deploy count count
  jiffy function deploy report report.wasm --env TOKEN --schedule '*/5 * * * *'
  jiffy function deploy agent agent.wasm --sandbox-key create --timeout 5m
  jiffy function deploy hello --digest blake3:6e5c..."
)]
pub struct FunctionDeployArgs {
    /// Name: a-z, 0-9 and single dashes, 48 characters at most
    pub name: String,
    /// WebAssembly module or component, or a directory with a program `build` that makes one as
    /// function.wasm: it runs in a sandbox of the template functions-builder
    #[arg(value_name = "FILE|DIRECTORY", required_unless_present = "digest")]
    pub source: Option<PathBuf>,
    /// Module that you deployed before, on this host or on one that shares its store, by the digest
    /// that `info` and `versions` show
    #[arg(long, value_name = "DIGEST", conflicts_with = "source")]
    pub digest: Option<String>,
    /// Set an environment variable; without =VALUE, take it from here
    #[arg(short, long = "env", value_name = "KEY[=VALUE]")]
    pub env: Vec<String>,
    /// Memory of one request (default: 128MiB)
    #[arg(long, value_name = "SIZE", value_parser = units::memory_mib)]
    pub memory: Option<u32>,
    /// Processor time of one request in milliseconds (default: 50)
    #[arg(long, value_name = "N")]
    pub cpu_ms: Option<u32>,
    /// Time of one request as a whole (default: 30s)
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    pub timeout: Option<Duration>,
    /// Requests that run at once (default: 64)
    #[arg(long, value_name = "N")]
    pub concurrency: Option<u32>,
    /// Host that it may send requests to; may be repeated
    #[arg(long, value_name = "HOST")]
    pub allow: Vec<String>,
    /// Let it call sandboxes of the deploying key (`create`), or look at them (`read`); without, a
    /// key that it had is revoked
    #[arg(long, value_enum, value_name = "SCOPE")]
    pub sandbox_key: Option<FunctionKeyScope>,
    /// Replace the key for sandboxes that it has
    #[arg(long, requires = "sandbox_key")]
    pub renew_sandbox_key: bool,
    /// Answer requests without a key
    #[arg(long, conflicts_with = "private")]
    pub public: bool,
    /// Answer requests with a key only
    #[arg(long)]
    pub private: bool,
    /// Call it at these times, as cron writes them (in UTC unless a time zone follows); an empty
    /// text: never
    #[arg(long, value_name = "CRON")]
    pub schedule: Option<String>,
    /// Output and host
    #[command(flatten)]
    pub output: FunctionOutputArgs,
}

/// `jiffy function logs`.
#[derive(Debug, Args)]
pub struct FunctionLogsArgs {
    /// Name of the function
    pub name: String,
    /// Go on until Ctrl-C
    #[arg(short, long)]
    pub follow: bool,
    /// Output and host
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
    /// Method (default: GET, or POST with a body)
    #[arg(short = 'X', long, value_name = "METHOD")]
    pub method: Option<String>,
    /// Body; @FILE takes it from a file, @- from standard input
    #[arg(short, long, value_name = "DATA")]
    pub data: Option<String>,
    /// Header of the request; may be repeated
    #[arg(short = 'H', long, value_name = "NAME: VALUE")]
    pub header: Vec<String>,
    /// Output and host
    #[command(flatten)]
    pub output: FunctionOutputArgs,
}

/// `jiffy function bench`.
#[derive(Debug, Args)]
pub struct FunctionBenchArgs {
    /// Name of the function
    pub name: String,
    /// Path and query of the requests
    #[arg(default_value = "/")]
    pub path: String,
    /// Requests of the measurement
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub requests: u32,
    /// Requests at once
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub concurrency: u32,
    /// Output and host
    #[command(flatten)]
    pub output: FunctionOutputArgs,
}
