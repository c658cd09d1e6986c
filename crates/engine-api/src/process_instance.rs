//! Identification of a process across reuse of its id.

use serde::{Deserialize, Serialize};
use std::fs;
use std::io;

/// One process of one boot of one host, even if its process id is reused.
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
    /// Identifies a live process.
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

/// Field 22 of `/proc/PID/stat` (proc_pid_stat(5)); the name in field 2 may hold anything. None for
/// a zombie.
fn started(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    let started = fields.nth(18)?.parse().ok()?;
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
