//! Background thread that reclaims the disk space of removed snapshots.
//!
//! The files of a removed snapshot stay as long as a child needs them. If it has only one child,
//! the thread folds the removed snapshot into the child
//! ([`jiffy_engine_api::SnapshotFiles::prepare_fold`]): content that the child supersedes is
//! deleted, and all other content is copied. A sandbox that takes a snapshot at each step and
//! retains the last one therefore needs the space of its changes, and not of all its steps.
//!
//! No operation waits for the thread. It uses at most a quarter of one processor and copies at most
//! [`MAX_BYTES_PER_SECOND`]. It runs at normal priority: at a lower one, it could be preempted for
//! a long time while it holds a directory lock that operations wait for.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors.

use crate::sandboxes::operations::Operations;
use crate::sandboxes::{SandboxesInner, Snapshots};
use jiffy_engine_api::FoldPreparation;
use jiffy_proto::snapshot::FoldedLayers;
use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::iter;
use std::ops::ControlFlow;
use std::sync::Weak;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Time from the removal of a snapshot to its fold. Snapshots that are removed meanwhile are folded
/// in the same pass. Lineages that are removed completely need no fold.
const FOLD_DELAY: Duration = Duration::from_secs(3);
/// Time after which a rejected fold is retried with [`MAX_LATE_COPY`], unless the snapshot can be
/// folded more cheaply into its own child by then.
const LATE_DELAY: Duration = Duration::from_secs(20);
/// A fold is rejected if it would copy more than this number of bytes and also more than the
/// content of the child.
const MAX_COPY: u64 = 2 << 20;
/// Like [`MAX_COPY`], for a retry.
const MAX_LATE_COPY: u64 = 256 << 20;
/// Maximum number of bytes copied in a second.
const MAX_BYTES_PER_SECOND: u64 = 128 << 20;
/// Length of a pause relative to the work before it. A pause lasts at most [`MAX_PAUSE`].
const PAUSE_FACTOR: u32 = 3;
/// Maximum length of a pause.
const MAX_PAUSE: Duration = Duration::from_millis(100);
/// Maximum number of remembered rejections.
const MAX_REJECTIONS: usize = 10_000;
/// Maximum number of descendants of a folded snapshot whose guests are notified of the fold. Other
/// guests have the old files open until they stop.
const MAX_NOTIFIED_SNAPSHOTS: usize = 256;
/// Maximum number of notified guests of each snapshot.
const MAX_NOTIFIED_GUESTS: usize = 256;

/// Sender for the fold thread. The thread exits when the sandboxes are dropped.
pub(in crate::sandboxes) struct SnapshotFolder(Mutex<Sender<String>>);

/// Receiver of the fold thread, until it is started.
pub(in crate::sandboxes) type FoldQueue = Receiver<String>;

impl SnapshotFolder {
    pub fn new() -> (Self, FoldQueue) {
        let (sender, receiver) = channel();
        (Self(Mutex::new(sender)), receiver)
    }

    /// Queues the fold of the removed parent of `id` into `id`.
    pub fn enqueue(&self, id: &str) {
        // Ignore the error: without the thread the files remain until their child is removed.
        let _ = self.0.lock().send(id.to_owned());
    }
}

/// Delays of folds.
#[derive(Clone, Copy)]
struct Delays {
    fold: Duration,
    late: Duration,
}

/// Starts the fold thread. No delay of a fold is longer than `max_delay`.
pub(in crate::sandboxes) fn begin(
    inner: Weak<SandboxesInner>,
    queue: FoldQueue,
    max_delay: Duration,
) {
    let delays = Delays {
        fold: FOLD_DELAY.min(max_delay),
        late: LATE_DELAY.min(max_delay),
    };
    let thread = thread::Builder::new().name("snapshot-fold".to_owned());
    if let Err(e) = thread.spawn(move || serve(&inner, &queue, delays)) {
        tracing::warn!(error = %e, "cannot start the thread that reclaims snapshot space");
    }
}

/// Main loop of the thread. A fold that would copy too much is repeated later with a higher limit.
fn serve(inner: &Weak<SandboxesInner>, queue: &FoldQueue, delays: Delays) {
    let mut rejections = RejectedFolds::default();
    loop {
        let first = match rejections.next_late() {
            None => queue.recv().map_err(RecvTimeoutError::from),
            Some(due) => queue.recv_timeout(due.saturating_duration_since(Instant::now())),
        };
        let (ids, max_copy) = match first {
            Ok(first) => {
                // Wait for further snapshots to fold in the same pass.
                thread::sleep(delays.fold);
                (
                    iter::once(first).chain(queue.try_iter()).collect(),
                    MAX_COPY,
                )
            }
            Err(RecvTimeoutError::Timeout) => (rejections.take_late(), MAX_LATE_COPY),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        // `inner` is upgraded again for each snapshot, so that the thread keeps the sandboxes alive
        // for the folds of one snapshot at most.
        let Some(this) = inner.upgrade() else { return };
        let ids = Snapshots(&this).newest_first(ids);
        drop(this);
        for id in ids {
            let Some(inner) = inner.upgrade() else { return };
            let late = Instant::now() + delays.late;
            Snapshots(&inner).fold_older(&id, max_copy, &mut rejections, late);
        }
    }
}

/// Snapshots whose fold was rejected.
#[derive(Default)]
struct RejectedFolds {
    /// Parent and copy limit of the rejected fold of each snapshot. A rejection applies until the
    /// parent changes or the limit grows.
    folds: HashMap<String, (String, u64)>,
    /// Times at which rejected folds are retried with a larger limit.
    late: BTreeSet<(Instant, String)>,
}

impl RejectedFolds {
    fn contains(&self, id: &str, parent: &str, max_copy: u64) -> bool {
        let rejection = self.folds.get(id);
        rejection.is_some_and(|(of, limit)| of == parent && *limit >= max_copy)
    }

    /// Remembers that a fold was rejected, so that the host does not prepare it again and again.
    fn insert(&mut self, id: &str, parent: String, max_copy: u64, late: Instant) {
        // Forgetting rejections is harmless: the folds are prepared and rejected again.
        if self.folds.len() >= MAX_REJECTIONS {
            self.folds.clear();
            self.late.clear();
        }
        self.folds.insert(id.to_owned(), (parent, max_copy));
        if max_copy < MAX_LATE_COPY {
            self.late.insert((late, id.to_owned()));
        }
    }

    /// Time of the next retry.
    fn next_late(&self) -> Option<Instant> {
        self.late.first().map(|(due, _)| *due)
    }

    /// Removes and returns the snapshots whose retry is due.
    fn take_late(&mut self) -> BTreeSet<String> {
        // This key is greater than the keys of all retries that are due: an id is not empty.
        let coming = self.late.split_off(&(Instant::now(), String::new()));
        let due = std::mem::replace(&mut self.late, coming);
        due.into_iter().map(|(_, id)| id).collect()
    }
}

/// Limits the use of the processor and the disk by pauses after each copied piece and each fold.
struct Pace<'a> {
    operations: &'a Operations,
    piece_started_at: Instant,
}

impl Pace<'_> {
    /// Pauses after `bytes` were copied since the pause before.
    fn pause(&mut self, bytes: u64) -> ControlFlow<()> {
        if self.operations.is_closing() {
            return ControlFlow::Break(());
        }
        let worked = self.piece_started_at.elapsed();
        let micros = bytes.saturating_mul(1_000_000) / MAX_BYTES_PER_SECOND;
        // Two limits: the copy rate, and the share of the processor. The longer pause applies.
        let pause = Duration::from_micros(micros).saturating_sub(worked);
        thread::sleep(pause.max(worked * PAUSE_FACTOR).min(MAX_PAUSE));
        self.piece_started_at = Instant::now();
        ControlFlow::Continue(())
    }
}

impl Snapshots<'_> {
    /// Sorts snapshots, newest first, so that content that a newer snapshot supersedes is not
    /// copied.
    fn newest_first(self, ids: BTreeSet<String>) -> Vec<String> {
        let snapshots = self.0.catalog.read();
        let mut ids: Vec<String> = ids.into_iter().collect();
        ids.sort_by_cached_key(|id| Reverse(snapshots.get(id).map(|s| s.created_ms)));
        ids
    }

    /// Folds removed ancestors of `id` into `id`: first its parent, then the next older ancestor.
    /// Stops at an ancestor that has other users, or from which more bytes would be copied than
    /// both `max_copy` and the content of `id`. A rejected fold is retried at `late`.
    fn fold_older(self, id: &str, max_copy: u64, rejections: &mut RejectedFolds, late: Instant) {
        let started_at = Instant::now();
        let mut pace = Pace {
            operations: &self.0.operations,
            piece_started_at: started_at,
        };
        let mut folds = 0;
        let Ok(files) = self.0.snapshot_engines.files_of(id) else {
            return;
        };
        while let Some(parent) = files.parent(id) {
            if rejections.contains(id, &parent, max_copy) || !self.0.gc.is_foldable(&parent, id) {
                break;
            }
            // A snapshot that will be folded into its child gets no expensive copy.
            if max_copy == MAX_LATE_COPY && self.is_superseded(id) {
                break;
            }
            let fold = files.prepare_fold(id, max_copy, &mut |bytes| pace.pause(bytes));
            let fold = match fold {
                Ok(FoldPreparation::Ready(fold)) => fold,
                Ok(FoldPreparation::Refused) => {
                    rejections.insert(id, parent, max_copy, late);
                    break;
                }
                // `pace` has cancelled the fold for a shutdown, or the engine for a merge. A merge
                // combines a snapshot with its ancestors to shorten its lineage, and uses the same
                // files. The next periodic garbage collection, or the upkeep thread of the next
                // daemon, queues the fold again.
                Ok(FoldPreparation::Cancelled) => break,
                Err(e) => {
                    tracing::debug!(id, parent, error = %e, "cannot fold a removed snapshot");
                    break;
                }
            };
            match self.0.gc.commit_fold(fold, id) {
                // The disk space of the folded files is freed only when all guests have closed
                // them.
                Some(Ok(layers)) => self.notify_guests(id, &layers),
                Some(Err(e)) => {
                    tracing::warn!(id, parent, error = %e, "cannot complete the fold of a snapshot");
                    break;
                }
                // The parent has got another user since the check above.
                None => break,
            }
            folds += 1;
            if pace.pause(0).is_break() {
                break;
            }
        }
        if folds > 0 {
            self.measure(id);
            if self.0.catalog.get(id).is_some_and(|record| record.retained) {
                // The fold has replaced the files to which the former checksums belong.
                self.0.upkeep.enqueue_checksums(id);
            }
            let ms = started_at.elapsed().as_millis();
            tracing::debug!(id, folds, ms, "folded removed snapshots");
        }
    }

    /// Returns whether snapshot `id` can be folded into its child.
    fn is_superseded(self, id: &str) -> bool {
        let children: Vec<String> = {
            let snapshots = self.0.catalog.read();
            snapshots.children(id).map(str::to_owned).collect()
        };
        matches!(&*children, [child] if self.0.gc.is_foldable(id, child))
    }

    /// Notifies the guests whose lineage contains snapshot `id`, so that they close the folded
    /// files.
    fn notify_guests(self, id: &str, layers: &FoldedLayers) {
        let mut queue = VecDeque::from([id.to_owned()]);
        let mut notified = 0;
        while let Some(id) = queue.pop_front() {
            if notified == MAX_NOTIFIED_SNAPSHOTS {
                break;
            }
            notified += 1;
            for sandbox in self.0.indexes.users.some_of(&id, MAX_NOTIFIED_GUESTS) {
                let entry = self.0.entries.lock().get(&*sandbox).cloned();
                if let Some(guest) = entry.and_then(|entry| entry.guest()) {
                    guest.fold_layers(layers);
                }
            }
            let snapshots = self.0.catalog.read();
            queue.extend(snapshots.children(&id).map(str::to_owned));
        }
    }
}
