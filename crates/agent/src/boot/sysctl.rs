//! Settings of the guest's kernel that differ from its defaults.

use crate::modprobe;
use std::fs;

/// Files below `/proc/sys` and their values. The limits of inotify equal the limits of a
/// workstation: editors and builds watch whole directory trees, and the memory of the sandbox is
/// the actual limit.
const SETTINGS: [(&str, &str); 3] = [
    ("kernel/modprobe", modprobe::PATH),
    ("fs/inotify/max_user_watches", "524288"),
    ("fs/inotify/max_user_instances", "1024"),
];

/// Settings that reduce the periodic work of an idle kernel, since each run wakes up a virtual CPU.
/// The kernel does not compact memory in advance (default: twice a second). It updates memory
/// counters and neighbour entries once a minute (defaults: every second and every 5 s).
const QUIET_SETTINGS: [(&str, &str); 4] = [
    ("vm/compaction_proactiveness", "0"),
    ("vm/stat_interval", "60"),
    ("net/ipv4/neigh/default/interval_probe_time_ms", "60000"),
    ("net/ipv6/neigh/default/interval_probe_time_ms", "60000"),
];

/// Applies the settings. A kernel without one of them is supported.
pub fn apply() {
    for (name, value) in SETTINGS.iter().chain(&QUIET_SETTINGS) {
        let _ = fs::write(format!("/proc/sys/{name}"), value);
    }
}
