//! Counters of requests to a store and of their bytes, and limits of the bandwidth.

use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// Numbers of requests and bytes since a store was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// Reads of objects and ranges.
    pub gets: u64,
    /// Writes.
    pub puts: u64,
    /// Requests for size and time of an object.
    pub heads: u64,
    /// Pages of listings.
    pub lists: u64,
    /// Removals.
    pub deletes: u64,
    /// Repeated requests after a failure.
    pub retries: u64,
    /// Additional reads because the first was slow.
    pub hedges: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
}

/// Counters of requests and bytes since the start.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub gets: AtomicU64,
    pub puts: AtomicU64,
    pub heads: AtomicU64,
    pub lists: AtomicU64,
    pub deletes: AtomicU64,
    pub retries: AtomicU64,
    pub hedges: AtomicU64,
    pub bytes_read: AtomicU64,
    pub bytes_written: AtomicU64,
}

impl Counters {
    pub fn read(&self) -> Traffic {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic {
            gets: of(&self.gets),
            puts: of(&self.puts),
            heads: of(&self.heads),
            lists: of(&self.lists),
            deletes: of(&self.deletes),
            retries: of(&self.retries),
            hedges: of(&self.hedges),
            bytes_read: of(&self.bytes_read),
            bytes_written: of(&self.bytes_written),
        }
    }
}

pub(crate) fn add(counter: &AtomicU64, number: u64) {
    counter.fetch_add(number, Ordering::Relaxed);
}

/// Bandwidth limit in bytes per second.
#[derive(Debug)]
pub(crate) struct Bandwidth {
    bytes_per_second: u64,
    /// Time at which all transfers so far are complete at this rate.
    free_at: Mutex<Instant>,
}

impl Bandwidth {
    pub fn new(bytes_per_second: u64) -> Self {
        Self {
            bytes_per_second: bytes_per_second.max(1),
            free_at: Mutex::new(Instant::now()),
        }
    }

    /// Waits until `bytes` bytes may be transferred, after all earlier callers.
    pub async fn take(&self, bytes: u64) {
        let start = {
            let mut free_at = self.free_at.lock().await;
            let start = Instant::now().max(*free_at);
            let micros = u128::from(bytes) * 1_000_000 / u128::from(self.bytes_per_second);
            // The conversion fails only for more than 580,000 years.
            let took = Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX >> 20));
            *free_at = start + took;
            start
        };
        tokio::time::sleep_until(start).await;
    }
}
