//! The thread that removes files of snapshots, so that no caller and no lock waits for them.

use super::super::SandboxesInner;
use super::super::snapshot_engine::SnapshotOnDisk;
use parking_lot::Mutex;
use std::iter;
use std::sync::Weak;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Time until files that could not be removed are tried again; doubled each time.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(50);
/// Longest time between two tries. Files that stay longer are left to periodic gc.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(10);
/// Longest time for which somebody waits for files that cannot be removed yet: a guest that ends
/// behind its answer holds what it ran from.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// The way to the thread, which ends with the sandboxes.
pub(in super::super) struct FileRemover(Mutex<Sender<Order>>);

/// Request to the thread.
pub(in super::super) enum Order {
    /// Removal of the files of these snapshots.
    Files(Vec<SnapshotOnDisk>),
    /// A word when what was ordered before is done, or `MAX_WAIT` is over.
    Done(oneshot::Sender<()>),
}

/// The other end, until the thread has begun.
pub(in super::super) type RemovalQueue = Receiver<Order>;

impl FileRemover {
    pub fn new() -> (Self, RemovalQueue) {
        let (orders, taken) = channel();
        (Self(Mutex::new(orders)), taken)
    }

    /// Queues the removal of the files of snapshots that have no record.
    pub fn remove(&self, snapshots: Vec<SnapshotOnDisk>) {
        // Ignore the error: without the thread periodic garbage collection removes the files.
        let _ = self.0.lock().send(Order::Files(snapshots));
    }

    /// Waits until all that was ordered is removed, for a while if it cannot be removed yet.
    pub async fn done(&self) {
        let (tell, done) = oneshot::channel();
        let _ = self.0.lock().send(Order::Done(tell));
        // Without the thread nothing is to be waited for.
        let _ = done.await;
    }
}

/// Begins the thread.
pub(in super::super) fn begin(inner: Weak<SandboxesInner>, orders: RemovalQueue) {
    let thread = std::thread::Builder::new().name("remover".to_owned());
    if let Err(e) = thread.spawn(move || serve(&inner, &orders)) {
        tracing::warn!("files of removed snapshots go with the next gc only: no thread: {e}");
    }
}

fn serve(inner: &Weak<SandboxesInner>, orders: &RemovalQueue) {
    // At the priority of all others: it holds locks of directories that they wait for.
    let mut left = Vec::new();
    let mut wait = FIRST_RETRY_DELAY;
    let mut waiting: Vec<(Instant, oneshot::Sender<()>)> = Vec::new();
    loop {
        let order = match left.is_empty() {
            true => orders.recv().map_err(RecvTimeoutError::from),
            false => {
                let longest = waiting
                    .first()
                    .map(|(since, _)| MAX_WAIT.saturating_sub(since.elapsed()));
                orders.recv_timeout(longest.map_or(wait, |longest| wait.min(longest)))
            }
        };
        wait = match order {
            Ok(order) => {
                for order in iter::once(order).chain(orders.try_iter()) {
                    match order {
                        Order::Files(snapshots) => left.extend(snapshots),
                        Order::Done(tell) => waiting.push((Instant::now(), tell)),
                    }
                }
                FIRST_RETRY_DELAY
            }
            Err(RecvTimeoutError::Timeout) => wait * 2,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let Some(inner) = inner.upgrade() else { return };
        remove_files(&inner, &mut left);
        for (_, tell) in waiting.extract_if(.., |(since, _)| {
            left.is_empty() || since.elapsed() >= MAX_WAIT
        }) {
            // One that does not wait any more needs no word.
            let _ = tell.send(());
        }
        if wait > MAX_RETRY_DELAY {
            left.clear();
        }
    }
}

/// Removes files of snapshots in the order in which the engines permit it. Snapshots whose files
/// cannot be removed yet remain in `snapshots`.
pub(super) fn remove_files(inner: &SandboxesInner, snapshots: &mut Vec<SnapshotOnDisk>) {
    loop {
        let before = snapshots.len();
        snapshots.retain(|snapshot| match inner.remove_files(snapshot) {
            Ok(()) => false,
            Err(e) => {
                let id = &snapshot.id;
                tracing::debug!(id, "cannot remove the files of a snapshot yet: {e}");
                true
            }
        });
        if snapshots.is_empty() || snapshots.len() == before {
            return;
        }
        // A parent that came before its children comes after them now.
        snapshots.reverse();
    }
}
