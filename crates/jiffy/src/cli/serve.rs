//! `jiffy serve`.

use super::site::GuestSiteArgs;
use super::{ConfinementArgs, EngineArgs, NetworkArgs, StoreArgs};
use crate::units;
use clap::{Args, ValueEnum};
use jiffy_daemon::{DiskShare, LogOptions, ServeOptions, TlsOptions};
use jiffy_host::HostLimits;
use jiffy_proto::cpu_level::CpuLevel;
use jiffy_proto::function::SlotReset;
use jiffy_pull::RegistryAddress;
use std::net::SocketAddr;
use std::path::PathBuf;

/// `jiffy serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Restored sandboxes kept ready for the next create, per template and size in use
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub warm_pool: usize,
    /// VMM processes started in advance: the next guests begin some milliseconds earlier. For
    /// minutes after many starts at once there are up to 20
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u8).range(..=64))]
    pub spare_vmms: u8,
    /// Answer the API and reach sandboxes' ports at this address; port 0 takes any that is free
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:3000")]
    pub listen: SocketAddr,
    /// Listen on the data directory's socket only
    #[arg(long, conflicts_with = "listen")]
    pub no_listen: bool,
    /// Answer requests to public functions by host name at this address, each connection in the
    /// process of the function's owner: faster than through the gateway, HTTP/1.1 without TLS
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub functions_listen: Option<SocketAddr>,
    /// Reset of memory behind each request to a function: strict gives it back to the kernel; fast
    /// puts back the pages that the kernel finds written and keeps them: fewer page faults, more
    /// memory, Linux 6.7 or later
    #[arg(
        long,
        env = "JIFFY_FUNCTIONS_RESET",
        value_name = "RESET",
        default_value = "strict"
    )]
    pub functions_reset: SlotReset,
    /// Answer `/metrics`, and nothing else, without a key at this address
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics_listen: Option<SocketAddr>,
    /// Registry (HOST or HOST:PORT) that templates are built from images of without TLS
    #[arg(long, value_name = "HOST")]
    pub plain_http: Vec<String>,
    /// Registry of this host's own network (HOST or HOST:PORT) that images may come from; may be
    /// repeated
    #[arg(
        long,
        env = "JIFFY_REGISTRY_ALLOW",
        value_name = "HOST",
        value_delimiter = ','
    )]
    pub registry_allow: Vec<RegistryAddress>,
    /// Most templates that are built at once; others wait
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub builds: u8,
    /// Remove steps of builds and uploaded files that no build used for so many days; 0: never
    #[arg(long, value_name = "DAYS", default_value = "14", value_parser = clap::value_parser!(u16).range(..=3650))]
    pub build_cache_days: u16,
    /// Domain whose names `<port>-<id>.<domain>` lead here
    #[arg(long, value_name = "NAME")]
    pub domain: Vec<String>,
    /// Further host name under which clients may come
    #[arg(long, value_name = "NAME")]
    pub allow_host: Vec<String>,
    /// Speak TLS, with a certificate made for the domains
    #[arg(long)]
    pub tls: bool,
    /// Speak TLS, with the certificate chain in this PEM file
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Its private key
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Most sandboxes that run at once (default: as many as memory allows)
    #[arg(long, value_name = "N")]
    pub max_sandboxes: Option<usize>,
    /// Memory that all running sandboxes may grow to together, in multiples of this host's memory
    #[arg(long, value_name = "FACTOR", default_value_t = HostLimits::default().memory_overcommit, value_parser = units::factor)]
    pub memory_overcommit: f64,
    /// Memory that stays available on this host (default: 512MiB or 5 %)
    #[arg(long, value_name = "SIZE", value_parser = units::mebibytes)]
    pub reserve_memory: Option<u64>,
    /// Disk space that stays free (default: 1GiB or 1 %)
    #[arg(long, value_name = "SIZE", value_parser = units::mebibytes)]
    pub reserve_disk: Option<u64>,
    /// Disks of all running sandboxes together, in multiples of the space that is free; with 1 all
    /// that was admitted can be written
    #[arg(long, value_name = "FACTOR", default_value_t = HostLimits::default().disk_overcommit, value_parser = units::factor)]
    pub disk_overcommit: f64,
    /// Disk space that each key of scope `create` may keep snapshots, paused sandboxes, templates,
    /// uploads and build steps in, unless it was made with `--max-disk`; 0: no limit (default: a
    /// quarter of the data directory's file system)
    #[arg(long, value_name = "SIZE", value_parser = units::mebibytes_or_zero)]
    pub default_key_disk: Option<u64>,
    /// Processor that guests of microVMs see: host, x86-64-v2, x86-64-v3 or x86-64-v4. Snapshots
    /// run on hosts that have what their guests saw. Needs VT-x or AMD-V
    #[arg(long, env = "JIFFY_CPU_LEVEL", value_name = "LEVEL", default_value_t)]
    pub cpu_level: CpuLevel,
    /// The limits of VMMs
    #[command(flatten)]
    pub confinement: ConfinementArgs,
    /// The store that hosts share snapshots in
    #[command(flatten)]
    pub store: StoreArgs,
    /// Engine that isolates new sandboxes
    #[command(flatten)]
    pub engine: EngineArgs,
    /// The network of sandboxes
    #[command(flatten)]
    pub network: NetworkArgs,
    /// The network that sandboxes are in
    #[command(flatten)]
    pub site: GuestSiteArgs,
    /// Format of the log on standard error; JIFFY_LOG=debug says more, JIFFY_LOG=warn less
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// File that standard error is, to be kept short
    #[arg(long, hide = true, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Stop the one that runs; its sandboxes run on, and the next daemon takes them over
    #[arg(long)]
    pub stop: bool,
    /// With --stop: end the running sandboxes too, also those of a daemon that is gone; paused ones
    /// and snapshots stay
    #[arg(long, requires = "stop")]
    pub kill_sandboxes: bool,
}

impl ServeArgs {
    /// The same for a daemon, with the files read that they name.
    pub fn options(&self) -> anyhow::Result<ServeOptions> {
        let tls = match (&self.tls_cert, &self.tls_key) {
            (Some(certificate), Some(key)) => TlsOptions::Files {
                certificate: certificate.clone(),
                key: key.clone(),
            },
            _ if self.tls => TlsOptions::Generated,
            _ => TlsOptions::Off,
        };
        Ok(ServeOptions {
            warm_pool: self.warm_pool,
            spare_vmms: self.spare_vmms.into(),
            listen: (!self.no_listen).then_some(self.listen),
            functions_listen: self.functions_listen,
            functions_reset: self.functions_reset,
            metrics_listen: self.metrics_listen,
            plain_http: self.plain_http.clone(),
            registry_allow: self.registry_allow.clone(),
            max_builds: self.builds.into(),
            build_cache_days: self.build_cache_days,
            domains: self.domain.clone(),
            allowed_hosts: self.allow_host.clone(),
            tls,
            limits: self.limits(),
            default_key_disk: match self.default_key_disk {
                Some(0) => DiskShare::Unlimited,
                Some(mib) => DiskShare::Mebibytes(mib),
                None => DiskShare::Quarter,
            },
            confinement: self.confinement.options(),
            cpu_level: self.cpu_level,
            store: self.store.options(),
            engine: self.engine.name(),
            network: self.network.options(),
            site: self.site.read()?,
            log: LogOptions {
                format: self.log_format.into(),
                file: self.log_file.clone(),
            },
        })
    }

    /// Limits of the host.
    fn limits(&self) -> HostLimits {
        HostLimits {
            sandboxes: self.max_sandboxes,
            memory_overcommit: self.memory_overcommit,
            reserve_memory_mib: self.reserve_memory,
            reserve_disk_mib: self.reserve_disk,
            disk_overcommit: self.disk_overcommit,
            ..HostLimits::default()
        }
    }
}

/// Format of the daemon's log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people
    #[default]
    Text,
    /// One JSON object per line
    Json,
}

impl From<LogFormat> for jiffy_daemon::LogFormat {
    fn from(format: LogFormat) -> Self {
        match format {
            LogFormat::Text => Self::Text,
            LogFormat::Json => Self::Json,
        }
    }
}
