//! Metrics of the requests to one function, which the daemon reads.
//!
//! The *head* of a request or response is its first line and its headers, without the body.
//!
//! This code runs in the process of one owner, which executes its functions.

use crate::fault::RequestFault;
use jiffy_proto::function::{LATENCY_BUCKETS_US, MetricsSnapshot};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Metrics of one function. The counters are independent of each other, so that `Relaxed` accesses
/// suffice.
#[derive(Debug, Default)]
pub struct FunctionMetrics {
    requests: AtomicU64,
    running: AtomicU64,
    cpu_us: AtomicU64,
    latency_us: AtomicU64,
    /// Numbers of responses by latency. The last bucket has no upper bound.
    buckets: [AtomicU64; LATENCY_BUCKETS_US.len() + 1],
    /// Numbers of failed requests by kind of failure.
    faults: Mutex<BTreeMap<&'static str, u64>>,
}

/// Request that counts as running until this value is dropped.
#[derive(Debug)]
pub(crate) struct RunningRequest<'a>(&'a FunctionMetrics);

impl FunctionMetrics {
    /// Counts a started request.
    pub(crate) fn enter(&self) -> RunningRequest<'_> {
        self.running.fetch_add(1, Ordering::Relaxed);
        RunningRequest(self)
    }

    /// Counts a request whose guest has sent the head of its response or failed. `latency` excludes
    /// the waits for the request's body and for a permit.
    pub(crate) fn record_response(&self, latency: Duration) {
        let us = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.latency_us.fetch_add(us, Ordering::Relaxed);
        // The bounds are inclusive.
        let bucket = LATENCY_BUCKETS_US.partition_point(|bound| *bound < us);
        if let Some(bucket) = self.buckets.get(bucket) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a failure.
    pub(crate) fn record_fault(&self, fault: &RequestFault) {
        let mut faults = self.faults.lock();
        *faults.entry(fault.error_code()).or_default() += 1;
    }

    /// Adds processor time.
    pub(crate) fn record_cpu(&self, cpu: Duration) {
        let us = u64::try_from(cpu.as_micros()).unwrap_or(u64::MAX);
        self.cpu_us.fetch_add(us, Ordering::Relaxed);
    }

    /// Returns the current values.
    pub fn snapshot(&self) -> MetricsSnapshot {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let faults = self.faults.lock();
        MetricsSnapshot {
            requests: load(&self.requests),
            running: load(&self.running),
            cpu_us: load(&self.cpu_us),
            latency_us: load(&self.latency_us),
            latency_buckets: self.buckets.iter().map(load).collect(),
            faults: faults
                .iter()
                .map(|(code, count)| ((*code).to_owned(), *count))
                .collect(),
        }
    }
}

impl Drop for RunningRequest<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}
