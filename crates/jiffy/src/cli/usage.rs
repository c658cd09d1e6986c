//! Arguments of `jiffy usage`.

use super::HostArgs;
use clap::Args;

/// `jiffy usage`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy usage                                       last 30 days, each key
  jiffy usage --key ci --from 2026-11-01            one key since a day
  jiffy usage --from 2026-10-01 --to 2026-10-31 --json")]
pub struct UsageArgs {
    /// Only this key: id or name, or `owner` for the owner of the host
    #[arg(long, value_name = "KEY")]
    pub key: Option<String>,
    /// First day in UTC, like 2026-01-31 [default: 29 days before the last day]
    #[arg(long, value_name = "DAY")]
    pub from: Option<String>,
    /// Last day in UTC [default: the present day]
    #[arg(long, value_name = "DAY")]
    pub to: Option<String>,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}
