//! Settings of a new sandbox.

use super::{HostArgs, SiteArgs, SizeArgs};
use crate::units;
use clap::{Args, ValueEnum};
use jiffy_engine::EngineName;
use jiffy_host::OnTimeout;
use std::time::Duration;

/// `jiffy create`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy create                                       of template base, until it is killed
  jiffy create --cpu 2 --memory 4Gi --name web --label team=a
  jiffy create --timeout 1h --on-timeout pause       sleeps after an hour
  jiffy create --from before-upgrade                 of a snapshot
  jiffy create --image python:3.12 --cpu 2 --memory 4Gi --persist
  jiffy create --network off --engine gvisor

Time limits:
  Without --timeout a sandbox stays until it is killed, and --persist says just that. With it, its
  time runs from the moment it is up, and begins anew when it is woken; --on-timeout says what
  happens at the end. Sandboxes made through the API have 300 s unless they are given more.")]
pub struct CreateArgs {
    /// Template to start from
    #[arg(long, default_value = "base", value_name = "NAME")]
    pub template: String,
    /// Start from this image of a registry, which becomes a template first, unless it did before
    /// and is unchanged
    #[arg(long, value_name = "REF", conflicts_with_all = ["template", "from"])]
    pub image: Option<String>,
    /// Start from this snapshot (id, the beginning of it, or name) instead
    #[arg(long, value_name = "SNAPSHOT", conflicts_with_all = ["template", "cpus", "memory", "disk"])]
    pub from: Option<String>,
    /// Name to call it by wherever an id is asked for; unique among yours
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Note about it, by which `jiffy ls --filter label=KEY=VALUE` finds it (the API's `metadata`)
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = label)]
    pub labels: Vec<(String, String)>,
    /// Resources
    #[command(flatten)]
    pub size: SizeArgs,
    /// Set an environment variable for all its commands; without =VALUE, take it from here
    #[arg(short, long = "env", value_name = "KEY[=VALUE]")]
    pub env: Vec<String>,
    /// Time it has: 90s, 30m, 12h, 2d
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    pub timeout: Option<Duration>,
    /// Action at the end of that time
    #[arg(
        long,
        value_name = "ACTION",
        requires = "timeout",
        value_enum,
        default_value_t
    )]
    pub on_timeout: AtTimeout,
    /// No time limit: it stays until it is killed (the default)
    #[arg(long, conflicts_with = "timeout")]
    pub persist: bool,
    /// Let it reach the internet; its own ports are reached either way
    #[arg(long, value_name = "on|off", value_enum, default_value_t)]
    pub network: NetworkSwitch,
    /// Engine that isolates it, one of `jiffy engines` (default: the daemon's, or the snapshot's
    /// own)
    #[arg(long, value_name = "ENGINE")]
    pub engine: Option<EngineName>,
    /// Memory that is fetched if the snapshot is in the store only: what it touches first, or all
    /// of it, the rest while it runs
    #[arg(long, value_name = "MEMORY", value_enum, requires = "from")]
    pub prefetch: Option<PrefetchMode>,
    /// The network that it is in
    #[command(flatten)]
    pub site: SiteArgs,
    /// Print the sandbox as JSON instead of its id
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// Memory that is fetched without being touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PrefetchMode {
    /// Memory that it touches first
    WorkingSet,
    /// All of it
    All,
}

impl PrefetchMode {
    /// Its name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::WorkingSet => "working_set",
            Self::All => "all",
        }
    }
}

/// The end of a sandbox's time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum AtTimeout {
    /// It is killed
    #[default]
    Kill,
    /// It is paused
    Pause,
}

impl From<AtTimeout> for OnTimeout {
    fn from(at: AtTimeout) -> Self {
        match at {
            AtTimeout::Kill => Self::Kill,
            AtTimeout::Pause => Self::Pause,
        }
    }
}

/// Way out of a sandbox to the internet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum NetworkSwitch {
    /// It has one
    #[default]
    On,
    /// It has none
    Off,
}

/// `KEY=VALUE`, both as they are.
fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("`{text}` is not KEY=VALUE")),
    }
}
