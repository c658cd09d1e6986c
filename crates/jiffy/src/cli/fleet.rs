//! Arguments of `jiffy fleet` and its subcommands.
//!
//! A *member* is a host of the fleet. A *front* is a machine without sandboxes that passes requests
//! of clients to the members. It has a `MemberId` as well (for example f2). A *record* is a small
//! object in the store or in etcd by which the members agree.
//!
//! The comments of arguments are help texts.

use super::StoreTargetArgs;
use crate::units;
use clap::{Args, Subcommand, ValueEnum};
use jiffy_fleet::EtcdUrl;
use jiffy_fleet::tokens::Token;
use jiffy_fleet_core::MemberId;
use jiffy_fleet_core::record::HostLabel;
use jiffy_proto::cpu_level::CpuLevel;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// `jiffy fleet`.
#[derive(Debug, Subcommand)]
pub enum FleetCommand {
    /// Create a fleet with this host as its first member
    Init(Box<FleetInitArgs>),
    /// Add this host to a fleet
    Join(FleetJoinArgs),
    /// Create a token for hosts that join
    Token(FleetTokenArgs),
    /// Start a fleet of several hosts and a front on this machine, and remove it at exit
    Try(FleetTryArgs),
    /// Show the state of the fleet
    Status(FleetOutputArgs),
    /// List the members
    Nodes(FleetOutputArgs),
    /// Explain on which host a sandbox was placed, or why a create was rejected
    Why {
        /// Id or name of a sandbox, or id of a decision from the error of a create
        id: String,
        /// Output
        #[command(flatten)]
        output: FleetOutputArgs,
    },
    /// Place no more sandboxes on a member
    Drain {
        /// Member (for example h2)
        member: MemberId,
        /// Wait until the member has no running sandbox
        #[arg(long, conflicts_with = "force")]
        wait: bool,
        /// Pause running sandboxes, so that other members can resume them
        #[arg(long)]
        force: bool,
        /// Output
        #[command(flatten)]
        output: FleetOutputArgs,
    },
    /// Place sandboxes on a drained member again
    Undrain(FleetMemberArgs),
    /// Remove a dead member or a front from the fleet
    Remove(FleetMemberArgs),
    /// Declare a silent member dead if more than half of the members are silent
    ConfirmDead(FleetMemberArgs),
    /// Continue after the records were restored from a backup
    AcceptRestore(FleetOutputArgs),
}

/// Output of a command.
#[derive(Debug, Clone, Args)]
pub struct FleetOutputArgs {
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// Command for a member.
#[derive(Debug, Args)]
pub struct FleetMemberArgs {
    /// Member (for example h2)
    pub member: MemberId,
    /// Output
    #[command(flatten)]
    pub output: FleetOutputArgs,
}

/// Addresses and name of a member.
#[derive(Debug, Args)]
pub struct MemberAddressArgs {
    /// Address at which this host accepts connections of other members
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:7946")]
    pub fleet_listen: SocketAddr,
    /// Address at which other members reach this host [default: the address of the interface
    /// towards the network, with the port of --fleet-listen]
    #[arg(long, value_name = "HOST:PORT")]
    pub fleet_address: Option<String>,
    /// Name of this host [default: host name of the system]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Label of this host, which `jiffy create --host-label` can require. Can be repeated
    #[arg(long = "label", value_name = "NAME=VALUE")]
    pub labels: Vec<HostLabel>,
}

/// `jiffy fleet init`.
#[derive(Debug, Args)]
#[command(
    after_help = "Sandboxes, API keys and templates of this host remain. Restart the daemon afterwards."
)]
pub struct FleetInitArgs {
    /// Store of the fleet
    #[command(flatten)]
    pub store: StoreTargetArgs,
    /// etcd for the records: etcd://HOST:PORT,HOST:PORT[/PREFIX] [default: the store]
    #[arg(long, value_name = "URL")]
    pub records: Option<EtcdUrl>,
    /// Certificates of the authorities that sign the certificates of etcd's members
    #[arg(long, value_name = "FILE", requires = "records")]
    pub records_ca: Option<PathBuf>,
    /// Certificate of the members as clients of etcd
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
    /// Domain of sandboxes: `<port>-<id>.<domain>` refers to a sandbox port on all members
    #[arg(long, value_name = "NAME", value_parser = units::domain)]
    pub domain: Vec<String>,
    /// Processor level of all microVMs [default: all features of each host]
    #[arg(long, value_name = "LEVEL")]
    pub cpu_level: Option<CpuLevel>,
    /// Addresses
    #[command(flatten)]
    pub member: MemberAddressArgs,
    /// Number of hosts that can join with the printed token
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub uses: u32,
    /// Output
    #[command(flatten)]
    pub output: FleetOutputArgs,
}

/// `jiffy fleet join`.
#[derive(Debug, Args)]
#[command(
    after_help = "Needs the same AWS variables as the daemon. Restart the daemon afterwards."
)]
pub struct FleetJoinArgs {
    /// Address of a member: https://HOST:7946
    pub url: String,
    /// Token of `jiffy fleet token`
    pub token: Token,
    /// Add the API keys, templates, secrets and webhooks of this host to the fleet
    #[arg(long)]
    pub import: bool,
    /// Addresses
    #[command(flatten)]
    pub member: MemberAddressArgs,
    /// Output
    #[command(flatten)]
    pub output: FleetOutputArgs,
}

/// `jiffy fleet try`.
#[derive(Debug, Args)]
#[command(
    after_help = "Needs root, util-linux, iproute2, and the S3 server versitygw in PATH or JIFFY_VERSITYGW. \
                  The network of this machine is not changed. Ctrl-C removes everything. \
                  Lines on standard input cause faults: `help` lists them."
)]
pub struct FleetTryArgs {
    /// Number of hosts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=9))]
    pub hosts: u8,
    /// Location of the records. etcd: three members of the program `etcd` in PATH, or of the
    /// program that JIFFY_ETCD names
    #[arg(long, value_enum, default_value_t = TryRecords::Store)]
    pub records: TryRecords,
    /// Template of this machine for the hosts. Can be repeated
    #[arg(long = "template", value_name = "NAME", default_value = "base")]
    pub templates: Vec<String>,
    /// Print addresses, data directories and the answers to commands as JSON, one value per line
    #[arg(long)]
    pub json: bool,
}

/// Location of the records of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TryRecords {
    /// S3 server
    Store,
    /// etcd
    Etcd,
}

/// `jiffy fleet token`.
#[derive(Debug, Args)]
pub struct FleetTokenArgs {
    /// Number of hosts that can join
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub uses: u32,
    /// Validity
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = units::duration_or_zero)]
    pub valid: Duration,
    /// Output
    #[command(flatten)]
    pub output: FleetOutputArgs,
}
