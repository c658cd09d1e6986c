//! Reservations of requests in flight, and creates within the last minute.

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
    promised: HashMap<String, QuotaAmount>,
    /// Times of the creates within the last minute, by key.
    made: HashMap<String, VecDeque<Instant>>,
}

impl Ledger {
    /// Returns the resources reserved for requests of `key` in flight.
    pub fn promised(&self, key: &str) -> QuotaAmount {
        self.promised.get(key).copied().unwrap_or_default()
    }

    /// Returns the bytes on disk reserved for requests of all keys in flight.
    pub fn all_disk_bytes(&self) -> u64 {
        let bytes = self.promised.values().map(|amount| amount.disk_bytes);
        bytes.fold(0, u64::saturating_add)
    }

    pub fn promise(&mut self, key: &str, amount: QuotaAmount) {
        let sum = self.promised(key) + amount;
        self.promised.insert(key.to_owned(), sum);
    }

    /// Releases a reservation.
    pub fn release(&mut self, key: &str, amount: QuotaAmount) {
        let left = self.promised(key) - amount;
        match left == QuotaAmount::default() {
            true => drop(self.promised.remove(key)),
            false => drop(self.promised.insert(key.to_owned(), left)),
        }
    }

    /// Counts `count` creates. Fails if they exceed the limit per minute.
    pub fn note(&mut self, key: &Key, count: usize) -> Result<(), ApiError> {
        let Some(limit) = key.limits.creates_per_minute else {
            return Ok(());
        };
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let refuse = || {
            ApiError::too_many(
                "creates_per_minute",
                format!("this key has reached its limit of {limit} new sandboxes per minute"),
            )
        };
        if count > limit {
            return Err(refuse().permanent());
        }
        let now = Instant::now();
        let made = self.made.entry(key.id.clone()).or_default();
        while made
            .front()
            .is_some_and(|at| now.duration_since(*at) >= WINDOW)
        {
            made.pop_front();
        }
        let over = (made.len() + count).saturating_sub(limit);
        if over > 0 {
            // The request fits once enough of the oldest creates have left the window.
            let oldest = made.get(over - 1).copied().unwrap_or(now);
            let wait = WINDOW.saturating_sub(now.duration_since(oldest));
            return Err(refuse().after(wait.as_secs() + 1));
        }
        made.extend(std::iter::repeat_n(now, count));
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
        ledger.promise("a", one);
        ledger.promise("a", one);
        assert_eq!(ledger.promised("a").disk_bytes, 14);
        assert_eq!(ledger.promised("b"), QuotaAmount::default());
        ledger.release("a", one);
        ledger.release("a", one);
        assert!(ledger.promised.is_empty());
    }
}
