//! Background thread that reclaims the disk space of removed snapshots.
//!
//! A removed snapshot stays as long as another one lies on its files. If that is one only, the
//! thread folds the removed snapshot into it ([`jiffy_engine::Engine::prepare_fold`]): content that
//! was superseded goes, and what remains moves. A sandbox that takes a snapshot at each step and
//! keeps the last one therefore needs the space of its changes, and not of all its steps.
//!
//! No operation waits for the thread. It uses at most half of one processor, at the lowest priority,
//! and copies at most [`MAX_BYTES_PER_SECOND`].

use super::snapshot_upkeep::lower_priority;
use super::{SandboxesInner, Snapshots};
use jiffy_engine::{Engine, FoldPreparation, Guest};
use jiffy_proto::snapshot::FoldedLayers;
use parking_lot::Mutex;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::iter;
use std::ops::ControlFlow;
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Time from the removal of a snapshot to its fold. What is removed meanwhile is folded together
/// with it, and what goes as a whole needs no fold.
const FOLD_DELAY: Duration = Duration::from_secs(3);
/// Maximum number of bytes copied in a second.
const MAX_BYTES_PER_SECOND: u64 = 128 << 20;
/// Longest single pause. A fold that is not yet complete occupies the disk space of its copy.
const MAX_PAUSE: Duration = Duration::from_millis(100);
/// Maximum number of snapshots whose fold was refused that are remembered.
const MAX_REFUSED: usize = 10_000;
/// Maximum number of snapshots above a folded one whose guests are told about the fold. Others keep
/// the old files open until they end.
const MAX_TOLD_SNAPSHOTS: usize = 256;
/// Maximum number of guests of each of them that are told.
const MAX_TOLD_GUESTS: usize = 256;

/// Sender for the thread, which exits when the sandboxes are dropped.
pub(super) struct SnapshotFolder(Mutex<Sender<String>>);

/// Receiver of the thread, until it is started.
pub(super) type FoldQueue = Receiver<String>;

impl SnapshotFolder {
    pub fn new() -> (Self, FoldQueue) {
        let (sender, receiver) = channel();
        (Self(Mutex::new(sender)), receiver)
    }

    /// Queues the fold of the snapshot below `id` into `id`.
    pub fn enqueue(&self, id: &str) {
        // Without the thread the files stay until the snapshot above them is removed.
        let _ = self.0.lock().send(id.to_owned());
    }
}

/// Starts the thread. Folds begin at most `delay` after they were queued.
pub(super) fn begin<E: Engine>(inner: Weak<SandboxesInner<E>>, queue: FoldQueue, delay: Duration) {
    let delay = FOLD_DELAY.min(delay);
    let thread = thread::Builder::new().name("snapshot-fold".to_owned());
    if let Err(e) = thread.spawn(move || serve(&inner, &queue, delay)) {
        tracing::warn!(error = %e, "cannot start the thread that reclaims snapshot space");
    }
}

fn serve<E: Engine>(inner: &Weak<SandboxesInner<E>>, queue: &FoldQueue, delay: Duration) {
    lower_priority();
    let mut refused = HashMap::new();
    while let Ok(first) = queue.recv() {
        thread::sleep(delay);
        let ids: BTreeSet<String> = iter::once(first).chain(queue.try_iter()).collect();
        for id in ids {
            let Some(inner) = inner.upgrade() else { return };
            Snapshots(&inner).fold_below(&id, &mut refused);
        }
        if refused.len() > MAX_REFUSED {
            refused.clear();
        }
    }
}

/// Limits of a fold: pauses after each piece that was copied.
struct Pace<'a> {
    closing: &'a AtomicBool,
    piece_began: Instant,
}

impl Pace<'_> {
    fn copied(&mut self, bytes: u64) -> ControlFlow<()> {
        if self.closing.load(Ordering::Acquire) {
            return ControlFlow::Break(());
        }
        let worked = self.piece_began.elapsed();
        let micros = bytes.saturating_mul(1_000_000) / MAX_BYTES_PER_SECOND;
        let left = Duration::from_micros(micros).saturating_sub(worked);
        thread::sleep(left.max(worked).min(MAX_PAUSE));
        self.piece_began = Instant::now();
        ControlFlow::Continue(())
    }
}

impl<E: Engine> Snapshots<'_, E> {
    /// Folds the removed snapshots directly below `id` into it, as far as they serve nothing else.
    /// `refused` remembers snapshots with the parent that the engine did not fold: the content of
    /// both has not changed since.
    fn fold_below(self, id: &str, refused: &mut HashMap<String, String>) {
        let began = Instant::now();
        let mut folds = 0;
        while let Some(parent) = self.0.engine.parent_on_disk(id) {
            if refused.get(id) == Some(&parent) || !self.is_foldable(&parent, id) {
                break;
            }
            let mut pace = Pace {
                closing: &self.0.closing,
                piece_began: Instant::now(),
            };
            let fold = self
                .0
                .engine
                .prepare_fold(id, &mut |bytes| pace.copied(bytes));
            let fold = match fold {
                Ok(FoldPreparation::Ready(fold)) => fold,
                Ok(FoldPreparation::Refused) => {
                    refused.insert(id.to_owned(), parent);
                    break;
                }
                // The next periodic gc queues it again.
                Ok(FoldPreparation::Cancelled) => break,
                Err(e) => {
                    tracing::debug!(id, parent, error = %e, "cannot fold a removed snapshot");
                    break;
                }
            };
            match self.commit_fold(fold, id) {
                Some(Ok(layers)) => self.tell_guests(id, &layers),
                Some(Err(e)) => {
                    tracing::warn!(id, parent, error = %e, "cannot complete the fold of a snapshot");
                    break;
                }
                None => break,
            }
            folds += 1;
        }
        if folds > 0 {
            self.measure(id);
            if self.known(id).is_some_and(|record| record.kept) {
                self.0.upkeep.seal(id);
            }
            let ms = began.elapsed().as_millis();
            tracing::debug!(id, folds, ms, "folded removed snapshots");
        }
    }

    /// Has the guests that run on snapshot `id` close the files that were folded.
    fn tell_guests(self, id: &str, layers: &FoldedLayers) {
        let mut queue = VecDeque::from([id.to_owned()]);
        let mut told = 0;
        while let Some(id) = queue.pop_front() {
            if told == MAX_TOLD_SNAPSHOTS {
                break;
            }
            told += 1;
            for sandbox in self.0.indexes.users.some_of(&id, MAX_TOLD_GUESTS) {
                let entry = self.0.entries.lock().get(&*sandbox).cloned();
                if let Some(guest) = entry.and_then(|entry| entry.guest()) {
                    guest.fold_layers(layers);
                }
            }
            let snapshots = self.0.snapshot_index.lock();
            queue.extend(snapshots.children(&id).map(str::to_owned));
        }
    }
}
