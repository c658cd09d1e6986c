//! Background work on snapshots, one at a time: writes the checksums of those that are kept, and
//! keeps in memory what the warm pool was restored from. Behind that it looks once at each snapshot
//! that an earlier daemon left: it compares its size with the disk, as a merge may have changed it
//! before the journal heard of it, and writes checksums that are missing.

use crate::START_DELAY;
use crate::sandboxes::{OperationError, Sandboxes, SandboxesInner, Snapshots, detached};
use jiffy_engine_api::{EngineError, VerifiedSnapshot};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Weak;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Snapshots of an earlier daemon that are looked at without a pause.
const LOOKS: usize = 16;
/// Pause after them, in times of how long they took, and the longest: on a busy host most of that
/// is waiting.
const LOOK_PAUSES: u32 = 9;
const MAX_LOOK_PAUSE: Duration = Duration::from_millis(10);
/// Of nice(2): background work yields to everybody.
const NICE: libc::c_int = 19;
/// `IOPRIO_WHO_PROCESS`, and the class `IOPRIO_CLASS_BE` with the lowest of its levels
/// (linux/ioprio.h).
const IOPRIO_PROCESS: libc::c_int = 1;
const IOPRIO_LAST: libc::c_int = (2 << 13) | 7;

/// The way to the caretaker's thread, which ends with the sandboxes.
pub(in crate::sandboxes) struct SnapshotUpkeep(Mutex<Sender<String>>);

/// The other end, until the thread has begun.
pub(in crate::sandboxes) type UpkeepQueue = Receiver<String>;

impl SnapshotUpkeep {
    pub fn new() -> (Self, UpkeepQueue) {
        let (orders, taken) = channel();
        (Self(Mutex::new(orders)), taken)
    }

    /// Has a snapshot sealed some time.
    pub fn seal(&self, id: &str) {
        // Without a caretaker there is nobody who could care.
        let _ = self.0.lock().send(id.to_owned());
    }
}

/// Begins the thread. `tend` is the time between two rounds to the warm pool's snapshots.
pub(in crate::sandboxes) fn begin(
    inner: Weak<SandboxesInner>,
    orders: UpkeepQueue,
    tend: Duration,
) {
    let work = move || serve(&inner, &orders, tend);
    let thread = std::thread::Builder::new().name("caretaker".to_owned());
    if let Err(e) = thread.spawn(work) {
        tracing::warn!("snapshots are not sealed, the warm pool is not tended: no thread: {e}");
    }
}

fn serve(inner: &Weak<SandboxesInner>, orders: &UpkeepQueue, tend: Duration) {
    lower_priority();
    let mut next = Instant::now() + tend;
    // Position among the snapshots that were there at the start.
    let mut looked_at = Some(String::new());
    // Behind what the first clients ask for.
    let mut look = Instant::now() + START_DELAY.min(tend);
    loop {
        let wanted = looked_at.as_ref().map_or(next, |_| next.min(look));
        match orders.recv_timeout(wanted.saturating_duration_since(Instant::now())) {
            Ok(id) => {
                std::thread::sleep(START_DELAY.min(tend));
                let Some(inner) = inner.upgrade() else { return };
                // One that was removed meanwhile is no failure.
                if let Err(e) = inner
                    .snapshot_engines
                    .files_of(&id)
                    .and_then(|files| files.write_checksums(&id))
                {
                    tracing::debug!(id, "a snapshot was not sealed: {e}");
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if Instant::now() >= look
            && let Some(after) = looked_at.take()
        {
            let began = Instant::now();
            looked_at = look_at_some(inner, &after);
            let pause = began.elapsed() * LOOK_PAUSES;
            look = Instant::now() + pause.min(MAX_LOOK_PAUSE);
        }
        if Instant::now() >= next {
            let Some(inner) = inner.upgrade() else { return };
            tend_pool(&Sandboxes(inner));
            next = Instant::now() + tend;
        }
    }
}

/// Looks at the snapshots behind `after`. Returns the last of them; none: there are no more.
fn look_at_some(inner: &Weak<SandboxesInner>, after: &str) -> Option<String> {
    let inner = inner.upgrade()?;
    let ids = inner.catalog.read().following(after, LOOKS);
    for id in &ids {
        Snapshots(&inner).measure(id);
        let kept = inner.catalog.read().get(id).is_some_and(|s| s.kept);
        // An earlier daemon may not have folded all that it removed.
        inner.folder.enqueue(id);
        // Checksums that are there stay as they are.
        if kept
            && let Err(e) = inner
                .snapshot_engines
                .files_of(id)
                .and_then(|files| files.write_checksums(id))
        {
            tracing::debug!(id, "a snapshot was not sealed: {e}");
        }
    }
    ids.into_iter().next_back()
}

fn tend_pool(sandboxes: &Sandboxes) {
    for id in sandboxes.0.pool.snapshots() {
        // Held on to, or it could be removed under our hands.
        let Ok((snapshot, _pin)) = sandboxes.snapshots().pin(&id) else {
            continue;
        };
        if let Err(e) = sandboxes.prefetch(&snapshot.id) {
            tracing::warn!(
                id,
                "the warm pool's snapshot could not be kept in memory: {e}"
            );
        }
    }
}

impl Sandboxes {
    fn prefetch(&self, id: &str) -> Result<(), EngineError> {
        self.0.snapshot_engines.files_of(id)?.prefetch(id)
    }
}

/// Lowers the processor and I/O priority of the calling thread. A failure costs other threads a
/// little time.
fn lower_priority() {
    // SAFETY: system calls without pointers that concern this thread only.
    unsafe {
        let thread = libc::gettid();
        libc::setpriority(libc::PRIO_PROCESS, thread.unsigned_abs(), NICE);
        libc::syscall(libc::SYS_ioprio_set, IOPRIO_PROCESS, thread, IOPRIO_LAST);
    }
}

impl Snapshots<'_> {
    /// Compares a snapshot, and all it needs, with their seals. Reads all of it. Those that are
    /// damaged are fetched anew if the store has them.
    pub async fn verify(self, id: &str) -> Result<Vec<VerifiedSnapshot>, OperationError> {
        let this = Sandboxes(self.0.clone());
        let (snapshot, pin) = self.pin_stored(id).await?;
        detached(async move {
            let _pin = pin;
            let (snapshots, id) = (this.snapshots(), snapshot.id);
            let mut found = snapshots.verify_files(&id).await;
            let damaged = found.iter().flatten().filter(|one| !one.damaged.is_empty());
            let damaged = damaged.map(|one| (one.id.clone(), describe(one)));
            let damaged: BTreeMap<String, String> = damaged.collect();
            if found.is_ok() && damaged.is_empty() {
                return found;
            }
            let mended = match snapshots.mend(&id, damaged).await {
                Ok(mended) => mended,
                Err(e) => {
                    tracing::warn!(id, "a damaged snapshot was not fetched anew: {e}");
                    return found;
                }
            };
            if !mended.is_empty() {
                snapshots.seal_now(&id).await;
                found = snapshots.verify_files(&id).await;
            }
            for one in found.iter_mut().flatten() {
                one.mended = mended.contains_key(&one.id);
            }
            found
        })
        .await
    }

    async fn seal_now(self, id: &str) {
        let (inner, id) = (self.0.clone(), id.to_owned());
        let sealing = tokio::task::spawn_blocking(move || {
            if let Err(e) = inner
                .snapshot_engines
                .files_of(&id)
                .and_then(|files| files.write_checksums(&id))
            {
                tracing::warn!(id, "a snapshot that was fetched anew was not sealed: {e}");
            }
        });
        // One that is lost leaves it without a seal, which its verification tells.
        let _ = sealing.await;
    }

    async fn verify_files(self, id: &str) -> Result<Vec<VerifiedSnapshot>, OperationError> {
        let (inner, owned) = (self.0.clone(), id.to_owned());
        let work = tokio::task::spawn_blocking(move || {
            inner.snapshot_engines.files_of(&owned)?.verify(&owned)
        });
        let done = work
            .await
            .map_err(|e| OperationError::Lost(e.to_string()))?;
        done.map_err(OperationError::engine(format!("verify snapshot {id}")))
    }
}

/// Names the first damage of a snapshot.
fn describe(verified: &VerifiedSnapshot) -> String {
    match verified.damaged.first() {
        Some(first) => format!("{} differs from its checksum", first.file),
        None => String::new(),
    }
}
