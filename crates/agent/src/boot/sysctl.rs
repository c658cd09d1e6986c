//! AgentSettings of the guest's kernel that differ from its defaults.

use crate::modprobe;
use std::fs;

/// Files beneath `/proc/sys` and their values. The limits of inotify are those of a workstation:
/// editors and builds watch whole trees, and memory is the limit of a sandbox.
const SETTINGS: [(&str, &str); 3] = [
    ("kernel/modprobe", modprobe::PATH),
    ("fs/inotify/max_user_watches", "524288"),
    ("fs/inotify/max_user_instances", "1024"),
];

/// Applies them. A kernel that lacks one is fine.
pub fn apply() {
    for (name, value) in SETTINGS {
        let _ = fs::write(format!("/proc/sys/{name}"), value);
    }
}
