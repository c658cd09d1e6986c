//! Exchanges in flight, which are limited in total, and by their permit for each owner of
//! sandboxes. An *exchange* is a request to a guest with its response or stream.

use crate::counters::{GatewayCounters, add, remove};
use crate::sandboxes::{ExchangePermit, SandboxUse};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Exchange in flight. Dropping this value ends it.
#[derive(Debug)]
pub(crate) struct InFlightExchange {
    counters: Arc<GatewayCounters>,
    /// Counts the exchange for the sandbox's owner.
    _permit: ExchangePermit,
    /// Counts the exchange as use of the sandbox. `None` for an upgraded stream, of which only the
    /// traffic counts.
    in_use: Option<SandboxUse>,
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
            in_use: None,
        };
        // The exchange is counted before the check, so that concurrent calls cannot exceed the
        // limit together. If the limit is exceeded, the drop of `in_flight` removes the count.
        let count = counters.exchanges_open.load(Relaxed);
        (count <= limit as u64).then_some(in_flight)
    }

    /// Counts the exchange as use of its sandbox, until `in_use` is dropped.
    pub(crate) fn set_use(&mut self, in_use: SandboxUse) {
        self.in_use = Some(in_use);
    }

    /// Ends the use of the sandbox before the exchange.
    pub(crate) fn end_use(&mut self) {
        self.in_use = None;
    }
}

impl Drop for InFlightExchange {
    fn drop(&mut self) {
        remove(&self.counters.exchanges_open);
    }
}
