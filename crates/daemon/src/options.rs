//! [`ServeOptions`]: the options of a daemon, as the command line sets them.

use jiffy_api_types::SnapshotAck;
use jiffy_engine_api::EngineName;
use jiffy_event_log::Retention;
use jiffy_identity::IssuerUrl;
use jiffy_image::Home;
use jiffy_network::{IpNet, Ipv4Net};
use jiffy_proto::agent::SiteSettings;
use jiffy_proto::cpu_level::CpuLevel;
use jiffy_proto::function::SlotReset;
use jiffy_proto::vm::DiskLimits;
use jiffy_registry_pull::{RegistryAddress, RegistryMirror};
use jiffy_sandbox_manager::{HostLimits, HostReader, KernelReader};
use jiffy_store::StoreUrl;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

/// Divisor for [`DiskShare::Quarter`], which is the default of a key's disk quota and of the cache
/// of the store.
const KEY_DISK_DIVISOR: u64 = 4;

/// Options of a daemon.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// Number of restored sandboxes in the warm pool per template and size.
    pub warm_pool: usize,
    /// Number of VMM processes that are started in advance.
    pub spare_vmms: usize,
    /// Time at which snapshots are acknowledged if neither the request nor its key states it.
    pub snapshot_ack: SnapshotAck,
    /// Address of the API and of sandbox ports. `None` for the socket only.
    pub listen: Option<SocketAddr>,
    /// Address of direct requests to public functions. `None` for requests through the gateway
    /// only.
    pub functions_listen: Option<SocketAddr>,
    /// Mode of the memory reset after each request to a function.
    pub functions_reset: SlotReset,
    /// Address at which `/metrics` is served without a key, in addition to the API. `None` for the
    /// API only.
    pub metrics_listen: Option<SocketAddr>,
    /// Web console. `None` disables the console.
    pub console: Option<ConsoleOptions>,
    /// URL of the OpenTelemetry collector that receives traces. `None` disables traces.
    pub otlp: Option<String>,
    /// Registries that are accessed without TLS.
    pub plain_http: Vec<String>,
    /// Registries in the host's private network that may be accessed.
    pub registry_allow: Vec<RegistryAddress>,
    /// Mirrors of registries.
    pub registry_mirror: Vec<RegistryMirror>,
    /// Maximum number of concurrent template builds.
    pub max_builds: usize,
    /// Days after which unused build steps and uploads are removed. 0 disables the removal.
    pub build_cache_days: u16,
    /// Domains whose names refer to sandbox ports.
    pub domains: Vec<String>,
    /// Host names that clients may use in addition, such as the name of a reverse proxy.
    pub allowed_hosts: Vec<String>,
    /// Public address of this API, which issues identity tokens of sandboxes under this name.
    /// `None` if the daemon issues none.
    pub identity_issuer: Option<IssuerUrl>,
    /// TLS of the API address.
    pub tls: TlsOptions,
    /// Limits of the host.
    pub limits: HostLimits,
    /// Default disk quota of keys.
    pub default_key_disk: DiskShare,
    /// Limits of VMMs.
    pub confinement: ConfinementOptions,
    /// CPU model of microVMs.
    pub cpu_level: CpuLevel,
    /// Shared snapshot store. `None` for snapshots on this host only.
    pub store: Option<StoreOptions>,
    /// Engine of new sandboxes. `None` for the most suitable engine of the host.
    pub engine: Option<EngineName>,
    /// Network of sandboxes.
    pub network: NetworkOptions,
    /// Certificate authorities and proxy of all sandboxes.
    pub site: SiteSettings,
    /// Retention of events.
    pub events: Retention,
    /// Retention of the audit log.
    pub audit: Retention,
    /// True if the audit log also contains commands and file paths of calls on guests.
    pub audit_commands: bool,
    /// Log on standard error.
    pub log: LogOptions,
}

/// Use of a feature that some hosts lack.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FeatureMode {
    /// Enabled if the host supports it.
    #[default]
    Auto,
    /// Required.
    On,
    /// Disabled.
    Off,
}

/// Options of the web console.
#[derive(Debug, Clone, Copy)]
pub struct ConsoleOptions {
    /// Address of the listener.
    pub address: SocketAddr,
    /// True if the console may listen on any address without TLS. The operator must publish the
    /// port on loopback addresses of the host only, for example by a container engine.
    pub published: bool,
    /// True if the daemon starts without the console when it cannot listen on the address.
    pub optional: bool,
}

/// TLS of a listener.
#[derive(Debug, Clone)]
pub enum TlsOptions {
    /// No TLS.
    Off,
    /// TLS with a generated certificate for the domains.
    Generated,
    /// TLS with a certificate chain and its private key in PEM files.
    Files {
        /// Certificate chain.
        certificate: PathBuf,
        /// Private key.
        key: PathBuf,
    },
}

/// Options of the shared snapshot store.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// URL of the store.
    pub url: StoreUrl,
    /// File with the master keys. `None` for the file in the data directory, which is created if it
    /// is missing.
    pub keys: Option<PathBuf>,
    /// Maximum size of the cache in MiB. `None` for a quarter of the file system of the data
    /// directory.
    pub cache_mib: Option<u64>,
    /// Maximum upload rate in MiB per second. `None` is unlimited.
    pub upload_mib_per_second: Option<u64>,
    /// Timeout of a guest that waits for memory from the store, and of a request to the store
    /// without progress.
    pub timeout: Duration,
    /// Interval between garbage collections of the store. `None` disables them on this host.
    pub gc_interval: Option<Duration>,
    /// True if other hosts of the store may resume paused sandboxes of this host.
    pub share_sandboxes: bool,
}

/// Share of the file system of the data directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskShare {
    /// A quarter of the file system.
    Quarter,
    /// Fixed limit in MiB.
    Mebibytes(u64),
    /// No limit.
    Unlimited,
}

impl DiskShare {
    /// Returns the share in MiB on the file system of `home`. `None` is unlimited.
    pub fn mebibytes(self, home: &Home) -> Option<u64> {
        match self {
            Self::Unlimited => None,
            Self::Mebibytes(mib) => Some(mib),
            // Unlimited if the size of the file system cannot be read.
            Self::Quarter => {
                let disk = KernelReader::new(home.path()).read().disk_total_mib?;
                Some(disk / KEY_DISK_DIVISOR)
            }
        }
    }
}

/// Limits of VMMs.
#[derive(Debug, Clone, Default)]
pub struct ConfinementOptions {
    /// Use of control groups to limit memory and tasks.
    pub cgroups: FeatureMode,
    /// Disk throughput limit of a sandbox in MB/s (10^6 bytes). 0 is unlimited.
    pub disk_mbps: u32,
    /// Disk request limit of a sandbox per second. 0 is unlimited.
    pub disk_iops: u32,
}

impl ConfinementOptions {
    /// Returns the disk limits of a sandbox.
    pub(crate) fn disk_limits(&self) -> DiskLimits {
        DiskLimits {
            // 0 becomes `None`, which means no limit.
            bytes_per_s: NonZeroU64::new(u64::from(self.disk_mbps) * 1_000_000),
            requests_per_s: NonZeroU64::new(self.disk_iops.into()),
        }
    }
}

/// Network of sandboxes.
#[derive(Debug, Clone, Default)]
pub struct NetworkOptions {
    /// Use of the network.
    pub mode: FeatureMode,
    /// Private addresses that sandboxes may access.
    pub allow_private: Vec<IpNet>,
    /// Address range between the host and its sandboxes. `None` for a free range.
    pub range: Option<Ipv4Net>,
    /// Maximum number of sandboxes with a network.
    pub slots: u32,
    /// Maximum number of concurrent connections of a sandbox.
    pub connections: u32,
    /// Number of connections of the host at which new connections of sandboxes are throttled.
    /// `None` for a value derived from the size of the kernel's table.
    pub connections_total: Option<u32>,
}

/// Log on standard error.
#[derive(Debug, Clone)]
pub struct LogOptions {
    /// Format of the log lines.
    pub format: LogFormat,
    /// File that standard error refers to, and that is rotated. `None` without rotation.
    pub file: Option<PathBuf>,
}

/// Format of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Human-readable lines.
    Text,
    /// One JSON object per line.
    Json,
}
