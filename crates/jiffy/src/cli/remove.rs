//! Removing: sandboxes, snapshots, and what nothing needs.

use super::HostArgs;
use crate::units;
use clap::Args;
use std::time::Duration;

/// `jiffy rm`.
#[derive(Debug, Args)]
#[command(
    after_help = "A snapshot that something was made from stays as long as that is there; the refusal names
sandboxes and snapshots that need it.

Examples:
  jiffy rm web k3x9
  jiffy rm before-upgrade
  jiffy rm --all --yes"
)]
pub struct RmArgs {
    /// Names or ids of sandboxes and snapshots, or the beginnings of ids
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    pub ids: Vec<String>,
    /// All your sandboxes; snapshots stay
    #[arg(short, long)]
    pub all: bool,
    /// Do not ask
    #[arg(short = 'y', long, visible_alias = "force", visible_short_alias = 'f')]
    pub yes: bool,
    /// Print what was removed as JSON
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}

/// `jiffy prune`.
#[derive(Debug, Args)]
#[command(after_help = "What goes, if it was not used for --older-than:
  sandbox    records of sandboxes that were killed, however long ago
  template   images that `jiffy create --image` imported and no sandbox or snapshot is of
  snapshot   snapshots of booted templates; the next sandbox of the template boots it again
  step       snapshots of steps of template builds, which make later builds faster
  upload     files that were sent for builds
  image      images of templates that are gone

Snapshots that somebody asked for, sandboxes that are not killed, and templates with names of their own stay.")]
pub struct PruneArgs {
    /// Only show what would go, and how much that frees
    #[arg(short = 'n', long)]
    pub dry_run: bool,
    /// Time without use after which things go; 0s: all that nothing needs at the moment
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = units::duration_or_zero)]
    pub older_than: Duration,
    /// Do not ask
    #[arg(short = 'y', long, visible_alias = "force", visible_short_alias = 'f')]
    pub yes: bool,
    /// As JSON; takes --yes or --dry-run
    #[arg(long)]
    pub json: bool,
    /// Control plane that is asked
    #[command(flatten)]
    pub host: HostArgs,
}
