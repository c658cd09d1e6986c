//! Pressure on memory while requests run: a kernel that moves pages, or writes them to swap space.

use crate::support::{SetOnDrop, TestTenant};
use std::fs;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub const COMPACT: &str = "/proc/sys/vm/compact_memory";
/// Times between two rounds, so that guests also run.
const COMPACTION_INTERVAL: Duration = Duration::from_millis(20);
const PAGE_OUT_INTERVAL: Duration = Duration::from_millis(1);

/// Count of the kernel since its start.
pub fn kernel_count(name: &str) -> u64 {
    let all = fs::read_to_string("/proc/vmstat").unwrap();
    let mut words = all.lines().filter_map(|line| line.split_once(' '));
    let (_, count) = words.find(|(found, _)| *found == name).unwrap();
    count.parse().unwrap()
}

/// Field of a process's status in KiB.
pub fn status_kib(process: u32, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let mut words = line.unwrap().trim_start_matches(':').split_whitespace();
    words.next().unwrap().parse().unwrap()
}

/// Does `work` while `round` is done again and again.
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

/// Does `work` while the kernel compacts all memory, which only root can ask for.
pub fn while_compacting<T>(work: impl FnOnce() -> T) -> T {
    let compact = || fs::write(COMPACT, "1").unwrap();
    during(COMPACTION_INTERVAL, compact, work)
}

/// Does `work` while the tenant's memory is written to swap space. Returns the most that was there
/// at once, in KiB.
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

/// Writes memory that a process has written in mappings of its own to swap space. Pages that are
/// busy stay.
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
        // SAFETY: a list of one range, which lives until the call returns. The call changes where
        // pages of the other process lie, not what is in them; a range that has gone meanwhile is
        // an error.
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
