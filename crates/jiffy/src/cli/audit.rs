//! Arguments of `jiffy audit`.

use super::HostArgs;
use crate::units;
use clap::Args;
use std::time::Duration;

/// `jiffy audit`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  jiffy audit --since 1h --rejected                 rejected calls of the last hour
  jiffy audit --call 'DELETE /sandboxes' --json     removals of sandboxes")]
pub struct AuditArgs {
    /// Print further entries as they are recorded, until interrupted
    #[arg(short, long)]
    pub follow: bool,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
    /// Only calls with this API key
    #[arg(long, value_name = "KEY")]
    pub key: Option<String>,
    /// Only calls on this sandbox, as the caller wrote it
    #[arg(short, long, value_name = "ID")]
    pub sandbox: Option<String>,
    /// Only calls from this address
    #[arg(long, value_name = "ADDRESS")]
    pub address: Option<String>,
    /// Only calls whose method and path contain this text
    #[arg(long, value_name = "TEXT")]
    pub call: Option<String>,
    /// Only rejected calls (status 401, 403, 404 or 429)
    #[arg(long)]
    pub rejected: bool,
    /// Only calls of this period, for example 10m [default: all retained entries]
    #[arg(long, value_name = "DURATION", value_parser = units::duration_or_zero)]
    pub since: Option<Duration>,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}
