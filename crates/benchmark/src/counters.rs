//! Costs of an operation other than time: KVM exits and page faults of its VMM process.

use crate::Series;
use jiffy_microvm_engine::MicroVm;
use parking_lot::{Mutex, MutexGuard};
use std::fs;

/// Counters of a VMM process since its start, or between two points in time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Counters {
    pid: u32,
    /// Number of KVM exits of the guest, for any reason.
    exits: Option<f64>,
    /// Number of page faults without disk access.
    minor: f64,
    /// Number of page faults with disk access.
    major: f64,
}

impl Counters {
    /// Returns the difference to `before`. If the VMM was replaced in between, returns all counts
    /// of the new process.
    pub fn since(self, before: Self) -> Self {
        // A rollback or resume may start a new VMM, whose counters start at zero.
        if self.pid != before.pid {
            return self;
        }
        Self {
            pid: self.pid,
            exits: self.exits.zip(before.exits).map(|(now, then)| now - then),
            minor: self.minor - before.minor,
            major: self.major - before.major,
        }
    }

    /// Returns the number of KVM exits of the guest. `None` if the host's kernel does not count
    /// them.
    pub fn exits(self) -> Option<f64> {
        self.exits
    }
}

/// Collects counters by kind of operation.
#[derive(Default)]
pub struct Meter {
    /// Counters by operation. A list preserves the order of the operations in the report.
    rows: Mutex<Vec<(String, Vec<Counters>)>>,
}

impl Counters {
    /// Reads the counters of process `pid` since its start. `exits` is the number of KVM exits of
    /// its guest.
    pub fn of(pid: u32, exits: Option<u64>) -> anyhow::Result<Self> {
        let (minor, major) = faults(pid)?;
        Ok(Self {
            pid,
            exits: exits.map(|n| n as f64),
            minor,
            major,
        })
    }

    /// Reads the counters of a guest of this process.
    pub async fn of_vm(vm: &MicroVm) -> anyhow::Result<Self> {
        Self::of(vm.vmm_pid(), vm.stats().await?.exits)
    }
}

impl Meter {
    /// Creates an empty collection.
    pub fn new() -> Self {
        Self::default()
    }

    fn rows(&self) -> MutexGuard<'_, Vec<(String, Vec<Counters>)>> {
        self.rows.lock()
    }

    /// Adds the cost of one `operation`.
    pub fn add(&self, operation: &str, counters: Counters) {
        let mut rows = self.rows();
        match rows.iter_mut().find(|(name, _)| name == operation) {
            Some((_, list)) => list.push(counters),
            None => rows.push((operation.to_owned(), vec![counters])),
        }
    }

    /// Returns all collected counters.
    pub fn series(&self) -> Vec<Series> {
        let rows = self.rows();
        rows.iter()
            .flat_map(|(operation, list)| {
                let exits: Vec<f64> = list.iter().filter_map(|c| c.exits).collect();
                let all = [
                    ("KVM exits", exits),
                    ("page faults", list.iter().map(|c| c.minor).collect()),
                    ("of disk", list.iter().map(|c| c.major).collect()),
                ];
                all.into_iter()
                    .filter(|(_, samples)| !samples.is_empty())
                    .map(move |(what, samples)| {
                        Series::new(format!("{operation}: {what}"), "count", None, samples)
                    })
            })
            .collect()
    }

    /// Returns the counters that are not available on this host, with the reason.
    pub fn not_available(&self) -> Vec<String> {
        let rows = self.rows();
        let uncounted = rows
            .iter()
            .filter(|(_, list)| list.iter().any(|c| c.exits.is_none()));
        uncounted
            .map(|(operation, _)| {
                format!(
                    "{operation}: KVM exits: not available: this kernel's KVM gives no statistics \
                     (KVM_GET_STATS_FD, Linux 5.14)"
                )
            })
            .collect()
    }
}

/// Returns the minor and major faults of a process and of its exited children, which include
/// snapshot writers, from `/proc/PID/stat`.
fn faults(pid: u32) -> anyhow::Result<(f64, f64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse(&stat).ok_or_else(|| anyhow::anyhow!("cannot parse /proc/{pid}/stat: {stat:?}"))
}

/// Returns the numbers of minor and major page faults, including the faults of exited children.
fn parse(stat: &str) -> Option<(f64, f64)> {
    // The name in parentheses may contain any character. The fields after it are: state, ppid,
    // pgrp, session, tty, tpgid, flags, minflt, cminflt, majflt, cmajflt.
    let rest = stat.rsplit_once(')')?.1;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let field = |at: usize| fields.get(at)?.parse::<f64>().ok();
    Some((field(7)? + field(8)?, field(9)? + field(10)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_found_behind_any_name() {
        let stat = "42 (a) b (c) S 1 42 42 0 -1 4194560 1000 20 3 4 5 6 7 8 20 0 1 0 5";
        assert_eq!(parse(stat), Some((1020.0, 7.0)));
        assert_eq!(parse("42 (a"), None);
        assert_eq!(parse("42 (a) S 1"), None);
    }

    #[test]
    fn costs_are_listed_with_unavailable_counters() {
        let own = |exits| Counters::of(std::process::id(), exits).unwrap();
        let before = own(Some(5));
        let touched: Vec<u8> = std::hint::black_box(vec![1; 64 << 20]);
        let cost = own(Some(12)).since(before);
        assert_eq!(cost.exits, Some(7.0));
        // 64 MiB are 32 huge pages of 2 MiB, and even more small pages.
        assert!(cost.minor > 16.0, "{cost:?}");
        assert_eq!(touched.len(), 64 << 20);
        let meter = Meter::new();
        meter.add("touch", cost);
        let names =
            |meter: &Meter| -> Vec<String> { meter.series().into_iter().map(|s| s.name).collect() };
        assert_eq!(
            names(&meter),
            ["touch: KVM exits", "touch: page faults", "touch: of disk"]
        );
        assert!(meter.not_available().is_empty());
        meter.add("uncounted", own(None));
        assert!(!names(&meter).contains(&"uncounted: KVM exits".to_owned()));
        assert_eq!(meter.not_available().len(), 1);
    }
}
