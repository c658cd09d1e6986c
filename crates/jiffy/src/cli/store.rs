//! `jiffy store`.

use crate::units;
use clap::{Args, Subcommand};
use jiffy_store::StoreUrl;
use std::path::PathBuf;
use std::time::Duration;

/// `jiffy store`.
#[derive(Debug, Subcommand)]
pub enum StoreCommand {
    /// Remove what no snapshot needs any more, and rewrite packs that are mostly dead
    Gc(StoreGcArgs),
    /// Read all that is stored, and name each chunk that is not as it was written
    Verify(StoreVerifyArgs),
    /// Wrap the secrets of tenants with the current master key, so that the former one can go
    Rotate(StoreRotateArgs),
    /// Show how much is stored, and what deduplication and compression save
    Stats(StoreStatsArgs),
}

/// Store that a command is about.
#[derive(Debug, Clone, Args)]
pub struct StorePlace {
    /// Store (default: the one that a daemon of this data directory opened last). Commands need the
    /// same AWS variables as the daemon
    #[arg(long, env = "JIFFY_STORE", value_name = "URL")]
    pub store: Option<StoreUrl>,
    /// Its master keys (default: those of the daemon, or store/keys.toml in the data directory)
    #[arg(long, env = "JIFFY_STORE_KEYS", value_name = "FILE")]
    pub store_keys: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// `jiffy store gc`.
#[derive(Debug, Args)]
pub struct StoreGcArgs {
    /// Say what would be done, and do none of it
    #[arg(long)]
    pub dry_run: bool,
    /// Age that all has which is removed: first it is condemned, then, in a later collection and
    /// after the same time, removed
    #[arg(long, value_name = "TIME", default_value = "1d", value_parser = units::duration_or_zero)]
    pub grace: Duration,
    /// Store
    #[command(flatten)]
    pub place: StorePlace,
}

/// `jiffy store verify`.
#[derive(Debug, Args)]
#[command(
    after_help = "Exits with 1 if anything is not as it was written, or, with --repair, could not be repaired."
)]
pub struct StoreVerifyArgs {
    /// Ids of snapshots (default: all)
    pub ids: Vec<String>,
    /// Write damaged chunks anew that this host has, in its cache or its own snapshots
    #[arg(long)]
    pub repair: bool,
    /// Store
    #[command(flatten)]
    pub place: StorePlace,
}

/// `jiffy store rotate`.
#[derive(Debug, Args)]
#[command(
    after_help = "Exits with 1 if a tenant was left as it was. What was done is done: run it again."
)]
pub struct StoreRotateArgs {
    /// Tenants (default: all that the master keys open)
    pub tenants: Vec<String>,
    /// Give them further data keys: what is pushed from now on is encrypted with those, and shares
    /// no chunk with what was
    #[arg(long)]
    pub data_keys: bool,
    /// Store
    #[command(flatten)]
    pub place: StorePlace,
}

/// `jiffy store stats`.
#[derive(Debug, Args)]
pub struct StoreStatsArgs {
    /// Store
    #[command(flatten)]
    pub place: StorePlace,
}
