//! Settings of the guest's kernel that differ from its defaults.

use crate::modprobe;
use std::fs;

/// Files beneath `/proc/sys` and their values. The limits of inotify are those of a workstation:
/// editors and builds watch whole trees, and memory is the limit of a sandbox.
const SETTINGS: [(&str, &str); 3] = [
    ("kernel/modprobe", modprobe::PATH),
    ("fs/inotify/max_user_watches", "524288"),
    ("fs/inotify/max_user_instances", "1024"),
];

/// Periodic work of an idle kernel, each run of which is a wake-up of a virtual processor: no
/// compaction of memory ahead of demand (twice a second otherwise), counters of memory and
/// neighbours looked after once a minute (every second and every 5).
const QUIET_SETTINGS: [(&str, &str); 4] = [
    ("vm/compaction_proactiveness", "0"),
    ("vm/stat_interval", "60"),
    ("net/ipv4/neigh/default/interval_probe_time_ms", "60000"),
    ("net/ipv6/neigh/default/interval_probe_time_ms", "60000"),
];

/// Applies them. A kernel that lacks one is fine.
pub fn apply() {
    for (name, value) in SETTINGS.iter().chain(&QUIET_SETTINGS) {
        let _ = fs::write(format!("/proc/sys/{name}"), value);
    }
}
