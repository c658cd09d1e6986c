//! Empty overlays of disks, made before a guest needs them: a new file takes as long as all else
//! that a daemon does before it asks a VMM.

use jiffy_snapshot::{SnapshotError, Store};
use parking_lot::Mutex;
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// Overlays that wait.
const AHEAD: usize = 2;
/// Time after one was taken until others are made: guests that are coming up come first.
const DELAY: Duration = Duration::from_millis(30);

/// Overlays of one store.
#[derive(Debug, Clone, Default)]
pub(super) struct OverlaysAhead(Arc<Mutex<Vec<File>>>);

impl OverlaysAhead {
    /// Takes one that waits, or makes one.
    pub fn take(&self, store: &Store) -> Result<File, SnapshotError> {
        let (waiting, left) = {
            let mut files = self.0.lock();
            (files.pop(), files.len())
        };
        if left < AHEAD {
            let (overlays, store) = (self.clone(), store.clone());
            tokio::spawn(async move {
                sleep(DELAY).await;
                tokio::task::spawn_blocking(move || overlays.fill(&store));
            });
        }
        waiting.map_or_else(|| store.overlay(), Ok)
    }

    fn fill(&self, store: &Store) {
        while self.0.lock().len() < AHEAD {
            // Without one a guest makes its own, and says what is wrong.
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
    async fn overlays_wait_empty_and_nobody_gets_one_twice() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let overlays = OverlaysAhead::default();
        let mut taken = vec![overlays.take(&store).unwrap()];
        while overlays.0.lock().len() < AHEAD {
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
