//! Arguments of `jiffy processes` and `jiffy signal`.

use super::HostArgs;
use clap::{Args, ValueEnum};

/// `jiffy processes`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy processes web                    tree of processes
  jiffy processes web --sort cpu         highest processor share first
  jiffy processes web --filter python --json")]
pub struct ProcessesArgs {
    /// Id or name of the sandbox
    pub id: String,
    /// Order [default: tree]
    #[arg(long, value_enum)]
    pub sort: Option<ProcessOrder>,
    /// Only processes whose name, command line, user or id matches this text
    #[arg(long, value_name = "TEXT")]
    pub filter: Option<String>,
    /// Maximum number of processes, 1 to 10000
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=10_000), value_name = "N")]
    pub limit: u64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// Order of processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ProcessOrder {
    /// By process id
    Pid,
    /// By processor share, highest first
    Cpu,
    /// By memory, highest first
    Memory,
}

impl ProcessOrder {
    /// Name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pid => "pid",
            Self::Cpu => "cpu",
            Self::Memory => "memory",
        }
    }
}

/// `jiffy signal`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy signal web 812                   request process 812 to exit
  jiffy signal web 812 KILL")]
pub struct SignalArgs {
    /// Id or name of the sandbox
    pub id: String,
    /// Process id in the sandbox
    pub pid: u32,
    /// Name of the signal, with or without SIG
    #[arg(default_value = "TERM", value_parser = signal_name)]
    pub signal: String,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// Parses the name of a signal.
fn signal_name(text: &str) -> Result<String, String> {
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let all = jiffy_api_types::SignalName::ALL;
    let found = all.iter().find(|(_, full, _)| full[3..] == *name);
    found.map(|(_, full, _)| (*full).to_owned()).ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|(_, full, _)| &full[3..]).collect();
        format!("unknown signal: use one of {}", names.join(", "))
    })
}
