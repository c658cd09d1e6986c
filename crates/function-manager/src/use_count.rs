//! Number of uses of an owner's process: requests in flight and direct connections. A process in
//! use is not stopped as idle.
//!
//! A *direct* connection is passed from the daemon to the process of the tenant, which then serves
//! its requests without the gateway.

use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bit that marks the count as closed: further uses are rejected.
const CLOSED: u64 = 1 << 63;

/// Number of requests and direct connections of a process, and the time of the last one.
#[derive(Debug)]
pub(crate) struct UseCount {
    /// Number of uses, and the bit [`CLOSED`].
    in_flight: AtomicU64,
    /// Time at which the last use ended.
    last_used: Mutex<Instant>,
}

impl UseCount {
    /// Creates a count without uses. The idle time starts at `now`.
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            in_flight: AtomicU64::new(0),
            last_used: Mutex::new(now),
        }
    }

    /// Counts a use. `None` if further uses are rejected.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<CountedUse> {
        // Counting and the check of `CLOSED` are one atomic step: no use starts after the close.
        let open = |count: u64| (count & CLOSED == 0).then(|| count + 1);
        let counted = self
            .in_flight
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, open);
        counted.is_ok().then(|| CountedUse(self.clone()))
    }

    /// Rejects further uses if no use exists and none existed for `idle`. Returns whether this call
    /// closed the count; false if the count was closed before.
    pub(crate) fn close_if_idle(&self, idle: Duration) -> bool {
        self.last_used.lock().elapsed() >= idle
            && self
                .in_flight
                // The exchange fails if a use exists, or if the count is already closed.
                .compare_exchange(0, CLOSED, Ordering::AcqRel, Ordering::Acquire)
                .is_ok()
    }

    /// Rejects further uses.
    pub(crate) fn close(&self) {
        self.in_flight.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Returns whether further uses are rejected.
    pub(crate) fn is_closed(&self) -> bool {
        self.in_flight.load(Ordering::Acquire) & CLOSED != 0
    }
}

/// Counted use. Dropping this value ends the use.
#[derive(Debug)]
pub(crate) struct CountedUse(Arc<UseCount>);

impl Drop for CountedUse {
    fn drop(&mut self) {
        // The time is set before the count decreases: an idle process always has its time of last
        // use.
        *self.0.last_used.lock() = Instant::now();
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}
