//! Stock of empty disk overlays (the files that receive a guest's disk writes), created in advance.
//! Creating a file takes as long as the rest of the daemon's work before it sends the request to a
//! VMM.

use jiffy_snapshot::{SnapshotError, Store};
use parking_lot::Mutex;
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// Number of overlays to keep ready.
const MAX_READY: usize = 2;
/// Delay between a use and the creation of a replacement. Guests that are starting have priority.
const REFILL_DELAY: Duration = Duration::from_millis(30);

/// Ready overlays of one snapshot store. The files have no name, so they need no cleanup.
#[derive(Debug, Clone, Default)]
pub(super) struct OverlaysAhead(Arc<Mutex<Vec<File>>>);

impl OverlaysAhead {
    /// Returns a ready overlay, or creates one. Schedules the creation of replacements, so it must
    /// be called inside a tokio runtime.
    pub fn take(&self, store: &Store) -> Result<File, SnapshotError> {
        let (ready, remaining) = {
            let mut files = self.0.lock();
            (files.pop(), files.len())
        };
        if remaining < MAX_READY {
            let (overlays, store) = (self.clone(), store.clone());
            tokio::spawn(async move {
                sleep(REFILL_DELAY).await;
                tokio::task::spawn_blocking(move || overlays.fill(&store));
            });
        }
        ready.map_or_else(|| store.overlay(), Ok)
    }

    /// Creates the missing overlays. Blocks. Concurrent calls may create one too many.
    fn fill(&self, store: &Store) {
        while self.0.lock().len() < MAX_READY {
            // Ignore the error: the next start of a guest creates its own overlay and reports the
            // error.
            let Ok(file) = store.overlay() else { return };
            self.0.lock().push(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[tokio::test]
    async fn ready_overlays_are_empty_and_used_once() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let overlays = OverlaysAhead::default();
        let mut taken = vec![overlays.take(&store).unwrap()];
        while overlays.0.lock().len() < MAX_READY {
            sleep(Duration::from_millis(1)).await;
        }
        for _ in 0..4 {
            taken.push(overlays.take(&store).unwrap());
        }
        let mut inodes = Vec::new();
        for file in &taken {
            let metadata = file.metadata().unwrap();
            assert_eq!((metadata.len(), metadata.nlink()), (0, 0));
            inodes.push(metadata.ino());
        }
        inodes.sort_unstable();
        inodes.dedup();
        assert_eq!(inodes.len(), taken.len());
    }
}
