//! [`FetchLocks`]: one lock for each snapshot that is being fetched.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

/// Locks of snapshots that are being fetched. The key is a text that identifies the fetch: owner
/// and id of the snapshot, its id alone, or its id and the kind of the fetch.
#[derive(Default)]
pub(in crate::sandboxes) struct FetchLocks(Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>);

impl FetchLocks {
    /// Returns the lock of `key`, which exists while a fetch uses it.
    pub(super) fn get(&self, key: String) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.0.lock();
        // Removes locks that no fetch uses any longer, so the map is bounded by the fetches in
        // flight.
        locks.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = locks.get(&key).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::<tokio::sync::Mutex<()>>::default();
        locks.insert(key, Arc::downgrade(&lock));
        lock
    }
}
