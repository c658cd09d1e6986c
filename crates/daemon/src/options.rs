//! Options of a daemon.

use jiffy_engine_api::EngineName;
use jiffy_image::Home;
use jiffy_network::{IpNet, Ipv4Net};
use jiffy_proto::agent::SiteSettings;
use jiffy_proto::cpu_level::CpuLevel;
use jiffy_proto::function::SlotReset;
use jiffy_proto::vm::DiskLimits;
use jiffy_registry_pull::RegistryAddress;
use jiffy_sandbox_manager::{HostLimits, HostReader, KernelReader};
use jiffy_store::StoreUrl;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

/// One key may fill this part of the data directory's file system: one in so many.
const KEY_DISK_DIVISOR: u64 = 4;

/// Options of a daemon.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// Restored sandboxes kept ready per template and size.
    pub warm_pool: usize,
    /// VMM processes kept ready for the next guests.
    pub spare_vmms: usize,
    /// Address of the API and of sandboxes' ports; none: the socket only.
    pub listen: Option<SocketAddr>,
    /// Address of public functions whose processes serve its connections; none: the gateway only.
    pub functions_listen: Option<SocketAddr>,
    /// Reset of the memory in which functions run.
    pub functions_reset: SlotReset,
    /// Address of `/metrics` without a key.
    pub metrics_listen: Option<SocketAddr>,
    /// URL of the OpenTelemetry collector that receives traces. `None`: no traces.
    pub otlp: Option<String>,
    /// Registries that are asked without TLS.
    pub plain_http: Vec<String>,
    /// Registries of the host's own network that images may come from.
    pub registry_allow: Vec<RegistryAddress>,
    /// Template builds at once.
    pub max_builds: usize,
    /// Days that unused build steps and uploads are kept; 0: for ever.
    pub build_cache_days: u16,
    /// Domains whose names lead to ports of sandboxes.
    pub domains: Vec<String>,
    /// Further host names under which clients may come.
    pub allowed_hosts: Vec<String>,
    /// TLS at the address of the API.
    pub tls: TlsOptions,
    /// Limits of the host.
    pub limits: HostLimits,
    /// Disk budget of keys that were given none.
    pub default_key_disk: DiskShare,
    /// Limits of VMMs.
    pub confinement: ConfinementOptions,
    /// Processor that guests of microVMs see.
    pub cpu_level: CpuLevel,
    /// Store that hosts share snapshots in; none: they stay on this host.
    pub store: Option<StoreOptions>,
    /// Engine of new sandboxes; none: the one that suits the host.
    pub engine: Option<EngineName>,
    /// Network of sandboxes.
    pub network: NetworkOptions,
    /// Certificate authorities and proxy of all sandboxes.
    pub site: SiteSettings,
    /// Log on standard error.
    pub log: LogOptions,
}

/// Use of a feature that not every host has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FeatureMode {
    /// Used where this host can.
    #[default]
    Auto,
    /// Required.
    On,
    /// Not used.
    Off,
}

/// TLS of a listener.
#[derive(Debug, Clone)]
pub enum TlsOptions {
    /// None.
    Off,
    /// With a certificate made for the domains.
    Generated,
    /// With a certificate chain and its private key in PEM files.
    Files {
        /// Certificate chain.
        certificate: PathBuf,
        /// Private key.
        key: PathBuf,
    },
}

/// Store that hosts share snapshots in.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Address.
    pub url: StoreUrl,
    /// File of master keys; none: the one in the data directory, which is made if it is missing.
    pub keys: Option<PathBuf>,
    /// MiB on disk of what was fetched from it; none: a quarter of the data directory's file
    /// system.
    pub cache_mib: Option<u64>,
    /// MiB per second that are sent to it; none: no limit.
    pub upload_mib_per_second: Option<u64>,
    /// Time for which a guest waits for memory from the store, and for which a request to the store
    /// may bring nothing.
    pub timeout: Duration,
    /// Time between two collections of it; none: this host collects nothing.
    pub gc_interval: Option<Duration>,
}

/// Share of the data directory's file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskShare {
    /// A quarter of it.
    Quarter,
    /// This many MiB.
    Mebibytes(u64),
    /// All of it.
    Unlimited,
}

impl DiskShare {
    /// Size in MiB on the file system of `home`; none: no limit.
    pub fn mebibytes(self, home: &Home) -> Option<u64> {
        match self {
            Self::Unlimited => None,
            Self::Mebibytes(mib) => Some(mib),
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
    /// Limits of memory and tasks by control groups.
    pub cgroups: FeatureMode,
    /// MB (10^6 bytes) per second of a sandbox's disks; 0: no limit.
    pub disk_mbps: u32,
    /// Requests per second of a sandbox's disks; 0: no limit.
    pub disk_iops: u32,
}

impl ConfinementOptions {
    /// Returns the disk limits of a sandbox.
    pub(crate) fn disk_limits(&self) -> DiskLimits {
        DiskLimits {
            bytes_per_s: NonZeroU64::new(u64::from(self.disk_mbps) * 1_000_000),
            requests_per_s: NonZeroU64::new(self.disk_iops.into()),
        }
    }
}

/// Network of sandboxes.
#[derive(Debug, Clone, Default)]
pub struct NetworkOptions {
    /// Use of a network.
    pub mode: FeatureMode,
    /// Private addresses that sandboxes may reach.
    pub allow_private: Vec<IpNet>,
    /// Addresses between the host and its sandboxes; none: a free range.
    pub range: Option<Ipv4Net>,
    /// Sandboxes with a network at once.
    pub slots: u32,
    /// Connections of one sandbox at once.
    pub connections: u32,
    /// Connections of the host at which sandboxes hardly get new ones; none: as the kernel's table
    /// allows.
    pub connections_total: Option<u32>,
}

/// Log on standard error.
#[derive(Debug, Clone)]
pub struct LogOptions {
    /// Format of its lines.
    pub format: LogFormat,
    /// File that standard error is, which is rotated.
    pub file: Option<PathBuf>,
}

/// Format of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object per line.
    Json,
}
