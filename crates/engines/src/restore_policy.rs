//! Memory policy for restored sandboxes, and measured cost of the engines. `jiffy doctor --measure`
//! stores both in `<home>/host.json`, which is only used on the host that it describes.
//!
//! The *working set* of a snapshot consists of the memory pages that a restored guest uses first.

use jiffy_engine_api::now_ms;
use jiffy_microvm_engine::host_kvm::{self, KvmKind};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Version of the file format.
const FORMAT: u32 = 1;
const HOST_FILE: &str = "host.json";
const MAX_HOST_FILE_BYTES: u64 = 1 << 20;
/// Maximum memory that an idle sandbox should cost, in MiB (SPECIFICATION.md).
const MAX_IDLE_MIB: f64 = 12.0;
/// Maximum ratio of the time of a policy to the time of another policy that needs less memory.
/// Above this ratio, the saved time does not justify the memory. Applies to policies that need at
/// most [`MAX_IDLE_MIB`].
const MAX_TIME_RATIO: f64 = 0.9;
/// Same ratio for policies that need more than [`MAX_IDLE_MIB`]. Memory limits the number of
/// sandboxes on a host, so such a policy must at least halve the time.
const MAX_TIME_RATIO_ABOVE_IDLE: f64 = 0.5;

/// Source of a restored guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RestorePolicy {
    /// Pages are mapped from the snapshot and read when they are touched.
    Map,
    /// The working set is read before the guest starts; other pages are mapped.
    CopyWorkingSet,
    /// All memory is read before the guest starts.
    CopyAll,
}

impl RestorePolicy {
    /// All policies.
    pub const ALL: [Self; 3] = [Self::Map, Self::CopyWorkingSet, Self::CopyAll];

    /// Returns the policy for a host without measurements. Without VT-x, mapping was measured to be
    /// as fast as the other policies; with VT-x, page faults cost even less. Mapping shares the
    /// page cache between guests of the same snapshot.
    pub fn default_for(kvm: &KvmKind) -> Self {
        match kvm {
            // A new kind of KVM must be decided here, so the match has no wildcard.
            KvmKind::Hardware | KvmKind::Software => Self::Map,
        }
    }
}

impl fmt::Display for RestorePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Map => "map",
            Self::CopyWorkingSet => "working set",
            Self::CopyAll => "read all",
        })
    }
}

/// Properties of a host that determine the cost of a page fault. A measurement is valid only for
/// hosts with equal properties.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostFingerprint {
    /// Model name of the processor.
    pub cpu: String,
    /// `hardware` or `software`.
    pub kvm: String,
    /// Release of the kernel.
    pub kernel: String,
}

impl HostFingerprint {
    /// Returns the fingerprint of this host.
    pub fn here() -> Self {
        // An unreadable file yields an empty property, which is equal at the next start.
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = read("/proc/cpuinfo");
        let model = cpuinfo.lines().find_map(|l| l.strip_prefix("model name"));
        // The line is `model name`, tab, `: `, and the model.
        let model = model.map(|l| l.trim_start_matches([' ', '\t', ':']).trim());
        Self {
            cpu: model.unwrap_or_default().to_owned(),
            kvm: match host_kvm::kind() {
                KvmKind::Hardware => "hardware",
                KvmKind::Software => "software",
            }
            .to_owned(),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        }
    }

    fn kvm_kind(&self) -> KvmKind {
        match self.kvm.as_str() {
            "hardware" => KvmKind::Hardware,
            // A name of a later version: assume the slower kind.
            _ => KvmKind::Software,
        }
    }
}

/// Order statistics of one measured value.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Percentiles {
    /// Minimum.
    pub min: f64,
    /// Median.
    pub median: f64,
    /// 99th percentile.
    pub p99: f64,
}

impl Percentiles {
    /// Returns the percentiles of `samples` by nearest rank: each is one of the samples. `None` if
    /// there are no samples.
    pub fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        let at =
            |q: f64| sorted[((q * sorted.len() as f64).ceil() as usize).clamp(1, last + 1) - 1];
        Some(Self {
            min: sorted[0],
            median: at(0.5),
            p99: at(0.99),
        })
    }
}

/// Measured cost of one policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyCost {
    /// Policy that was measured.
    pub policy: RestorePolicy,
    /// Time from the create request until the agent answers, in milliseconds.
    pub create_ms: Percentiles,
    /// Time from the create request until `true` has exited, in milliseconds.
    pub create_exec_ms: Percentiles,
    /// Anonymous memory of the VMM after `true` has exited, in MiB. It is private to the sandbox.
    pub own_mib: Percentiles,
    /// Time of the guest's first access to a page stored in the snapshot, in microseconds.
    pub snapshot_page_us: Percentiles,
    /// Time of the guest's first access to a page that was never used, in microseconds.
    pub fresh_page_us: Percentiles,
}

/// Measured cost of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineCost {
    /// Time from the create request until the agent answers, in milliseconds.
    pub create_ms: Percentiles,
    /// Time from the create request until `true` has exited, in milliseconds.
    pub create_exec_ms: Percentiles,
}

/// Selects a policy. The policy with the least memory is selected, unless another one is so much
/// faster in the median of create and exec that its memory is justified. That policy must not be
/// slower at the 99th percentile.
pub fn choose(costs: &[PolicyCost]) -> Option<RestorePolicy> {
    let mut by_memory: Vec<&PolicyCost> = costs.iter().collect();
    // Sort in ascending order of memory, so that each further policy must justify its additional
    // memory.
    by_memory.sort_by(|a, b| a.own_mib.median.total_cmp(&b.own_mib.median));
    let mut best = *by_memory.first()?;
    for cost in by_memory {
        let (new, old) = (cost.create_exec_ms, best.create_exec_ms);
        let max_ratio = if cost.own_mib.median > MAX_IDLE_MIB {
            MAX_TIME_RATIO_ABOVE_IDLE
        } else {
            MAX_TIME_RATIO
        };
        if new.median < old.median * max_ratio && new.p99 <= old.p99 {
            best = cost;
        }
    }
    Some(best.policy)
}

/// Contents of `<home>/host.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostFile {
    format: u32,
    /// Host on which the costs were measured.
    pub host: HostFingerprint,
    /// Selected policy.
    pub policy: RestorePolicy,
    /// Time of the measurement, in milliseconds since 1970.
    pub measured_ms: u64,
    /// Costs by which the policy was selected.
    pub costs: Vec<PolicyCost>,
    /// Cost of gVisor in the same run. `None` if gVisor was not usable or not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gvisor: Option<EngineCost>,
}

/// Error of writing the file.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {source}", path.display())]
pub struct HostFileError {
    path: PathBuf,
    source: io::Error,
}

impl HostFile {
    /// Returns the measurement on `host`. `None` if no policy was measured.
    pub fn new(
        host: HostFingerprint,
        costs: Vec<PolicyCost>,
        gvisor: Option<EngineCost>,
    ) -> Option<Self> {
        Some(Self {
            format: FORMAT,
            host,
            policy: choose(&costs)?,
            measured_ms: now_ms(),
            costs,
            gvisor,
        })
    }

    /// Returns the measurement stored in the data directory `home`. `None` if the file cannot be
    /// used or was written on a host other than `host`.
    pub fn of_host(home: &Path, host: &HostFingerprint) -> Option<Self> {
        // An unusable file counts as no measurement. `PolicyInForce` reports the reason.
        let file = load(&home.join(HOST_FILE)).ok().flatten();
        file.filter(|file| file.host == *host)
    }

    /// Returns the cost of microVM restores under the selected policy.
    pub fn microvm(&self) -> Option<&PolicyCost> {
        self.costs.iter().find(|cost| cost.policy == self.policy)
    }

    /// Returns the median times of create and exec with microVMs and with gVisor, in milliseconds.
    /// `None` unless both were measured.
    pub fn engines_ms(&self) -> Option<(f64, f64)> {
        let (microvm, gvisor) = (self.microvm()?, self.gvisor?);
        Some((microvm.create_exec_ms.median, gvisor.create_exec_ms.median))
    }

    /// Writes the file into the data directory atomically.
    pub fn write(&self, home: &Path) -> Result<(), HostFileError> {
        let path = home.join(HOST_FILE);
        // The process id separates concurrent measurements.
        let new = home.join(format!(".new-{HOST_FILE}-{}", std::process::id()));
        let put = || {
            let mut file = File::options()
                .write(true)
                .create(true)
                // An interrupted measurement with the same process id may have left a file.
                .truncate(true)
                .mode(0o600)
                .open(&new)?;
            file.write_all(&serde_json::to_vec_pretty(self)?)?;
            // Sync before the rename, so that a power failure leaves no empty file under the final
            // name.
            file.sync_all()?;
            fs::rename(&new, &path)
        };
        put().map_err(|source| {
            // Ignore the error: the write error is the one to report.
            let _ = fs::remove_file(&new);
            HostFileError { path, source }
        })
    }
}

/// Policy in force and the reason.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyInForce {
    /// Policy.
    pub policy: RestorePolicy,
    /// Reason.
    pub why: PolicyReason,
}

/// Reason for the policy in force.
#[derive(Debug, Clone, PartialEq)]
pub enum PolicyReason {
    /// Selected by a measurement on this host.
    Measured(Box<HostFile>),
    /// The default, because no policy was measured.
    NeverMeasured,
    /// The default, because the file was measured on another host.
    OtherHost {
        /// Fingerprint in the file.
        there: HostFingerprint,
    },
    /// The default, because the file cannot be used.
    Unusable {
        /// Cause.
        reason: String,
    },
}

impl fmt::Display for PolicyReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Measured(file) => {
                let median = file.microvm().map_or(f64::NAN, |c| c.create_exec_ms.median);
                write!(
                    f,
                    "measured on this host, create and exec {median:.1} ms in the median"
                )
            }
            Self::NeverMeasured => f.write_str("the default; this host was not measured"),
            Self::OtherHost { there } => write!(
                f,
                "the default; {HOST_FILE} was measured on another host ({}, KVM in {}, Linux {})",
                there.cpu, there.kvm, there.kernel
            ),
            Self::Unusable { reason } => {
                write!(f, "the default; {HOST_FILE} cannot be used: {reason}")
            }
        }
    }
}

impl PolicyInForce {
    /// Returns the policy for the data directory `home` on `host`.
    pub fn find(home: &Path, host: &HostFingerprint) -> Self {
        let default = |why| Self {
            policy: RestorePolicy::default_for(&host.kvm_kind()),
            why,
        };
        match load(&home.join(HOST_FILE)) {
            Ok(None) => default(PolicyReason::NeverMeasured),
            Ok(Some(file)) if file.host == *host => Self {
                policy: file.policy,
                why: PolicyReason::Measured(Box::new(file)),
            },
            Ok(Some(file)) => default(PolicyReason::OtherHost { there: file.host }),
            Err(reason) => default(PolicyReason::Unusable { reason }),
        }
    }
}

/// Reads the file. `None` if it does not exist.
fn load(path: &Path) -> Result<Option<HostFile>, String> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e.to_string()),
    };
    let mut bytes = Vec::new();
    // A larger file is cut off, and is then no valid JSON.
    let read = file.take(MAX_HOST_FILE_BYTES).read_to_end(&mut bytes);
    read.map_err(|e| e.to_string())?;
    let file: HostFile = serde_json::from_slice(&bytes).map_err(|e| e.to_string())?;
    if file.format == FORMAT {
        Ok(Some(file))
    } else {
        Err(format!(
            "its format is {}, but this version of jiffy reads format {FORMAT}",
            file.format
        ))
    }
}

#[cfg(test)]
mod tests;
