//! Lookups in the store that a fetch most likely follows: a create first asks what a snapshot is,
//! and then fetches it.

use parking_lot::Mutex;
use std::time::Duration;
use tokio::time::Instant;

/// Time for which a lookup is kept.
const MAX_AGE: Duration = Duration::from_secs(5);
/// Lookups that are kept; the oldest goes first.
const MAX_KEPT: usize = 16;

/// Results of lookups by key, the oldest first. Each is taken once.
#[derive(Debug)]
pub(in crate::sandboxes) struct DescribedSnapshots<T>(Mutex<Vec<(String, Instant, T)>>);

impl<T> Default for DescribedSnapshots<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> DescribedSnapshots<T> {
    pub(super) fn keep(&self, key: String, found: T) {
        let mut all = self.0.lock();
        all.retain(|(other, looked, _)| *other != key && looked.elapsed() < MAX_AGE);
        if all.len() == MAX_KEPT {
            all.remove(0);
        }
        all.push((key, Instant::now(), found));
    }

    pub(super) fn take(&self, key: &str) -> Option<T> {
        let mut all = self.0.lock();
        all.retain(|(_, looked, _)| looked.elapsed() < MAX_AGE);
        let at = all.iter().position(|(other, ..)| other == key)?;
        Some(all.remove(at).2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_lookup_serves_one_fetch_soon_after_it() {
        let described = DescribedSnapshots::default();
        described.keep("a".to_owned(), 1);
        described.keep("a".to_owned(), 2);
        assert_eq!(described.take("b"), None);
        assert_eq!(described.take("a"), Some(2));
        assert_eq!(described.take("a"), None);
        described.keep("a".to_owned(), 3);
        tokio::time::advance(MAX_AGE).await;
        assert_eq!(described.take("a"), None);
        for number in 0..=MAX_KEPT {
            described.keep(number.to_string(), number);
        }
        assert_eq!(described.take("0"), None);
        assert_eq!(described.take("1"), Some(1));
    }
}
