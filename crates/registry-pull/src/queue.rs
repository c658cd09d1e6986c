//! [`PullQueue`]: permits for concurrent pulls, limited in total and per API key.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum number of concurrent pulls of one key.
const MAX_PULLS_PER_KEY: usize = 2;
/// Maximum number of concurrent pulls.
const MAX_PULLS: usize = 8;

/// Permits for pulls, limited in total and per key. A pull first waits for a permit of its key, so
/// that a key never has more than [`MAX_PULLS_PER_KEY`] pulls waiting for the total.
#[derive(Debug)]
pub struct PullQueue {
    all: Arc<Semaphore>,
    /// Permits by key. `None` is the host's owner. Semaphores without users are removed.
    keys: Mutex<HashMap<Option<String>, Weak<Semaphore>>>,
}

/// Permit of a pull. Dropping this value releases it.
#[derive(Debug)]
pub struct PullPermit {
    _all: OwnedSemaphorePermit,
    _key: OwnedSemaphorePermit,
    /// Keeps the key's semaphore alive. While the pull waits, the future of `acquire` holds this
    /// reference.
    _own: Arc<Semaphore>,
}

impl Default for PullQueue {
    fn default() -> Self {
        Self {
            all: Arc::new(Semaphore::new(MAX_PULLS)),
            keys: Mutex::default(),
        }
    }
}

impl PullQueue {
    /// Waits for a permit of a key (`None` for the host's owner). Returns `None` if the queue is
    /// closed, which does not happen.
    pub async fn acquire(&self, key: Option<&str>) -> Option<PullPermit> {
        let own = self.permits_of(key);
        let key = own.clone().acquire_owned().await.ok()?;
        let all = self.all.clone().acquire_owned().await.ok()?;
        Some(PullPermit {
            _all: all,
            _key: key,
            _own: own,
        })
    }

    /// Returns the semaphore of a key.
    fn permits_of(&self, key: Option<&str>) -> Arc<Semaphore> {
        let mut keys = self.keys.lock();
        let key = key.map(str::to_owned);
        // The semaphore exists while the key has pulls.
        if let Some(own) = keys.get(&key).and_then(Weak::upgrade) {
            return own;
        }
        // Bounds the map by the number of keys with pulls.
        keys.retain(|_, own| own.strong_count() > 0);
        let own = Arc::new(Semaphore::new(MAX_PULLS_PER_KEY));
        keys.insert(key, Arc::downgrade(&own));
        own
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::{Context, Poll, Waker};

    /// Polls once.
    fn ready<F: Future>(future: &mut std::pin::Pin<Box<F>>) -> Option<F::Output> {
        match future
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
        {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_key_with_many_pulls_does_not_delay_the_first_pull_of_another() {
        let queue = PullQueue::default();
        let mut greedy: Vec<_> = (0..50)
            .map(|_| Box::pin(queue.acquire(Some("mallory"))))
            .collect();
        let mut permits: Vec<_> = greedy.iter_mut().map(ready).collect();
        assert_eq!(permits.iter().flatten().count(), MAX_PULLS_PER_KEY);
        let mut other = Box::pin(queue.acquire(Some("alice")));
        assert!(ready(&mut other).is_some());
        // A released permit admits one more pull.
        *permits.first_mut().unwrap() = None;
        let next: Vec<_> = greedy.iter_mut().skip(2).filter_map(ready).collect();
        assert_eq!(next.len(), 1);
    }

    #[test]
    fn concurrent_pulls_are_bounded_in_total() {
        let queue = PullQueue::default();
        let keys: Vec<String> = (0..MAX_PULLS + 2).map(|n| n.to_string()).collect();
        let mut all: Vec<_> = keys
            .iter()
            .map(|k| Box::pin(queue.acquire(Some(k))))
            .collect();
        let permits: Vec<_> = all.iter_mut().filter_map(ready).collect();
        assert_eq!(permits.len(), MAX_PULLS);
    }
}
