//! Arguments of `jiffy serve`, and their conversion to the options of the daemon.

use super::front::tls_options;
use super::sandbox::AckMode;
use super::site::GuestSiteArgs;
use super::{ConfinementArgs, EngineArgs, NetworkArgs, StoreArgs};
use crate::units;
use clap::{Args, ValueEnum};
use jiffy_daemon::{ConsoleOptions, DiskShare, LogOptions, ServeOptions};
use jiffy_event_log::Retention;
use jiffy_fleet::settings::Settings;
use jiffy_identity::IssuerUrl;
use jiffy_proto::cpu_level::CpuLevel;
use jiffy_proto::function::SlotReset;
use jiffy_registry_pull::{RegistryAddress, RegistryMirror};
use jiffy_sandbox_manager::HostLimits;
use std::net::{AddrParseError, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Default address of the console.
const DEFAULT_CONSOLE: &str = "127.0.0.1:3001";

/// Value of `--console`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConsoleAddress {
    /// No console.
    Off,
    /// The default address, or no console if the address is in use.
    Auto,
    /// This address.
    Address(SocketAddr),
}

impl ConsoleAddress {
    fn options(self, published: bool) -> Option<ConsoleOptions> {
        let (address, optional) = match self {
            Self::Off => return None,
            Self::Auto => (DEFAULT_CONSOLE.parse().ok()?, true),
            Self::Address(address) => (address, false),
        };
        Some(ConsoleOptions {
            address,
            published,
            optional,
        })
    }
}

impl FromStr for ConsoleAddress {
    type Err = AddrParseError;

    fn from_str(text: &str) -> Result<Self, AddrParseError> {
        match text {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Auto),
            address => Ok(Self::Address(address.parse()?)),
        }
    }
}

/// `jiffy serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Size of the warm pool: number of sandboxes that are restored in advance, per template and
    /// size in use. A new sandbox is taken from the pool
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub warm_pool: usize,
    /// Number of VMM processes that are started in advance, which reduces the start time by
    /// milliseconds. After a burst of starts the number rises to 20 for some minutes
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u8).range(..=64))]
    pub spare_vmms: u8,
    /// Time at which snapshot requests are answered, unless the request or its key sets the time.
    /// captured: the memory is captured but not yet written. stored: the files are complete
    #[arg(long, value_name = "WHEN", default_value = "stored")]
    snapshot_ack: AckMode,
    /// Address of the API and of the gateway to sandbox ports. Port 0: any free port
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:3000")]
    pub listen: SocketAddr,
    /// Listen on the socket in the data directory only
    #[arg(long, conflicts_with = "listen")]
    pub no_listen: bool,
    /// Address for direct requests to public functions by host name (HTTP/1.1 without TLS). Faster
    /// than the gateway: the process of the function's owner handles the connection
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub functions_listen: Option<SocketAddr>,
    /// Memory reset after each request to a function. strict: unmap all pages. fast: restore
    /// written pages only, with fewer page faults and more memory; needs Linux 6.7 or later
    #[arg(
        long,
        env = "JIFFY_FUNCTIONS_RESET",
        value_name = "RESET",
        default_value = "strict"
    )]
    pub functions_reset: SlotReset,
    /// Address that serves `/metrics` only, without a key
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics_listen: Option<SocketAddr>,
    /// Serve the web console, at 127.0.0.1:3001 unless an address is given. off: no console, the
    /// default of `jiffy serve`. auto: at 127.0.0.1:3001 if no other program uses this port, the
    /// default of `jiffy daemon start`. Uses TLS if the API does; without TLS only loopback
    /// addresses are allowed
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        num_args = 0..=1,
        default_value = "off",
        default_missing_value = DEFAULT_CONSOLE,
        hide_default_value = true
    )]
    pub console: ConsoleAddress,
    /// Permit any address of the console without TLS. For a container whose port is published on a
    /// loopback address of the host
    #[arg(long)]
    pub console_published: bool,
    /// OpenTelemetry collector (http://HOST:PORT) that receives traces of operations
    #[arg(long, env = "JIFFY_OTLP", value_name = "URL")]
    pub otlp: Option<String>,
    /// Registry (HOST or HOST:PORT) that is accessed without TLS
    #[arg(long, value_name = "HOST")]
    pub plain_http: Vec<String>,
    /// Registry in the host's private network (HOST or HOST:PORT) that may be accessed. Can be
    /// repeated
    #[arg(
        long,
        env = "JIFFY_REGISTRY_ALLOW",
        value_name = "HOST",
        value_delimiter = ','
    )]
    pub registry_allow: Vec<RegistryAddress>,
    /// Mirror of a registry, such as docker.io=https://mirror.example:5000. Images of the registry
    /// come from the mirror, and from the registry if the mirror fails. The mirror receives no
    /// credentials. Can be repeated: mirrors are used in this order
    #[arg(
        long,
        env = "JIFFY_REGISTRY_MIRROR",
        value_name = "HOST=URL",
        value_delimiter = ','
    )]
    pub registry_mirror: Vec<RegistryMirror>,
    /// Maximum number of concurrent template builds. Further builds are queued
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub builds: u8,
    /// Remove cached build steps and uploaded files that were unused for this many days. 0: never
    #[arg(long, value_name = "DAYS", default_value = "14", value_parser = clap::value_parser!(u16).range(..=3650))]
    pub build_cache_days: u16,
    /// Domain of this host: `<port>-<id>.<domain>` refers to a sandbox port
    #[arg(long, value_name = "NAME", value_parser = units::domain)]
    pub domain: Vec<String>,
    /// Additional host name that requests may use in the Host header
    #[arg(long, value_name = "NAME")]
    pub allow_host: Vec<String>,
    /// Issue identity tokens of sandboxes (`iam.tokens`). URL is the public address of this API,
    /// where other services fetch the keys that verify the tokens: https://NAME[:PORT][/PATH]
    #[arg(long, env = "JIFFY_IDENTITY_ISSUER", value_name = "URL")]
    pub identity_issuer: Option<IssuerUrl>,
    /// Enable TLS with a generated certificate for the domains
    #[arg(long)]
    pub tls: bool,
    /// Enable TLS with the certificate chain in this PEM file
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of the certificate, a PEM file
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Maximum number of running sandboxes [default: limited by memory]
    #[arg(long, value_name = "N")]
    pub max_sandboxes: Option<usize>,
    /// Memory overcommit: total memory of all running sandboxes relative to the memory of this host
    #[arg(long, value_name = "FACTOR", default_value_t = HostLimits::default().memory_overcommit, value_parser = units::factor)]
    pub memory_overcommit: f64,
    /// Memory that is reserved for the host [default: 512MiB or 5 %]
    #[arg(long, value_name = "SIZE", value_parser = units::mebibytes)]
    pub reserve_memory: Option<u64>,
    /// Disk space that is reserved for the host [default: 1GiB or 1 %]
    #[arg(long, value_name = "SIZE", value_parser = units::mebibytes)]
    pub reserve_disk: Option<u64>,
    /// Disk overcommit: total disk size of all running sandboxes relative to the free space. 1: no
    /// overcommit
    #[arg(long, value_name = "FACTOR", default_value_t = HostLimits::default().disk_overcommit, value_parser = units::factor)]
    pub disk_overcommit: f64,
    /// Default disk quota of keys with scope `create`: snapshots, paused sandboxes, templates,
    /// uploads, build steps, functions and volumes. 0: no limit [default: a quarter of the file
    /// system of the data directory]
    #[arg(long, value_name = "SIZE", value_parser = units::mebibytes_or_zero)]
    pub default_key_disk: Option<u64>,
    /// CPU model of microVMs: host, x86-64-v2, x86-64-v3 or x86-64-v4. Snapshots can be restored on
    /// hosts with these features. Needs VT-x or AMD-V
    #[arg(long, env = "JIFFY_CPU_LEVEL", value_name = "LEVEL", default_value_t)]
    pub cpu_level: CpuLevel,
    /// Resource limits of VMMs.
    #[command(flatten)]
    pub confinement: ConfinementArgs,
    /// Store that hosts share snapshots in.
    #[command(flatten)]
    pub store: StoreArgs,
    /// Isolation engine of new sandboxes
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Network of sandboxes.
    #[command(flatten)]
    pub network: NetworkArgs,
    /// Certificate authorities and proxy of sandboxes.
    #[command(flatten)]
    pub site: GuestSiteArgs,
    /// Retain events for this many days if their size permits it
    #[arg(long, value_name = "DAYS", default_value = "7", value_parser = clap::value_parser!(u16).range(1..=3650))]
    pub event_days: u16,
    /// Maximum size of retained events. The oldest are removed first
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = units::mebibytes)]
    pub event_size: u64,
    /// Retain the audit log for at most this many days
    #[arg(long, value_name = "DAYS", default_value = "90", value_parser = clap::value_parser!(u16).range(1..=3650))]
    pub audit_days: u16,
    /// Maximum size of the audit log. The oldest entries are removed first
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = units::mebibytes)]
    pub audit_size: u64,
    /// Also record commands and file paths of calls on sandboxes in the audit log
    #[arg(long)]
    pub audit_commands: bool,
    /// Format of the log on standard error. Set the level with JIFFY_LOG (debug, info, warn)
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// Log file that standard error is redirected to, and that the daemon rotates
    #[arg(long, hide = true, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Stop the running daemon. Sandboxes continue to run and are adopted by the next daemon
    #[arg(long)]
    pub stop: bool,
    /// With --stop: also kill running sandboxes, even if the daemon has exited. Paused sandboxes
    /// and snapshots are retained
    #[arg(long, requires = "stop")]
    pub kill_sandboxes: bool,
}

impl ServeArgs {
    /// Returns the options of the daemon. Reads the files of certificate authorities.
    ///
    /// A member of a fleet uses the store of the fleet, and the domains of the fleet in addition to
    /// its own. It uses the processor level of the fleet unless `--cpu-level` sets a level other
    /// than `host`.
    pub fn options(&self, fleet: Option<&Settings>) -> anyhow::Result<ServeOptions> {
        let store = fleet.map(Settings::store_url).transpose()?;
        let mut domains = self.domain.clone();
        let of_fleet = fleet.map_or(&[][..], |fleet| &fleet.domains);
        domains.extend(
            of_fleet
                .iter()
                .filter(|name| !self.domain.contains(name))
                .cloned(),
        );
        let cpu_level = match fleet.and_then(|fleet| fleet.cpu_level.as_ref()) {
            Some(level) if self.cpu_level.is_host() => level
                .parse()
                .map_err(|error: String| anyhow::anyhow!(error))?,
            _ => self.cpu_level,
        };
        let tls = tls_options(self.tls, self.tls_cert.as_ref(), self.tls_key.as_ref());
        Ok(ServeOptions {
            warm_pool: self.warm_pool,
            spare_vmms: self.spare_vmms.into(),
            snapshot_ack: self.snapshot_ack.into(),
            listen: (!self.no_listen).then_some(self.listen),
            functions_listen: self.functions_listen,
            functions_reset: self.functions_reset,
            metrics_listen: self.metrics_listen,
            console: self.console.options(self.console_published),
            otlp: self.otlp.clone(),
            plain_http: self.plain_http.clone(),
            registry_allow: self.registry_allow.clone(),
            registry_mirror: self.registry_mirror.clone(),
            max_builds: self.builds.into(),
            build_cache_days: self.build_cache_days,
            domains,
            allowed_hosts: self.allow_host.clone(),
            identity_issuer: self.identity_issuer.clone(),
            tls,
            limits: self.limits(),
            default_key_disk: match self.default_key_disk {
                Some(0) => DiskShare::Unlimited,
                Some(mib) => DiskShare::Mebibytes(mib),
                None => DiskShare::Quarter,
            },
            confinement: self.confinement.options(),
            cpu_level,
            store: self.store.options(store.as_ref())?,
            engine: self.engine.name(),
            network: self.network.options(),
            site: self.site.read()?,
            events: retention(self.event_days, self.event_size),
            audit: retention(self.audit_days, self.audit_size),
            audit_commands: self.audit_commands,
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

/// Returns the limits of a log.
fn retention(days: u16, mib: u64) -> Retention {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    Retention {
        max_bytes: mib.saturating_mul(1 << 20),
        max_age: DAY * u32::from(days),
    }
}

/// Format of the daemon's log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Human-readable lines
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
