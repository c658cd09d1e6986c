//! Arguments of `jiffy volume` and its subcommands.

use super::HostArgs;
use clap::{Args, Subcommand};
use jiffy_fleet_core::MemberId;

/// `jiffy volume`.
#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// Create an empty volume
    #[command(after_help = "Examples:
  jiffy volume create datasets
  jiffy volume create cache --size 2G --files 200000")]
    Create(VolumeCreateArgs),
    /// List volumes
    Ls {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Daemon to use.
        #[command(flatten)]
        host: HostArgs,
    },
    /// Remove volumes with their files
    Rm {
        /// Volumes: ids or names
        #[arg(required = true)]
        volumes: Vec<String>,
        /// Daemon to use.
        #[command(flatten)]
        host: HostArgs,
    },
    /// Store a snapshot of a volume in the store of the host
    #[command(
        after_help = "The daemon needs a store (jiffy serve --store). Changes of the volume wait while its files are
copied on the host, so the snapshot has the state of one time.

Examples:
  jiffy volume snapshot datasets
  jiffy volume snapshots
  jiffy volume restore volsnap-7f3a9c21e5d84b60 datasets-2"
    )]
    Snapshot {
        /// Volume: id or name
        volume: String,
        /// Print the snapshot as JSON
        #[arg(long)]
        json: bool,
        /// Daemon to use.
        #[command(flatten)]
        host: HostArgs,
    },
    /// List snapshots of volumes
    Snapshots {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Daemon to use.
        #[command(flatten)]
        host: HostArgs,
    },
    /// Create a volume with the files of a snapshot
    #[command(after_help = "Example:
  jiffy volume restore volsnap-7f3a9c21e5d84b60 datasets-2")]
    Restore {
        /// Id of the snapshot
        snapshot: String,
        /// Volume to create
        #[command(flatten)]
        volume: VolumeCreateArgs,
    },
    /// Remove snapshots of volumes
    RmSnapshot {
        /// Ids of snapshots
        #[arg(required = true)]
        snapshots: Vec<String>,
        /// Daemon to use.
        #[command(flatten)]
        host: HostArgs,
    },
    /// Copy files and directories to or from a volume
    #[command(after_help = "Examples:
  jiffy volume cp model.bin datasets:/models/model.bin
  jiffy volume cp ./corpus datasets:/corpus
  jiffy volume cp datasets:/results ./results")]
    Cp {
        /// Source: a path of this host, or VOLUME:PATH
        from: String,
        /// Destination: a path of this host, or VOLUME:PATH
        to: String,
        /// Daemon to use.
        #[command(flatten)]
        host: HostArgs,
    },
}

/// `jiffy volume create`.
#[derive(Debug, Args)]
pub struct VolumeCreateArgs {
    /// Name: letters, digits, `-` and `_` [default: the id]
    pub name: Option<String>,
    /// Size that the files cannot exceed [default: 10G, at most half of the key's free disk quota]
    #[arg(long, value_name = "SIZE", value_parser = crate::units::mebibytes)]
    pub size: Option<u64>,
    /// Maximum number of files, directories and links [default: 1000000]
    #[arg(long, value_name = "COUNT")]
    pub files: Option<u64>,
    /// Host of the fleet that stores the files [default: the receiving host]
    #[arg(long = "host", value_name = "HOST")]
    pub home: Option<MemberId>,
    /// Print the volume as JSON, without its token
    #[arg(long)]
    pub json: bool,
    /// Daemon to use.
    #[command(flatten)]
    pub host: HostArgs,
}
