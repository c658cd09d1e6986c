//! Description of the measured host, for the report of a benchmark.

use jiffy_microvm_engine::host_kvm::{self, KvmKind};
use serde::Serialize;
use std::fs;
use std::process::Command;

/// Description of the host.
#[derive(Debug, Serialize)]
pub struct HostDescription {
    cpus: usize,
    cpu: String,
    memory_mib: u64,
    kernel: String,
    kvm: &'static str,
    /// Load average over one minute when the report was written.
    load: String,
}

impl HostDescription {
    /// Reads the description of this host.
    pub fn read() -> Self {
        let text_of = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let after = |text: &str, key: &str| {
            text.lines()
                .find_map(|l| l.strip_prefix(key))
                .map(|l| l.trim_start_matches([' ', '\t', ':']).trim().to_owned())
                .unwrap_or_default()
        };
        let memory = after(&text_of("/proc/meminfo"), "MemTotal");
        let kib: u64 = memory.trim_end_matches(" kB").parse().unwrap_or(0);
        Self {
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            cpu: after(&text_of("/proc/cpuinfo"), "model name"),
            memory_mib: kib / 1024,
            kernel: text_of("/proc/sys/kernel/osrelease").trim().to_owned(),
            kvm: match host_kvm::kind() {
                KvmKind::Hardware => "hardware",
                KvmKind::Software => "software (no VT-x)",
            },
            load: text_of("/proc/loadavg")
                .split(' ')
                .next()
                .unwrap_or_default()
                .to_owned(),
        }
    }
}

/// Returns the commit of the working tree, followed by `+` if the tree has changes. Returns
/// `unknown` outside a working tree.
pub fn commit() -> String {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok()?;
        output
            .status
            .success()
            .then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else {
        return "unknown".to_owned();
    };
    // Untracked files, such as results, do not change the measured programs.
    let clean =
        git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|s| s.is_empty());
    if clean { commit } else { format!("{commit}+") }
}
