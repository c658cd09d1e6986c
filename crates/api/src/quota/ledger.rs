//! [`Ledger`]: reservations of requests in flight, and the times of creates within the last minute.

use crate::error::ApiError;
use crate::keys::Key;
use jiffy_sandbox_manager::QuotaAmount;
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Window of the limit on creates per minute.
const WINDOW: Duration = Duration::from_secs(60);

/// Reservations and creates, by key.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// Resources reserved for requests in flight, by key.
    reserved: HashMap<String, QuotaAmount>,
    /// Times of the creates within the last minute, by key.
    creates: HashMap<String, VecDeque<Instant>>,
}

impl Ledger {
    /// Returns the resources reserved for requests of `key` in flight.
    pub fn reserved(&self, key: &str) -> QuotaAmount {
        self.reserved.get(key).copied().unwrap_or_default()
    }

    /// Returns the bytes on disk reserved for requests of all keys in flight.
    pub fn all_disk_bytes(&self) -> u64 {
        let bytes = self.reserved.values().map(|amount| amount.disk_bytes);
        bytes.fold(0, u64::saturating_add)
    }

    /// Adds a reservation.
    pub fn reserve(&mut self, key: &str, amount: QuotaAmount) {
        let sum = self.reserved(key) + amount;
        self.reserved.insert(key.to_owned(), sum);
    }

    /// Releases a reservation.
    pub fn release(&mut self, key: &str, amount: QuotaAmount) {
        let remaining = self.reserved(key) - amount;
        // Remove empty entries: otherwise the map would grow with every key.
        if remaining == QuotaAmount::default() {
            self.reserved.remove(key);
        } else {
            self.reserved.insert(key.to_owned(), remaining);
        }
    }

    /// Counts `count` creates. Fails if they exceed the limit per minute.
    pub fn count_creates(&mut self, key: &Key, count: usize) -> Result<(), ApiError> {
        let Some(limit) = key.limits.creates_per_minute else {
            return Ok(());
        };
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let error = || {
            ApiError::too_many(
                "creates_per_minute",
                format!("this key has reached its limit of {limit} new sandboxes per minute"),
            )
        };
        if count > limit {
            // Even an empty window could not satisfy the request.
            return Err(error().permanent());
        }
        let now = Instant::now();
        let creates = self.creates.entry(key.id.clone()).or_default();
        while creates
            .front()
            .is_some_and(|at| now.duration_since(*at) >= WINDOW)
        {
            creates.pop_front();
        }
        let over = (creates.len() + count).saturating_sub(limit);
        if over > 0 {
            // The request fits once enough of the oldest creates have left the window.
            let oldest = creates.get(over - 1).copied().unwrap_or(now);
            let wait = WINDOW.saturating_sub(now.duration_since(oldest));
            // Round up: a retry must not arrive too early.
            return Err(error().after(wait.as_secs() + 1));
        }
        creates.extend(std::iter::repeat_n(now, count));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_of_a_key_are_summed_and_released() {
        let mut ledger = Ledger::default();
        let one = QuotaAmount {
            paused: 1,
            disk_bytes: 7,
            ..QuotaAmount::default()
        };
        ledger.reserve("a", one);
        ledger.reserve("a", one);
        assert_eq!(ledger.reserved("a").disk_bytes, 14);
        assert_eq!(ledger.reserved("b"), QuotaAmount::default());
        ledger.release("a", one);
        ledger.release("a", one);
        assert!(ledger.reserved.is_empty());
    }
}
