//! The command line.

use clap::{Parser, ValueEnum};
use jiffy_benchmark::BenchmarkOptions;
use jiffy_client::ServerOptions;
use std::path::PathBuf;

/// Measure this host with a developer instrument. Requires root
#[derive(Debug, Parser)]
#[command(version)]
pub struct Cli {
    /// Instrument to run
    #[arg(value_enum)]
    pub instrument: Instrument,
    /// Number of samples
    #[arg(short, default_value_t = 20, value_name = "N")]
    number: usize,
    /// Number of concurrent operations
    #[arg(short, default_value_t = 1, value_name = "N")]
    concurrency: usize,
    /// Number of warm-up rounds, which are discarded
    #[arg(short, default_value_t = 2, value_name = "N")]
    warm_up: usize,
    /// For scale: numbers of snapshots, paused sandboxes, templates and keys
    #[arg(long, value_delimiter = ',', default_values_t = [10, 1_000, 10_000, 100_000], value_name = "N")]
    pub numbers: Vec<usize>,
    /// For clone and processor-time: template of the sandboxes
    #[arg(long, default_value = "base", value_name = "NAME")]
    pub template: String,
    /// Print JSON with every sample instead of a table
    #[arg(long)]
    pub json: bool,
    /// Also write JSON to a file
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// URL of a remote daemon [default: $JIFFY_URL, otherwise the daemon of this host]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// File with the API key of the remote daemon [default: $JIFFY_API_KEY]
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
}

impl Cli {
    /// Options of the measurement.
    pub fn options(&self) -> BenchmarkOptions {
        BenchmarkOptions {
            samples: self.number,
            warm_up: self.warm_up,
            concurrency: self.concurrency,
            server: ServerOptions {
                url: self.url.clone(),
                key_file: self.key_file.clone(),
            },
        }
    }
}

/// Instruments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Instrument {
    /// Costs of the host's own operations: exit, page fault, copy, fsync, fork. Each report
    /// contains them
    Calibration,
    /// Cold boot until the agent answers, by phase
    Boot,
    /// Memory of the VMM and of a fresh guest
    Memory,
    /// Snapshot of running sandboxes, -c at a time, and create from the snapshots
    Snapshot,
    /// Snapshot by the amount written since the previous one (-n for each amount)
    Dirty,
    /// Restore of a snapshot without a daemon, -c at a time
    Restore,
    /// Rollback, -c at a time
    Rollback,
    /// Fork with 1, 10 and 20 children, of -c sandboxes at a time
    Clone,
    /// Pause and resume, -c at a time
    Pause,
    /// Pause, 2 s of waiting, resume
    Sleep,
    /// Exec, files and silent streams through the gateway, and without it
    Gateway,
    /// First piece of code in a new code-interpreter-v1
    Code,
    /// Processor time of the host for each operation: -n of each, in -c rounds
    ProcessorTime,
    /// Calls, restart, memory and disk with 10 to 100,000 fabricated snapshots, paused sandboxes,
    /// templates and keys (--numbers)
    Scale,
    /// Requests, streams, files and programs in a sandbox of each engine, and the same on the host
    Data,
    /// Cost of recording the steps of an operation
    Steps,
}
