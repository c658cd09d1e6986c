//! `jiffy bench` and `jiffy doctor`.

use super::HostArgs;
use clap::{Args, ValueEnum};
use jiffy_benchmark::Task;
use std::path::PathBuf;

/// `jiffy bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Task to measure
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
    /// For scale: numbers of snapshots, paused sandboxes, templates and keys
    #[arg(long, value_delimiter = ',', default_values_t = [10, 1_000, 10_000, 100_000], value_name = "N")]
    pub numbers: Vec<usize>,
    /// For create, clone and processor-time: template of the sandboxes
    #[arg(long, default_value = "base", value_name = "NAME")]
    pub template: String,
    /// Print JSON with every sample instead of a table
    #[arg(long)]
    pub json: bool,
    /// Also write JSON to a file
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// Tasks of `jiffy bench`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchTask {
    /// The host's own operations: exit, page fault, copy, fsync, fork; every task has them beside
    /// its figures
    Calibration,
    /// Cold boot to the agent's answer, split by phase
    Boot,
    /// `true` in a running guest
    Exec,
    /// `jiffy run -- echo hello` end to end, with a daemon and without
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
    /// The same with 2 s in between
    Sleep,
    /// Memory of -n idle sandboxes
    Density,
    /// Exec, files and silent streams through the gateway, and straight
    Gateway,
    /// The first piece of code in a new code-interpreter-v1
    Code,
    /// Whole lives, -c at a time: create, exec, snapshot, pause, resume, delete; fails if one of
    /// them does or leaves something on the host
    Stress,
    /// Processor time of the host for each operation: -n of each, -c rounds
    ProcessorTime,
    /// Calls, restart, memory and disk with 10 to 100,000 fabricated snapshots, sleeping sandboxes,
    /// templates and keys (--numbers)
    Scale,
    /// Requests, streams, files, and work in a sandbox of each engine, beside the same on the host
    Data,
}

impl From<BenchTask> for Task {
    fn from(task: BenchTask) -> Self {
        match task {
            BenchTask::Calibration => Self::Calibration,
            BenchTask::Boot => Self::Boot,
            BenchTask::Exec => Self::Exec,
            BenchTask::Run => Self::Run,
            BenchTask::Memory => Self::Memory,
            BenchTask::Create => Self::Create,
            BenchTask::Snapshot => Self::Snapshot,
            BenchTask::Dirty => Self::Dirty,
            BenchTask::Restore => Self::Restore,
            BenchTask::Rollback => Self::Rollback,
            BenchTask::Clone => Self::Fork,
            BenchTask::Pause => Self::Pause,
            BenchTask::Sleep => Self::Sleep,
            BenchTask::Density => Self::Density,
            BenchTask::Gateway => Self::Gateway,
            BenchTask::Code => Self::Code,
            BenchTask::Stress => Self::Stress,
            BenchTask::ProcessorTime => Self::ProcessorTime,
            BenchTask::Scale => Self::Scale,
            BenchTask::Data => Self::Data,
        }
    }
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
