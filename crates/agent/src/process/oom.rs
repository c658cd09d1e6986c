//! Detects out-of-memory kills. A process that received SIGKILL was killed either by a client, or
//! by the guest's kernel because of a lack of memory.

use super::oom_log::{MAX_RECORD_BYTES, OomVictim, open_kernel_log};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

/// Maximum number of bytes that are read of the kernel's counters.
const MAX_COUNTER_BYTES: usize = 64 * 1024;

/// Maximum number of victims that are remembered.
const MAX_VICTIMS: usize = 64;

/// Watch on the kernel's counter of out-of-memory kills.
#[derive(Debug)]
pub struct OomWatch {
    /// The kernel's counters. The file is opened at the start, so that no later mount can hide it.
    counters: Option<File>,
    /// Value of the counter at the last call of [`Self::happened`].
    seen: Cell<u64>,
}

impl OomWatch {
    /// Starts with the current value of the counter.
    pub fn new() -> Self {
        let counters = File::open("/proc/vmstat").ok();
        let seen = Cell::new(count(counters.as_ref()));
        Self { counters, seen }
    }

    /// Returns whether the kernel killed a process because of memory since the last call.
    pub fn happened(&self) -> bool {
        let now = count(self.counters.as_ref());
        // gVisor's counter restarts at 0 after a restore. A lower value is therefore also a change,
        // but 0 means that no process was killed since then.
        self.seen.replace(now) != now && now > 0
    }
}

impl Default for OomWatch {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the number of out-of-memory kills since boot, or 0 if the counter cannot be read.
fn count(counters: Option<&File>) -> u64 {
    let mut text = Vec::with_capacity(8 * 1024);
    if let Some(counters) = counters {
        let mut chunk = [0; 4096];
        while text.len() < MAX_COUNTER_BYTES {
            match counters.read_at(&mut chunk, text.len() as u64) {
                Ok(n) if n > 0 => text.extend_from_slice(&chunk[..n]),
                _ => break,
            }
        }
    }
    let text = String::from_utf8_lossy(&text);
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
        .unwrap_or(0)
}

/// Victims of out-of-memory kills by process id, read from the kernel's log.
#[derive(Debug)]
pub struct OomVictims {
    /// Kernel's counters, as in [`OomWatch`].
    counters: Option<File>,
    log: RefCell<VictimLog>,
}

/// Kills that the kernel's log reports, to which exits of processes are attributed.
#[derive(Debug)]
struct VictimLog {
    /// Kernel log, positioned at the first record that was not read yet. `None` if the log cannot
    /// be read.
    records: Option<File>,
    /// Process ids of victims whose exit was not reported yet, latest first.
    victims: VecDeque<u32>,
    /// Number of counted kills that need no further attribution: the log names their victims, or
    /// they happened before the start.
    accounted: u64,
}

impl OomVictims {
    /// Starts to record kills.
    pub fn new() -> Self {
        let counters = File::open("/proc/vmstat").ok();
        let records = open_kernel_log().ok();
        Self::with(counters, records)
    }

    /// Starts to record kills from these files. `None` for a file that cannot be read.
    fn with(counters: Option<File>, records: Option<File>) -> Self {
        let accounted = count(counters.as_ref());
        Self {
            counters,
            log: RefCell::new(VictimLog {
                records,
                victims: VecDeque::new(),
                accounted,
            }),
        }
    }

    /// Returns whether the kernel killed process `pid` because of memory. Returns `None` if the log
    /// cannot be read.
    ///
    /// The kernel counts a kill before it logs the victim. A counted kill without a record is
    /// therefore attributed to `pid`, which has just exited.
    pub fn contains(&self, pid: u32) -> Option<bool> {
        let mut log = self.log.borrow_mut();
        // The log is read before the counter: a kill between both is counted, has no record, and is
        // attributed to `pid`.
        log.read()?;
        if let Some(at) = log.victims.iter().position(|victim| *victim == pid) {
            log.victims.remove(at);
            return Some(true);
        }
        Some(count(self.counters.as_ref()) > log.accounted)
    }

    /// Removes a victim whose process id belongs to another process by now.
    pub fn forget(&self, pid: u32) {
        self.log
            .borrow_mut()
            .victims
            .retain(|victim| *victim != pid);
    }
}

impl Default for OomVictims {
    fn default() -> Self {
        Self::new()
    }
}

impl VictimLog {
    /// Reads all new records. Returns `None` if the log cannot be read, or if records were lost.
    fn read(&mut self) -> Option<()> {
        let mut buffer = vec![0; MAX_RECORD_BYTES];
        loop {
            let records = self.records.as_mut()?;
            match records.read(&mut buffer) {
                Ok(0) => return Some(()),
                Ok(n) => {
                    let record = String::from_utf8_lossy(&buffer[..n]);
                    if let Some(victim) = OomVictim::parse(&record) {
                        self.accounted += 1;
                        // The oldest victim is dropped.
                        self.victims.truncate(MAX_VICTIMS - 1);
                        self.victims.push_front(victim.pid);
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Some(()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    // The number of lost records is unknown, so later results would be unreliable.
                    self.records = None;
                    return None;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use tempfile::TempDir;

    /// Fake counter and log of kills. Three kills precede the start of the agent.
    struct Kernel {
        dir: TempDir,
        log: File,
    }

    impl Kernel {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let log = File::create(dir.path().join("log")).unwrap();
            let kernel = Self { dir, log };
            kernel.count(3);
            kernel
        }

        fn open(&self, name: &str) -> Option<File> {
            Some(File::open(self.dir.path().join(name)).unwrap())
        }

        fn victims(&self) -> OomVictims {
            OomVictims::with(self.open("count"), self.open("log"))
        }

        /// Sets the counter.
        fn count(&self, kills: u64) {
            let text = format!("nr_free_pages 1\noom_kill {kills}\n");
            std::fs::write(self.dir.path().join("count"), text).unwrap();
        }

        /// Adds a victim to the log.
        fn record(&mut self, pid: u32) {
            let text = "total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB";
            writeln!(
                self.log,
                "3,1,2,-;Out of memory: Killed process {pid} (x) {text}"
            )
            .unwrap();
        }
    }

    #[test]
    fn a_process_is_a_victim_if_the_log_names_it() {
        let mut kernel = Kernel::new();
        let victims = kernel.victims();
        assert_eq!(victims.contains(7), Some(false));
        kernel.count(4);
        kernel.record(7);
        // Another process that was killed by a signal is not a victim, even if it exits first.
        assert_eq!(victims.contains(8), Some(false));
        assert_eq!(victims.contains(7), Some(true));
        assert_eq!(victims.contains(7), Some(false));
        kernel.count(5);
        kernel.record(9);
        assert_eq!(victims.contains(8), Some(false));
        victims.forget(9);
        assert_eq!(victims.contains(9), Some(false));
    }

    #[test]
    fn a_counted_kill_without_a_record_is_attributed_to_the_exited_process() {
        let mut kernel = Kernel::new();
        let victims = kernel.victims();
        kernel.count(4);
        assert_eq!(victims.contains(7), Some(true));
        kernel.record(7);
        assert_eq!(victims.contains(8), Some(false));
    }

    #[test]
    fn without_a_log_the_result_is_none() {
        let kernel = Kernel::new();
        let victims = OomVictims::with(kernel.open("count"), None);
        assert_eq!(victims.contains(7), None);
    }
}
