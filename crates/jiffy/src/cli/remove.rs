//! Arguments of `jiffy rm` and `jiffy prune`.

use super::HostArgs;
use crate::units;
use clap::Args;
use std::time::Duration;

/// `jiffy rm`.
#[derive(Debug, Args)]
#[command(
    after_help = "If sandboxes or other snapshots use a snapshot, it loses its name and is removed with
its last user. A second attempt to remove it fails and lists its users.

Examples:
  jiffy rm web k3x9
  jiffy rm before-upgrade
  jiffy rm --all --yes"
)]
pub struct RmArgs {
    /// Sandboxes and snapshots: names, ids, or unique prefixes of ids
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    pub ids: Vec<String>,
    /// Remove all sandboxes of the caller. Snapshots are retained
    #[arg(short, long)]
    pub all: bool,
    /// Do not prompt for confirmation
    #[arg(short = 'y', long, visible_alias = "force", visible_short_alias = 'f')]
    pub yes: bool,
    /// Print the removed objects as JSON
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy prune`.
#[derive(Debug, Args)]
#[command(after_help = "Data that is removed if it was unused for --older-than:
  sandbox    records of killed sandboxes, regardless of their age
  template   images imported by `jiffy create --image` without a sandbox or snapshot
  snapshot   snapshots of booted templates. The next sandbox of the template boots again
  step       cached steps of template builds
  upload     files uploaded for builds
  image      images of removed templates

Snapshots taken by users, sandboxes that are not killed, and named templates are retained.")]
pub struct PruneArgs {
    /// List the unused data and its size without removing it
    #[arg(short = 'n', long)]
    pub dry_run: bool,
    /// Minimum time without use. 0s: everything that is unused now
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = units::duration_or_zero)]
    pub older_than: Duration,
    /// Do not prompt for confirmation
    #[arg(short = 'y', long, visible_alias = "force", visible_short_alias = 'f')]
    pub yes: bool,
    /// Print JSON. Needs --yes or --dry-run
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}
