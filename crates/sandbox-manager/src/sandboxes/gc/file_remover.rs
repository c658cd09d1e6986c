//! Thread that removes the files of snapshots, so that no caller and no lock waits for the disk.

use super::super::snapshot_engine::{SnapshotEngines, SnapshotOnDisk};
use parking_lot::Mutex;
use std::iter;
use std::sync::Weak;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Delay of the first retry if files cannot be removed. The delay doubles with each further retry.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(50);
/// Maximum delay between two retries. Files that stay longer are left to periodic garbage
/// collection.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(10);
/// Maximum time that a caller waits for files that cannot be removed yet: a guest holds its files
/// until its process has exited.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// Sender for the thread. The thread exits when the engines are dropped.
pub(super) struct FileRemover(Mutex<Sender<Request>>);

/// Request to the thread.
enum Request {
    /// Remove the files of these snapshots.
    Files(Vec<SnapshotOnDisk>),
    /// Notify the sender when all earlier requests are complete, or after `MAX_WAIT`.
    Done(oneshot::Sender<()>),
}

impl FileRemover {
    /// Starts the thread.
    pub fn start(engines: Weak<SnapshotEngines>) -> Self {
        let (sender, requests) = channel();
        let thread = std::thread::Builder::new().name("remover".to_owned());
        if let Err(e) = thread.spawn(move || serve(&engines, &requests)) {
            tracing::warn!(
                error = %e, "cannot start the thread that removes files, leaving them to periodic gc"
            );
        }
        Self(Mutex::new(sender))
    }

    /// Queues the removal of the files of snapshots that have no record.
    pub fn remove(&self, snapshots: Vec<SnapshotOnDisk>) {
        // Ignore the error: without the thread periodic garbage collection removes the files.
        let _ = self.0.lock().send(Request::Files(snapshots));
    }

    /// Waits until all queued files are removed. Waits at most `MAX_WAIT` for files in use.
    pub async fn done(&self) {
        let (notify, done) = oneshot::channel();
        let _ = self.0.lock().send(Request::Done(notify));
        // Ignore the error: the thread has exited, and removes no files.
        let _ = done.await;
    }
}

/// Main loop of the thread. Files in use are retried with increasing delays.
fn serve(engines: &Weak<SnapshotEngines>, requests: &Receiver<Request>) {
    // The thread keeps its normal priority: it holds directory locks that other threads wait for.
    let mut remaining = Vec::new();
    let mut wait = FIRST_RETRY_DELAY;
    let mut waiting: Vec<(Instant, oneshot::Sender<()>)> = Vec::new();
    loop {
        let request = if remaining.is_empty() {
            requests.recv().map_err(RecvTimeoutError::from)
        } else {
            // The caller that has waited longest comes first, so no other limit ends earlier.
            let limit = waiting
                .first()
                .map(|(since, _)| MAX_WAIT.saturating_sub(since.elapsed()));
            requests.recv_timeout(limit.map_or(wait, |limit| wait.min(limit)))
        };
        wait = match request {
            Ok(request) => {
                for request in iter::once(request).chain(requests.try_iter()) {
                    match request {
                        Request::Files(snapshots) => remaining.extend(snapshots),
                        Request::Done(notify) => waiting.push((Instant::now(), notify)),
                    }
                }
                FIRST_RETRY_DELAY
            }
            // The wait is doubled before the attempt below, and reset by the next request.
            Err(RecvTimeoutError::Timeout) => wait * 2,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let Some(engines) = engines.upgrade() else {
            return;
        };
        remove_files(&engines, &mut remaining);
        for (_, notify) in waiting.extract_if(.., |(since, _)| {
            remaining.is_empty() || since.elapsed() >= MAX_WAIT
        }) {
            // Ignore the error: the caller stopped waiting.
            let _ = notify.send(());
        }
        // Periodic garbage collection removes these files later.
        if wait > MAX_RETRY_DELAY {
            remaining.clear();
        }
    }
}

/// Removes the files of snapshots in an order that the engines permit: children before their
/// parents. Snapshots whose files cannot be removed yet remain in `snapshots`.
pub(super) fn remove_files(engines: &SnapshotEngines, snapshots: &mut Vec<SnapshotOnDisk>) {
    loop {
        let before = snapshots.len();
        snapshots.retain(|snapshot| match engines.remove_files(snapshot) {
            Ok(()) => false,
            Err(e) => {
                let id = &snapshot.id;
                tracing::debug!(id, error = %e, "cannot remove the files of a snapshot yet");
                true
            }
        });
        // No progress: the remaining files are in use, or others depend on them.
        if snapshots.is_empty() || snapshots.len() == before {
            return;
        }
        // The order of the snapshots is unknown. In reverse, a child that came after its parent
        // comes first.
        snapshots.reverse();
    }
}
