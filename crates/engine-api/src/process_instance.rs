//! [`ProcessInstance`]: identifies a process by its id and start time. The id alone is not
//! sufficient, since the kernel reuses ids.

use serde::{Deserialize, Serialize};
use std::fs;
use std::io;

/// Identity of a process. It is unique across reuse of process ids and across boots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessInstance {
    /// Boot id of the kernel.
    pub boot: String,
    /// Process id.
    pub pid: u32,
    /// Start time in clock ticks since boot.
    pub started: u64,
}

impl ProcessInstance {
    /// Returns the identity of the live process `pid`.
    pub fn of(pid: u32) -> io::Result<Self> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        Ok(Self {
            boot: boot.trim().to_owned(),
            pid,
            started: started(&stat).ok_or(io::ErrorKind::NotFound)?,
        })
    }
}

/// Parses the start time, field 22 of `/proc/PID/stat` (proc_pid_stat(5)). The process name in
/// field 2 may contain any characters. `None` for a zombie.
fn started(stat: &str) -> Option<u64> {
    // The name may contain `)`, so the last `)` ends it.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    // The state is field 3, so field 22 is the 19th of the remaining fields.
    let started = fields.nth(18)?.parse().ok()?;
    // A zombie has ended already, although its id is still in use.
    (!matches!(state, "Z" | "X")).then_some(started)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_distinguished_from_a_later_one_of_the_same_id() {
        let here = ProcessInstance::of(std::process::id()).unwrap();
        assert_eq!(ProcessInstance::of(std::process::id()).unwrap(), here);
        assert_ne!(ProcessInstance::of(1).unwrap().started, here.started);
        assert_eq!(
            started("1 (a) b) c) S 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 99 23"),
            Some(99)
        );
        assert_eq!(
            started("1 (a) Z 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 99 23"),
            None
        );
    }
}
