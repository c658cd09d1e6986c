//! Background thread for snapshots. It writes the checksums of retained snapshots, and prefetches
//! the snapshots of the warm pool.
//!
//! With lower priority it checks each snapshot of an earlier daemon once: it compares the recorded
//! size with the disk, and writes missing checksums. The size may differ if the daemon crashed
//! between a merge and the write to the journal.
//!
//! - The *warm pool* has guests that were started in advance and wait for a create.
//! - A *retained* snapshot stays although no sandbox or snapshot descends from it.
//! - To *fold* a removed snapshot is to move the content that its only child needs into the child,
//!   and to delete the other files of the removed snapshot.
//!
//! [`Snapshots::verify`] does not run on the thread, but in the task of its caller.

use crate::START_DELAY;
use crate::sandboxes::{OperationError, Sandboxes, SandboxesInner, Snapshots, detached};
use jiffy_engine_api::{EngineError, VerifiedSnapshot};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Weak;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Number of snapshots of an earlier daemon that are checked between two pauses.
const CHECKS: usize = 16;
/// Length of a pause relative to the checks before it, up to [`MAX_CHECK_PAUSE`]: on a busy host
/// the checks mostly wait.
const CHECK_PAUSE_FACTOR: u32 = 9;
/// Maximum length of a pause.
const MAX_CHECK_PAUSE: Duration = Duration::from_millis(10);
/// Priority for nice(2): background work yields to all other threads.
const NICE: libc::c_int = 19;
/// `IOPRIO_WHO_PROCESS`, and the class `IOPRIO_CLASS_BE` with the lowest of its levels
/// (linux/ioprio.h).
const IOPRIO_PROCESS: libc::c_int = 1;
const IOPRIO_LAST: libc::c_int = (2 << 13) | 7;

/// Sender for the upkeep thread. The thread exits when the sandboxes are dropped.
pub(in crate::sandboxes) struct SnapshotUpkeep(Mutex<Sender<String>>);

/// Receiver of the upkeep thread, until it is started.
pub(in crate::sandboxes) type UpkeepQueue = Receiver<String>;

impl SnapshotUpkeep {
    pub fn new() -> (Self, UpkeepQueue) {
        let (sender, receiver) = channel();
        (Self(Mutex::new(sender)), receiver)
    }

    /// Queues a snapshot for checksumming.
    pub fn enqueue_checksums(&self, id: &str) {
        // Ignore the error: the thread has exited.
        let _ = self.0.lock().send(id.to_owned());
    }
}

/// Starts the upkeep thread. `interval` is the time between two prefetches for the warm pool.
pub(in crate::sandboxes) fn begin(
    inner: Weak<SandboxesInner>,
    queue: UpkeepQueue,
    interval: Duration,
) {
    let work = move || serve(&inner, &queue, interval);
    let thread = std::thread::Builder::new().name("upkeep".to_owned());
    if let Err(e) = thread.spawn(work) {
        tracing::warn!(error = %e, "cannot start the thread for checksums and prefetches");
    }
}

/// Main loop of the thread: writes checksums of queued snapshots, checks snapshots of an earlier
/// daemon in small steps, and prefetches the snapshots of the warm pool.
fn serve(inner: &Weak<SandboxesInner>, queue: &UpkeepQueue, interval: Duration) {
    lower_priority();
    let mut next = Instant::now() + interval;
    // Id of the last checked snapshot. `None` once all snapshots that existed at the start are
    // checked.
    let mut checked = Some(String::new());
    // The first requests of clients come before the checks.
    let mut next_check = Instant::now() + START_DELAY.min(interval);
    loop {
        let timeout = checked.as_ref().map_or(next, |_| next.min(next_check));
        match queue.recv_timeout(timeout.saturating_duration_since(Instant::now())) {
            Ok(id) => {
                // A new snapshot is not read while clients are likely to use the sandbox.
                std::thread::sleep(START_DELAY.min(interval));
                let Some(inner) = inner.upgrade() else { return };
                // The snapshot may have been removed meanwhile.
                if let Err(e) = inner
                    .snapshot_engines
                    .files_of(&id)
                    .and_then(|files| files.write_checksums(&id))
                {
                    tracing::debug!(id, error = %e, "cannot write the checksums of a snapshot");
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if Instant::now() >= next_check
            && let Some(after) = checked.take()
        {
            let started_at = Instant::now();
            // Check in small steps, so that a request for checksums waits for one step only.
            checked = check_some(inner, &after);
            let pause = started_at.elapsed() * CHECK_PAUSE_FACTOR;
            next_check = Instant::now() + pause.min(MAX_CHECK_PAUSE);
        }
        if Instant::now() >= next {
            let Some(inner) = inner.upgrade() else { return };
            prefetch_pool(&Sandboxes(inner));
            next = Instant::now() + interval;
        }
    }
}

/// Checks the snapshots that follow `after`. Returns the last of them. `None` at the end.
fn check_some(inner: &Weak<SandboxesInner>, after: &str) -> Option<String> {
    let inner = inner.upgrade()?;
    let ids = inner.catalog.read().following(after, CHECKS);
    for id in &ids {
        Snapshots(&inner).measure(id);
        let is_retained = inner.catalog.read().get(id).is_some_and(|s| s.retained);
        // If the parent of this snapshot was removed, the previous daemon may have exited before it
        // folded the parent into this snapshot.
        inner.folder.enqueue(id);
        // Existing checksums are not written again.
        if is_retained
            && let Err(e) = inner
                .snapshot_engines
                .files_of(id)
                .and_then(|files| files.write_checksums(id))
        {
            tracing::debug!(id, error = %e, "cannot write the checksums of a snapshot");
        }
    }
    ids.into_iter().next_back()
}

/// Reads the snapshots of the warm pool into the page cache.
fn prefetch_pool(sandboxes: &Sandboxes) {
    for id in sandboxes.0.pool.snapshots() {
        // Pin the snapshot, so that it is not removed during the prefetch.
        let Ok((snapshot, _pin)) = sandboxes.snapshots().pin(&id) else {
            continue;
        };
        if let Err(e) = sandboxes.prefetch(&snapshot.id) {
            tracing::warn!(
                id,
                error = %e, "cannot prefetch a snapshot of the warm pool"
            );
        }
    }
}

impl Sandboxes {
    fn prefetch(&self, id: &str) -> Result<(), EngineError> {
        self.0.snapshot_engines.files_of(id)?.prefetch(id)
    }
}

/// Lowers the processor and I/O priority of the calling thread. Errors are ignored: the thread then
/// has the priority of all others.
fn lower_priority() {
    // SAFETY: system calls without pointers that concern this thread only.
    unsafe {
        let thread = libc::gettid();
        libc::setpriority(libc::PRIO_PROCESS, thread.unsigned_abs(), NICE);
        libc::syscall(libc::SYS_ioprio_set, IOPRIO_PROCESS, thread, IOPRIO_LAST);
    }
}

impl Snapshots<'_> {
    /// Compares the files of a snapshot and of its ancestors with their checksums. Reads all of
    /// them. Damaged snapshots are fetched again if the store has them.
    pub async fn verify(self, id: &str) -> Result<Vec<VerifiedSnapshot>, OperationError> {
        let this = Sandboxes(self.0.clone());
        let (snapshot, pin) = self.pin_stored(id).await?;
        detached(async move {
            let _pin = pin;
            let (snapshots, id) = (this.snapshots(), snapshot.id);
            let mut verified = snapshots.verify_files(&id).await;
            let damaged = verified
                .iter()
                .flatten()
                .filter(|snapshot| !snapshot.damaged.is_empty());
            let damaged = damaged.map(|snapshot| (snapshot.id.clone(), describe(snapshot)));
            let damaged: BTreeMap<String, String> = damaged.collect();
            // All files are intact. After a failed verification, `repair` searches for the damage.
            if verified.is_ok() && damaged.is_empty() {
                return verified;
            }
            let repaired = match snapshots.repair(&id, damaged).await {
                Ok(repaired) => repaired,
                Err(e) => {
                    tracing::warn!(id, error = %e, "cannot fetch a damaged snapshot again");
                    return verified;
                }
            };
            // The fetched files have no checksums on this host yet.
            if !repaired.is_empty() {
                snapshots.write_checksums_now(&id).await;
                verified = snapshots.verify_files(&id).await;
            }
            for snapshot in verified.iter_mut().flatten() {
                snapshot.repaired = repaired.contains_key(&snapshot.id);
            }
            verified
        })
        .await
    }

    /// Writes the checksums of a snapshot. Only logs a failure.
    async fn write_checksums_now(self, id: &str) {
        let (inner, id) = (self.0.clone(), id.to_owned());
        let writing = tokio::task::spawn_blocking(move || {
            if let Err(e) = inner
                .snapshot_engines
                .files_of(&id)
                .and_then(|files| files.write_checksums(&id))
            {
                tracing::warn!(id, error = %e, "cannot write the checksums of a repaired snapshot");
            }
        });
        // Ignore a lost task: the verification reports missing checksums.
        let _ = writing.await;
    }

    async fn verify_files(self, id: &str) -> Result<Vec<VerifiedSnapshot>, OperationError> {
        let (inner, owned) = (self.0.clone(), id.to_owned());
        let work = tokio::task::spawn_blocking(move || {
            inner.snapshot_engines.files_of(&owned)?.verify(&owned)
        });
        work.await
            .map_err(|e| OperationError::Lost(e.to_string()))?
            .map_err(OperationError::engine(format!("verify snapshot {id}")))
    }
}

/// Describes the first damage of a snapshot.
fn describe(verified: &VerifiedSnapshot) -> String {
    match verified.damaged.first() {
        Some(first) => format!("{} differs from its checksum", first.file),
        None => String::new(),
    }
}
