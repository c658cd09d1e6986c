//! By what a process is told from all others.

use serde::{Deserialize, Serialize};
use std::fs;
use std::io;

/// One process of one run of one host: never another, even if its number is used again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessInstance {
    /// The kernel's random word for this run of the host.
    pub boot: String,
    /// Process id.
    pub pid: u32,
    /// When it started, in the kernel's ticks since the host did.
    pub started: u64,
}

impl ProcessInstance {
    /// The mark of a process that lives.
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

/// Field 22 of `/proc/PID/stat` (proc_pid_stat(5)); the name in field 2 may hold anything. None of a process that has ended and
/// that nobody has waited for.
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
    fn a_process_is_told_from_a_later_one_of_the_same_number() {
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
