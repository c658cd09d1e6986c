//! Exchanges (requests to guests and their responses) in flight, which are counted and limited.

use crate::counters::{GatewayCounters, add, remove};
use crate::sandboxes::ExchangePermit;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Exchange in flight. Dropping this value ends it.
#[derive(Debug)]
pub(crate) struct InFlightExchange {
    counters: Arc<GatewayCounters>,
    /// Counts the exchange for the sandbox's owner.
    _permit: ExchangePermit,
}

impl InFlightExchange {
    /// Registers an exchange. `None` if more than `limit` exchanges would be in flight.
    pub(crate) fn begin(
        counters: &Arc<GatewayCounters>,
        limit: usize,
        permit: ExchangePermit,
    ) -> Option<Self> {
        add(&counters.exchanges_open, 1);
        let in_flight = Self {
            counters: Arc::clone(counters),
            _permit: permit,
        };
        // Counted before the check, so that concurrent calls cannot exceed the limit together. If
        // it is exceeded, dropping the value removes the count.
        let count = counters.exchanges_open.load(Relaxed);
        (count <= limit as u64).then_some(in_flight)
    }
}

impl Drop for InFlightExchange {
    fn drop(&mut self) {
        remove(&self.counters.exchanges_open);
    }
}
