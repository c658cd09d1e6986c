//! Memory pressure while requests run: the kernel moves pages or writes them to swap space.

use crate::support::{SetOnDrop, TestTenant};
use std::fs;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// File to which a write starts a compaction of the memory.
pub const COMPACT: &str = "/proc/sys/vm/compact_memory";
/// Intervals between two rounds, in which guests run.
const COMPACTION_INTERVAL: Duration = Duration::from_millis(20);
const PAGE_OUT_INTERVAL: Duration = Duration::from_millis(1);

/// Returns a counter of the kernel.
pub fn kernel_count(name: &str) -> u64 {
    let all = fs::read_to_string("/proc/vmstat").unwrap();
    let mut words = all.lines().filter_map(|line| line.split_once(' '));
    let (_, count) = words.find(|(found, _)| *found == name).unwrap();
    count.parse().unwrap()
}

/// Returns a field of a process's status in KiB.
pub fn status_kib(process: u32, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let mut words = line.unwrap().trim_start_matches(':').split_whitespace();
    words.next().unwrap().parse().unwrap()
}

/// Runs `work` while `round` is repeated.
fn during<T>(interval: Duration, mut round: impl FnMut() + Send, work: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                round();
                std::thread::sleep(interval);
            }
        });
        let _done = SetOnDrop(&done);
        work()
    })
}

/// Runs `work` while the kernel compacts all memory, which requires root.
pub fn while_compacting<T>(work: impl FnOnce() -> T) -> T {
    let compact = || fs::write(COMPACT, "1").unwrap();
    during(COMPACTION_INTERVAL, compact, work)
}

/// Runs `work` while the tenant's memory is written to swap space. Returns the maximum amount of
/// swapped memory in KiB.
pub fn while_swapping(tenant: &TestTenant, work: impl FnOnce()) -> u64 {
    let process = tenant.process.id();
    let pidfd = tenant.process.pidfd().unwrap();
    let mut most = 0;
    let round = || {
        page_out(process, pidfd.as_raw_fd());
        most = status_kib(process, "VmSwap").max(most);
    };
    during(PAGE_OUT_INTERVAL, round, work);
    most
}

/// Writes the private mappings of a process to swap space. Busy pages remain in memory.
fn page_out(process: u32, pidfd: i32) {
    for line in fs::read_to_string(format!("/proc/{process}/maps"))
        .unwrap()
        .lines()
    {
        let mut words = line.split_whitespace();
        let (range, flags) = (words.next().unwrap(), words.next().unwrap());
        if flags != "rw-p" || line.contains('[') {
            continue;
        }
        let (from, to) = range.split_once('-').unwrap();
        let [from, to] = [from, to].map(|digits| usize::from_str_radix(digits, 16).unwrap());
        let range = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(from),
            iov_len: to - from,
        };
        // SAFETY: the list of one range is valid until the call returns. The call moves pages of
        // the other process, but does not change their contents. A range that was unmapped in the
        // meantime causes an error.
        unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                pidfd,
                &raw const range,
                1,
                libc::MADV_PAGEOUT,
                0,
            )
        };
    }
}
