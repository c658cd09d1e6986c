//! Arguments of `jiffy store` and its subcommands.
//!
//! A *chunk* is 64 KiB of memory or of a disk, and a *pack* is an object of the store with many
//! chunks. A *tenant* is an owner of snapshots in the store, usually an API key. The comments of
//! arguments are help texts.

use crate::units;
use clap::{Args, Subcommand};
use jiffy_fleet::EtcdUrl;
use jiffy_store::StoreUrl;
use std::path::PathBuf;
use std::time::Duration;

/// `jiffy store`.
#[derive(Debug, Subcommand)]
pub enum StoreCommand {
    /// Check that a store or etcd supports the conditional writes that several hosts require
    Check(StoreCheckArgs),
    /// Remove unreferenced data, and rewrite objects that contain mostly unreferenced data
    Gc(StoreGcArgs),
    /// Read all stored data and report damaged chunks
    Verify(StoreVerifyArgs),
    /// Wrap tenant secrets with the current master key. The previous master key can be removed
    /// afterwards
    Rotate(StoreRotateArgs),
    /// Show the amount of stored data and the savings by deduplication and compression
    Stats(StoreStatsArgs),
}

/// Store that a command uses.
#[derive(Debug, Clone, Args)]
pub struct StoreLocationArgs {
    /// Store [default: the store that a daemon of this data directory used last]. Needs the same
    /// AWS variables as the daemon
    #[arg(long, env = "JIFFY_STORE", value_name = "URL")]
    pub store: Option<StoreUrl>,
    /// File with the master keys [default: the file of the daemon, otherwise store/keys.toml in the
    /// data directory]
    #[arg(long, env = "JIFFY_STORE_KEYS", value_name = "FILE")]
    pub store_keys: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// `jiffy store check`.
#[derive(Debug, Args)]
#[command(
    after_help = "The check writes and removes small objects below check/. \
                  Exit status 1: the server is unsuitable, or not reachable."
)]
pub struct StoreCheckArgs {
    /// Store [default: the store that a daemon of this data directory used last]. Needs the same
    /// AWS variables as the daemon
    #[arg(long, env = "JIFFY_STORE", value_name = "URL")]
    pub store: Option<StoreUrl>,
    /// Check etcd instead: etcd://HOST:PORT,HOST:PORT[/PREFIX]
    #[arg(long, value_name = "URL", conflicts_with = "store")]
    pub records: Option<EtcdUrl>,
    /// Certificates of the authorities that sign the certificates of etcd's members
    #[arg(long, value_name = "FILE", requires = "records")]
    pub records_ca: Option<PathBuf>,
    /// Certificate of this client of etcd
    #[arg(long, value_name = "FILE", requires = "records_key")]
    pub records_cert: Option<PathBuf>,
    /// Private key of that certificate
    #[arg(long, value_name = "FILE", requires = "records_cert")]
    pub records_key: Option<PathBuf>,
    /// User of etcd, if its authentication is enabled
    #[arg(long, value_name = "NAME", requires = "records_password_file")]
    pub records_user: Option<String>,
    /// File with the password of that user
    #[arg(long, value_name = "FILE", requires = "records_user")]
    pub records_password_file: Option<PathBuf>,
    /// Number of rounds
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub rounds: u16,
    /// Number of concurrent writers
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(2..=256))]
    pub writers: u16,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// `jiffy store gc`.
#[derive(Debug, Args)]
pub struct StoreGcArgs {
    /// Show the changes without applying them
    #[arg(long)]
    pub dry_run: bool,
    /// Minimum age of removed data. The first collection marks unreferenced data; a collection at
    /// least this time later removes it
    #[arg(long, value_name = "TIME", default_value = "1d", value_parser = units::duration_or_zero)]
    pub grace: Duration,
    /// Store
    #[command(flatten)]
    pub place: StoreLocationArgs,
}

/// `jiffy store verify`.
#[derive(Debug, Args)]
#[command(after_help = "Exit status 1: data is damaged, or could not be repaired with --repair.")]
pub struct StoreVerifyArgs {
    /// Snapshot ids [default: all]
    pub ids: Vec<String>,
    /// Repair damaged chunks from the cache and the snapshots of this host
    #[arg(long)]
    pub repair: bool,
    /// Store
    #[command(flatten)]
    pub place: StoreLocationArgs,
}

/// `jiffy store rotate`.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit status 1: at least one tenant failed. Run the command again; completed tenants are skipped."
)]
pub struct StoreRotateArgs {
    /// Tenants [default: all tenants whose secrets the master keys can decrypt]
    pub tenants: Vec<String>,
    /// Also create new data keys. New uploads use them and share no chunks with previous uploads
    #[arg(long)]
    pub data_keys: bool,
    /// Store
    #[command(flatten)]
    pub place: StoreLocationArgs,
}

/// `jiffy store stats`.
#[derive(Debug, Args)]
pub struct StoreStatsArgs {
    /// Store
    #[command(flatten)]
    pub place: StoreLocationArgs,
}
