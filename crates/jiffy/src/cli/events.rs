//! Arguments of `jiffy events`.

use super::HostArgs;
use crate::units;
use clap::Args;
use std::time::Duration;

/// `jiffy events`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy events --follow --since 0s                  from now on
  jiffy events --since 1h --type sandbox.failed     failures of the last hour
  jiffy events --sandbox k3x9 --json | jq .type")]
pub struct EventsArgs {
    /// Print further events as they happen, until interrupted
    #[arg(short, long)]
    pub follow: bool,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
    /// Only events of this sandbox: id or name
    #[arg(short, long, value_name = "ID")]
    pub sandbox: Option<String>,
    /// Only events of this type, for example sandbox.killed. Can be repeated
    #[arg(short, long = "type", value_name = "TYPE", value_delimiter = ',')]
    pub types: Vec<String>,
    /// Only events of this period, for example 10m [default: all retained events]
    #[arg(long, value_name = "DURATION", value_parser = units::duration_or_zero)]
    pub since: Option<Duration>,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}
