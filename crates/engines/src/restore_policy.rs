//! Memory policy for restored sandboxes of this host, and the cost of the engines: measured by
//! `jiffy doctor --measure`, kept in `<home>/host.json` with the host it was measured on, and
//! believed only there.

use jiffy_engine_api::now_ms;
use jiffy_microvm_engine::host_kvm::{self, KvmKind};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Version of the file.
const FORMAT: u32 = 1;
const HOST_FILE: &str = "host.json";
const MAX_HOST_FILE_BYTES: u64 = 1 << 20;
/// Most that an idle sandbox should cost, in MiB (SPECIFICATION.md).
const MAX_IDLE_MIB: f64 = 12.0;
/// A policy that takes more memory, but not more than that, is worth it if it takes at most this
/// part of the time.
const MIN_GAIN: f64 = 0.9;
/// One that takes more than that must at least halve the time: memory bounds how many sandboxes a
/// host holds.
const MIN_GAIN_ABOVE_IDLE: f64 = 0.5;

/// Source of a restored guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RestorePolicy {
    /// Mapped from the snapshot, page by page.
    Map,
    /// Pages that a guest touches when it wakes up are read at once, the rest mapped.
    CopyWorkingSet,
    /// Everything is read at once.
    CopyAll,
}

impl RestorePolicy {
    /// All there are.
    pub const ALL: [Self; 3] = [Self::Map, Self::CopyWorkingSet, Self::CopyAll];

    /// Returns the policy used where nothing was measured. Without VT-x mapping was measured to be
    /// as fast as the others, and with it faults cost less; it shares the page cache between
    /// siblings.
    pub fn default_for(kvm: &KvmKind) -> Self {
        match kvm {
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

/// Facts that the cost of a page fault depends on. A policy measured under another one says
/// nothing.
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
    /// Of this host.
    pub fn here() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = read("/proc/cpuinfo");
        let model = cpuinfo.lines().find_map(|l| l.strip_prefix("model name"));
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
            _ => KvmKind::Software,
        }
    }
}

/// Order statistics of one figure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Percentiles {
    /// Smallest.
    pub min: f64,
    /// Median.
    pub median: f64,
    /// 99th percentile.
    pub p99: f64,
}

impl Percentiles {
    /// Of samples; none of no samples. Always samples that were taken (nearest rank).
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
    /// From asking for the sandbox to its agent's word, in milliseconds.
    pub create_ms: Percentiles,
    /// And on to the exit code of `true`.
    pub create_exec_ms: Percentiles,
    /// Memory that is the sandbox's alone after that, in MiB.
    pub own_mib: Percentiles,
    /// First touch of a page that lies in the snapshot, in the guest, in microseconds.
    pub snapshot_page_us: Percentiles,
    /// First touch of a page that nobody has used yet.
    pub fresh_page_us: Percentiles,
}

/// Measured cost of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineCost {
    /// From asking for the sandbox to its agent's word, in milliseconds.
    pub create_ms: Percentiles,
    /// And on to the exit code of `true`.
    pub create_exec_ms: Percentiles,
}

/// The policy to use: the one that takes the least memory, unless another one is so much faster in
/// the median of create and exec that its memory is worth it, and not slower at the 99th
/// percentile.
pub fn choose(costs: &[PolicyCost]) -> Option<RestorePolicy> {
    let mut by_memory: Vec<&PolicyCost> = costs.iter().collect();
    by_memory.sort_by(|a, b| a.own_mib.median.total_cmp(&b.own_mib.median));
    let mut best = *by_memory.first()?;
    for cost in by_memory {
        let (new, old) = (cost.create_exec_ms, best.create_exec_ms);
        let worth = match cost.own_mib.median > MAX_IDLE_MIB {
            true => MIN_GAIN_ABOVE_IDLE,
            false => MIN_GAIN,
        };
        if new.median < old.median * worth && new.p99 <= old.p99 {
            best = cost;
        }
    }
    Some(best.policy)
}

/// `<home>/host.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostFile {
    format: u32,
    /// Host that it was measured on.
    pub host: HostFingerprint,
    /// Policy that was chosen.
    pub policy: RestorePolicy,
    /// Milliseconds since 1970.
    pub measured_ms: u64,
    /// Costs that it was chosen by.
    pub costs: Vec<PolicyCost>,
    /// Cost of gVisor in the same run; none: it could not be used, or was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gvisor: Option<EngineCost>,
}

/// The choice could not be kept.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {source}", path.display())]
pub struct KeepError {
    path: PathBuf,
    source: io::Error,
}

impl HostFile {
    /// Returns the measurement on `host`; none if no policy was measured.
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

    /// Returns the measurement kept in the data directory `home`, if it was measured on `host` and
    /// can be used.
    pub fn of_host(home: &Path, host: &HostFingerprint) -> Option<Self> {
        let file = load(&home.join(HOST_FILE)).ok().flatten();
        file.filter(|file| file.host == *host)
    }

    /// Returns the cost of restores of microVMs under the policy that was chosen.
    pub fn microvm(&self) -> Option<&PolicyCost> {
        self.costs.iter().find(|cost| cost.policy == self.policy)
    }

    /// Medians of create and exec with microVMs and with gVisor, in milliseconds, if both were
    /// measured.
    pub fn engines_ms(&self) -> Option<(f64, f64)> {
        let (microvm, gvisor) = (self.microvm()?, self.gvisor?);
        Some((microvm.create_exec_ms.median, gvisor.create_exec_ms.median))
    }

    /// Writes it into the data directory, in one step.
    pub fn keep(&self, home: &Path) -> Result<(), KeepError> {
        let path = home.join(HOST_FILE);
        let new = home.join(format!(".new-{HOST_FILE}-{}", std::process::id()));
        let put = || {
            let mut file = File::options()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&new)?;
            file.write_all(&serde_json::to_vec_pretty(self)?)?;
            file.sync_all()?;
            fs::rename(&new, &path)
        };
        put().map_err(|source| {
            let _ = fs::remove_file(&new);
            KeepError { path, source }
        })
    }
}

/// The policy in force and why it is.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyInForce {
    /// The policy.
    pub policy: RestorePolicy,
    /// Why.
    pub why: PolicyReason,
}

/// Why a policy is in force.
#[derive(Debug, Clone, PartialEq)]
pub enum PolicyReason {
    /// Measured on this host.
    Measured(Box<HostFile>),
    /// The default: nothing was measured.
    NeverMeasured,
    /// The default: what was measured was another host.
    OtherHost {
        /// Fingerprint in the file.
        there: HostFingerprint,
    },
    /// The default: the file cannot be used.
    Unusable {
        /// Why not.
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
            Self::NeverMeasured => f.write_str("the default; nothing was measured on this host"),
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
    /// Returns what holds for the data directory `home` on `host`.
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

fn load(path: &Path) -> Result<Option<HostFile>, String> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e.to_string()),
    };
    let mut bytes = Vec::new();
    let read = file.take(MAX_HOST_FILE_BYTES).read_to_end(&mut bytes);
    read.map_err(|e| e.to_string())?;
    let file: HostFile = serde_json::from_slice(&bytes).map_err(|e| e.to_string())?;
    if file.format == FORMAT {
        Ok(Some(file))
    } else {
        Err(format!(
            "it has format {} and this jiffy reads format {FORMAT}",
            file.format
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(policy: RestorePolicy, median: f64, p99: f64, own: f64) -> PolicyCost {
        let flat = |value| Percentiles {
            min: value,
            median: value,
            p99: value,
        };
        PolicyCost {
            policy,
            create_ms: flat(median),
            create_exec_ms: Percentiles {
                p99,
                ..flat(median)
            },
            own_mib: flat(own),
            snapshot_page_us: flat(1.0),
            fresh_page_us: flat(1.0),
        }
    }

    fn here() -> HostFingerprint {
        HostFingerprint {
            cpu: "A processor".to_owned(),
            kvm: "software".to_owned(),
            kernel: "6.1".to_owned(),
        }
    }

    #[test]
    fn memory_is_copied_only_where_that_saves_time() {
        use RestorePolicy::{CopyAll, CopyWorkingSet, Map};
        let map = cost(Map, 20.0, 30.0, 4.0);
        let chosen = |all: f64, all_p99: f64, set: f64| {
            choose(&[
                cost(CopyAll, all, all_p99, 40.0),
                map.clone(),
                cost(CopyWorkingSet, set, 30.0, 11.0),
            ])
        };
        assert_eq!(chosen(20.0, 30.0, 20.0), Some(Map));
        // A little faster is not worth ten times the memory, and much faster is not worth it if it
        // is slow at times.
        assert_eq!(chosen(12.0, 20.0, 19.0), Some(Map));
        assert_eq!(chosen(9.0, 90.0, 20.0), Some(Map));
        assert_eq!(chosen(9.0, 20.0, 20.0), Some(CopyAll));
        assert_eq!(chosen(12.0, 20.0, 17.0), Some(CopyWorkingSet));
        assert_eq!(chosen(9.0, 20.0, 17.0), Some(CopyWorkingSet));
        assert_eq!(choose(&[]), None);
    }

    #[test]
    fn measurements_apply_to_the_measured_host_only() {
        let home = tempfile::tempdir().unwrap();
        let find = |host: &HostFingerprint| PolicyInForce::find(home.path(), host);
        assert_eq!(find(&here()).why, PolicyReason::NeverMeasured);
        let costs = vec![cost(RestorePolicy::CopyAll, 9.0, 9.0, 9.0)];
        let file = HostFile::new(here(), costs, None).unwrap();
        file.keep(home.path()).unwrap();
        file.keep(home.path()).unwrap();
        let found = find(&here());
        assert_eq!(found.policy, RestorePolicy::CopyAll);
        assert_eq!(found.why, PolicyReason::Measured(Box::new(file)));
        let others = [
            HostFingerprint {
                cpu: "Another".to_owned(),
                ..here()
            },
            HostFingerprint {
                kvm: "hardware".to_owned(),
                ..here()
            },
            HostFingerprint {
                kernel: "6.2".to_owned(),
                ..here()
            },
        ];
        for other in others {
            let found = find(&other);
            assert_eq!(found.policy, RestorePolicy::Map, "{other:?}");
            assert_eq!(found.why, PolicyReason::OtherHost { there: here() });
        }
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 1);
    }

    #[test]
    fn engines_are_compared_by_measurements_of_both_on_this_host() {
        let home = tempfile::tempdir().unwrap();
        let costs = vec![
            cost(RestorePolicy::Map, 20.0, 20.0, 4.0),
            cost(RestorePolicy::CopyAll, 15.0, 20.0, 40.0),
        ];
        let flat = |value| Percentiles {
            min: value,
            median: value,
            p99: value,
        };
        let gvisor = EngineCost {
            create_ms: flat(30.0),
            create_exec_ms: flat(35.0),
        };
        let kept = |gvisor| {
            let file = HostFile::new(here(), costs.clone(), gvisor).unwrap();
            file.keep(home.path()).unwrap();
            HostFile::of_host(home.path(), &here()).unwrap()
        };
        // That of the policy in force.
        assert_eq!(kept(Some(gvisor)).engines_ms(), Some((20.0, 35.0)));
        let elsewhere = HostFingerprint {
            kernel: "6.2".to_owned(),
            ..here()
        };
        assert_eq!(HostFile::of_host(home.path(), &elsewhere), None);
        // As files were written before there was a second engine.
        assert_eq!(kept(None).engines_ms(), None);
        let text = fs::read_to_string(home.path().join(HOST_FILE)).unwrap();
        assert!(!text.contains("gvisor"), "{text}");
    }

    #[test]
    fn a_damaged_file_or_one_of_another_format_is_ignored() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join(HOST_FILE);
        let costs = vec![cost(RestorePolicy::CopyAll, 9.0, 9.0, 9.0)];
        HostFile::new(here(), costs, None)
            .unwrap()
            .keep(home.path())
            .unwrap();
        let text = fs::read_to_string(&path).unwrap();
        for damaged in [
            text.replace("\"format\": 1", "\"format\": 2"),
            text.replace("copy_all", "teleport"),
            text[..text.len() / 2].to_owned(),
            String::new(),
        ] {
            fs::write(&path, damaged).unwrap();
            let found = PolicyInForce::find(home.path(), &here());
            assert_eq!(found.policy, RestorePolicy::Map);
            assert!(
                matches!(found.why, PolicyReason::Unusable { .. }),
                "{found:?}"
            );
        }
    }
}
