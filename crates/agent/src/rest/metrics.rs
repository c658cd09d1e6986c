//! `/metrics`: resource use of the guest, as its kernel measures it.

use super::error::RestError;
use crate::body::{ReplyBody, json};
use crate::cpu_sample::CpuSample;
use crate::state::Agent;
use crate::workers::CallClass;
use hyper::Response;
use serde::Serialize;
use std::collections::HashMap;
use std::time::{SystemTime, UNIX_EPOCH};

/// Response of `/metrics`. Sizes are in bytes.
#[derive(Debug, Serialize)]
pub struct GuestMetrics {
    /// Time in seconds since 1970.
    ts: u64,
    cpu_count: usize,
    /// Use of all CPUs together in percent.
    cpu_used_pct: f64,
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    mem_total_mib: u64,
    mem_used_mib: u64,
    disk_used: u64,
    disk_total: u64,
    /// Number of the agent's calls that wait for a file system that does not answer.
    stuck_calls: usize,
}

/// Returns the current values. The CPU use is the average since the last call, or since boot in the
/// first call.
pub async fn answer(agent: &Agent) -> Result<Response<ReplyBody>, RestError> {
    let stuck_calls = agent.workers.stuck();
    let before = agent.cpu.get().unwrap_or(CpuSample { busy: 0, total: 0 });
    let what = "cannot read the metrics of the sandbox";
    let work = move |_: &_| now(before, stuck_calls);
    let (sample, metrics) = agent.workers.run(CallClass::Files, what, work).await?;
    agent.cpu.set(Some(sample));
    Ok(json(&metrics))
}

/// Returns the present metrics. The use of processors is measured since `before`.
fn now(before: CpuSample, stuck_calls: usize) -> (CpuSample, GuestMetrics) {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let sample = sample(&stat);
    let total = sample.total.saturating_sub(before.total).max(1);
    let busy = sample.busy.saturating_sub(before.busy);
    let memory = memory();
    let kib = |name: &str| memory.get(name).copied().unwrap_or(0) * 1024;
    let mem_total = kib("MemTotal");
    let mem_used = mem_total.saturating_sub(kib("MemAvailable"));
    let (disk_used, disk_total) = disk();
    let metrics = GuestMetrics {
        ts: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs()),
        cpu_count: stat
            .lines()
            .filter(|l| l.starts_with("cpu") && !l.starts_with("cpu "))
            .count(),
        // Two decimal places.
        cpu_used_pct: (busy as f64 / total as f64 * 10_000.0).round() / 100.0,
        mem_total,
        mem_used,
        mem_cache: kib("Cached"),
        mem_total_mib: mem_total >> 20,
        mem_used_mib: mem_used >> 20,
        disk_used,
        disk_total,
        stuck_calls,
    };
    (sample, metrics)
}

/// Parses the first line of `/proc/stat`: the times of all CPUs together, in clock ticks.
fn sample(stat: &str) -> CpuSample {
    let ticks: Vec<u64> = stat
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        // The remaining values, the times of nested guests, are included in the first two.
        .take(8)
        .map(|t| t.parse().unwrap_or(0))
        .collect();
    let total: u64 = ticks.iter().sum();
    // The fourth value is the idle time, and the fifth is the time spent waiting for disks.
    let idle: u64 = ticks.iter().skip(3).take(2).sum();
    CpuSample {
        // The subtraction cannot underflow: the idle time is part of the sum.
        busy: total - idle,
        total,
    }
}

/// Returns the values of `/proc/meminfo` in KiB.
fn memory() -> HashMap<String, u64> {
    std::fs::read_to_string("/proc/meminfo")
        .unwrap_or_default()
        .lines()
        .filter_map(|line| {
            let (name, rest) = line.split_once(':')?;
            let value = rest.split_whitespace().next()?.parse().ok()?;
            Some((name.to_owned(), value))
        })
        .collect()
}

/// Returns the used and the total bytes of the root file system.
fn disk() -> (u64, u64) {
    // SAFETY: statvfs consists of integers, for which all zeroes are valid.
    let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path is zero-terminated, and the statvfs is writable.
    if unsafe { libc::statvfs(c"/".as_ptr(), &mut found) } != 0 {
        return (0, 0);
    }
    // Blocks that are reserved for root count as free.
    let used = found.f_blocks.saturating_sub(found.f_bfree);
    (used * found.f_frsize, found.f_blocks * found.f_frsize)
}
