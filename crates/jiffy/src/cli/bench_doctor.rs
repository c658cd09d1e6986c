//! Arguments of `jiffy bench` and `jiffy doctor`.

use super::HostArgs;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// `jiffy bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Operation to measure
    #[arg(value_enum)]
    pub task: BenchTask,
    /// Number of samples
    #[arg(short, default_value_t = 20, value_name = "N")]
    pub number: usize,
    /// Number of concurrent operations
    #[arg(short, default_value_t = 1, value_name = "N")]
    pub concurrency: usize,
    /// Number of warm-up rounds, which are discarded
    #[arg(short, default_value_t = 2, value_name = "N")]
    pub warm_up: usize,
    /// For create: template of the sandboxes
    #[arg(long, default_value = "base", value_name = "NAME")]
    pub template: String,
    /// For functions: name of the function
    #[arg(long, value_name = "NAME", required_if_eq("task", "functions"))]
    pub function: Option<String>,
    /// For functions: path and query of the requests
    #[arg(long, default_value = "/", value_name = "PATH")]
    pub path: String,
    /// Print JSON with every sample instead of a table
    #[arg(long)]
    pub json: bool,
    /// Also write JSON to a file
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// Tasks of `jiffy bench`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchTask {
    /// Time to create a sandbox
    Create,
    /// Time to run `true` in a running guest
    Exec,
    /// Time of `jiffy run -- echo hello`, with and without a daemon
    Run,
    /// Time to create, use, snapshot, pause, resume and delete sandboxes. Fails if an operation
    /// fails or if a resource remains on the host
    Stress,
    /// Memory usage of -n idle sandboxes
    Density,
    /// Latency and rate of requests to a deployed function
    Functions,
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
    /// Check the isolation of sandboxes and the host instead
    #[arg(long, conflicts_with = "measure")]
    pub security: bool,
    /// Measure restores with each memory policy, and configure the best one for this host
    #[arg(long, conflicts_with = "no_boot")]
    pub measure: bool,
    /// Number of restores per policy
    #[arg(long, default_value_t = 20, value_name = "N", requires = "measure")]
    pub rounds: usize,
}
