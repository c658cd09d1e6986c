//! Queues of snapshots to upload to the store and of copies to remove from it. The upload task
//! takes its work from them.
//!
//! The *head* of a sandbox is the record in the store that decides which host of a fleet may run
//! the sandbox.
//!
//! A *tenant* is an owner of snapshots in the store. A *layer* is the part of a memory or disk that
//! one snapshot stores. A *stock template* is a template whose recipe Jiffy contains.

use crate::snapshot::Snapshot;
use crate::store_copies::StoreRetraction;
use jiffy_api_types::SnapshotPurpose;
use jiffy_store::host::RemoteStore;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};

/// Maximum number of concurrent uploads. Each owner has at most one.
const MAX_UPLOADS: usize = 4;
/// Delay after the first failure, doubled after each further one up to [`MAX_RETRY_DELAY`].
const FIRST_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Maximum delay after a failure.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);

/// Uploads of a host.
pub(in crate::sandboxes) struct Uploads {
    /// Store of the uploads. `None` if snapshots stay on this host.
    pub remote: Option<Arc<RemoteStore>>,
    /// Returns whether all tenants of the store share the snapshots of a template.
    is_stock: fn(&str) -> bool,
    queue: Mutex<UploadQueue>,
    /// Notified when an upload is queued or has ended.
    pub wake: Arc<Notify>,
    /// Notified when a removal is queued or the store is reachable again.
    pub wake_retractions: Arc<Notify>,
    /// Wakes the task that registers this host in the store as a *reader* of layers: of the layers
    /// that still contain memory of its snapshots. Notified when these layers may have changed.
    pub wake_readers: Arc<Notify>,
    /// Notified when an upload has ended, with any result.
    pub ended: watch::Sender<()>,
    /// Held while a shared snapshot is pushed, since uploads of several owners may push the same
    /// one.
    pub sharing: tokio::sync::Mutex<()>,
    pub counters: UploadCounters,
}

/// Counters since the start of the daemon.
#[derive(Default)]
// Counters are read only for metrics, so relaxed access suffices.
pub(in crate::sandboxes) struct UploadCounters {
    pub uploads: AtomicU64,
    pub failures: AtomicU64,
    pub chunks: AtomicU64,
    pub new_chunks: AtomicU64,
    /// Damaged snapshots that were fetched again.
    pub repaired: AtomicU64,
    /// Damaged snapshots that could not be fetched again.
    pub failed_repairs: AtomicU64,
}

/// Uploads to the store and removals from it that are not done.
#[derive(Default)]
struct UploadQueue {
    /// Uploads by id of the snapshot.
    uploads: BTreeMap<String, QueuedUpload>,
    /// Copies to remove from the store.
    retractions: VecDeque<StoreRetraction>,
}

/// Upload that is queued or in flight.
struct QueuedUpload {
    /// API key that owns the snapshot. `None` for the owner of the host.
    owner: Option<String>,
    /// Number of failed attempts since the last success.
    failures: u32,
    /// Latest error, until the next success.
    error: Option<String>,
    /// Earliest time of the next attempt.
    due: Instant,
    /// Cancels an upload in flight. `None` if the upload is queued.
    cancel: Option<watch::Sender<bool>>,
}

/// End of an upload.
pub(super) enum UploadEnd {
    /// The snapshot is in the store.
    Stored,
    /// The upload was cancelled, or the snapshot was removed.
    Dropped,
    /// The upload failed and is retried later.
    Failed(String),
}

impl Uploads {
    /// Creates the queue with the removals that an earlier daemon did not complete.
    pub fn new(
        remote: Option<Arc<RemoteStore>>,
        is_stock: fn(&str) -> bool,
        retractions: Vec<StoreRetraction>,
    ) -> Self {
        let queue = UploadQueue {
            retractions: retractions.into(),
            ..UploadQueue::default()
        };
        Self {
            remote,
            is_stock,
            queue: Mutex::new(queue),
            wake: Arc::default(),
            wake_retractions: Arc::default(),
            wake_readers: Arc::default(),
            ended: watch::Sender::default(),
            sharing: tokio::sync::Mutex::default(),
            counters: UploadCounters::default(),
        }
    }

    /// Returns whether all tenants may read the snapshot: it belongs to a booted stock template.
    pub fn is_shared(&self, record: &Snapshot) -> bool {
        record.purpose == SnapshotPurpose::Template
            && record.parent.is_none()
            && (self.is_stock)(&record.template)
    }

    /// Queues the upload of snapshot `id`. A queued retry becomes due at once.
    pub fn enqueue(&self, id: &str, owner: Option<&str>) {
        if self.remote.is_none() {
            return;
        }
        let now = Instant::now();
        let mut queue = self.queue.lock();
        let upload = queue.uploads.entry(id.to_owned());
        let upload = upload.or_insert_with(|| QueuedUpload {
            owner: owner.map(str::to_owned),
            failures: 0,
            error: None,
            due: now,
            cancel: None,
        });
        // A client that waits must not wait for the delay of a retry.
        upload.due = upload.due.min(now);
        drop(queue);
        self.wake.notify_one();
    }

    /// Removes snapshot `id` from the queue, or cancels its upload in flight, which then ends with
    /// [`UploadEnd::Dropped`].
    pub fn cancel(&self, id: &str) {
        let mut queue = self.queue.lock();
        match queue.uploads.get(id).map(|upload| &upload.cancel) {
            // The entry stays until the upload has ended, so that no second upload starts.
            Some(Some(cancel)) => drop(cancel.send_replace(true)),
            Some(None) => drop(queue.uploads.remove(id)),
            None => {}
        }
        drop(queue);
        self.ended.send_replace(());
    }

    /// Queues copies for removal from the store. The journal must already contain them.
    pub fn retract(&self, copies: Vec<StoreRetraction>) {
        if !copies.is_empty() {
            self.queue.lock().retractions.extend(copies);
            self.wake_retractions.notify_one();
        }
    }

    /// Returns whether snapshot `id` is queued or being uploaded.
    pub fn is_queued(&self, id: &str) -> bool {
        self.queue.lock().uploads.contains_key(id)
    }

    /// Returns the numbers of queued uploads and of uploads in flight.
    pub fn counts(&self) -> (usize, usize) {
        let queue = self.queue.lock();
        let in_flight = queue.uploads.values().filter(|u| u.cancel.is_some());
        let in_flight = in_flight.count();
        (queue.uploads.len() - in_flight, in_flight)
    }

    /// Returns the number of copies that are still to be removed.
    pub fn retractions(&self) -> usize {
        self.queue.lock().retractions.len()
    }

    /// Returns the number of failed attempts at snapshot `id`, and the latest error.
    pub(super) fn failure(&self, id: &str) -> (u32, Option<String>) {
        let queue = self.queue.lock();
        let upload = queue.uploads.get(id);
        upload.map_or((0, None), |upload| (upload.failures, upload.error.clone()))
    }

    /// Marks the uploads to start now as in flight, one of each owner. Returns them, and the time
    /// at which the next upload is due.
    pub(super) fn begin_due(&self) -> (Vec<(String, watch::Receiver<bool>)>, Option<Instant>) {
        let now = Instant::now();
        let mut queue = self.queue.lock();
        let running = queue.uploads.values().filter(|u| u.cancel.is_some());
        // Each owner has one upload in flight, so that an owner with many snapshots does not delay
        // others.
        let mut busy: HashSet<Option<String>> = running.map(|u| u.owner.clone()).collect();
        let mut waiting: Vec<_> = queue
            .uploads
            .iter_mut()
            .filter(|(_, upload)| upload.cancel.is_none())
            .collect();
        // The upload that has been due for the longest time starts first.
        waiting.sort_by_key(|(_, upload)| upload.due);
        let mut started = Vec::new();
        let mut next = None;
        for (id, upload) in waiting {
            if upload.due > now {
                next = Some(upload.due);
                break;
            }
            // An upload that must wait for another is started when that one ends, by `wake`.
            if busy.len() < MAX_UPLOADS && busy.insert(upload.owner.clone()) {
                let (cancel, cancelled) = watch::channel(false);
                upload.cancel = Some(cancel);
                started.push((id.clone(), cancelled));
            }
        }
        (started, next)
    }

    /// Records the end of an upload. After a success all failed uploads become due at once, since
    /// the store is reachable.
    pub(super) fn end(&self, id: &str, end: UploadEnd) {
        let now = Instant::now();
        let mut queue = self.queue.lock();
        match end {
            UploadEnd::Stored => {
                queue.uploads.remove(id);
                let failed = queue.uploads.values_mut().filter(|u| u.error.is_some());
                failed.for_each(|upload| upload.due = now);
                self.wake_retractions.notify_one();
            }
            UploadEnd::Dropped => drop(queue.uploads.remove(id)),
            UploadEnd::Failed(error) => {
                if let Some(upload) = queue.uploads.get_mut(id) {
                    upload.cancel = None;
                    upload.due = now + retry_delay(upload.failures);
                    upload.failures += 1;
                    upload.error = Some(error);
                }
                self.counters.failures.fetch_add(1, Ordering::Relaxed);
            }
        }
        drop(queue);
        self.ended.send_replace(());
        self.wake.notify_one();
    }

    /// Returns the next copy to remove from the store at `url`. While this host does not share its
    /// sandboxes (`has_heads` is false), it cannot change heads. Kills of sandboxes, which are
    /// changes of heads, then stay queued. If they were dropped, another host could later resume a
    /// killed sandbox.
    pub(super) fn next_retraction(&self, url: &str, has_heads: bool) -> Option<StoreRetraction> {
        let queue = self.queue.lock();
        // Copies in a store that was configured earlier stay queued until it is configured again.
        let copies = queue.retractions.iter().filter(|r| r.store == url);
        let mut copies = copies.filter(|r| has_heads || !r.head);
        // The copy stays in the queue until `end_retraction`, so that a failed removal is repeated.
        copies.next().cloned()
    }

    /// Removes a completed removal from the queue.
    pub(super) fn end_retraction(&self, done: &StoreRetraction) {
        self.queue.lock().retractions.retain(|r| r != done);
    }
}

/// Returns the delay of the next attempt after `failures` earlier failures.
pub(super) fn retry_delay(failures: u32) -> Duration {
    FIRST_RETRY_DELAY
        // The exponent is bounded, because a shift by 32 or more would overflow.
        .saturating_mul(1 << failures.min(16))
        .min(MAX_RETRY_DELAY)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uploads() -> Uploads {
        let dir = tempfile::tempdir().unwrap();
        let remote = RemoteStore::open(&jiffy_store::host::RemoteSettings {
            url: format!("file://{}/bucket", dir.path().display())
                .parse()
                .unwrap(),
            keyring: None,
            home: dir.path().join("home"),
            cache_bytes: 1,
            upload_bytes_per_second: None,
            timeout: jiffy_store::host::STORE_TIMEOUT,
        });
        Uploads::new(Some(remote.unwrap()), |_| false, Vec::new())
    }

    fn start_due(uploads: &Uploads) -> Vec<String> {
        let (started, _) = uploads.begin_due();
        started.into_iter().map(|(id, _)| id).collect()
    }

    #[test]
    fn kills_of_stored_sandboxes_stay_queued_while_the_host_does_not_share_sandboxes() {
        let uploads = uploads();
        let place = crate::store_copies::StorePlace {
            store: "file:///s".to_owned(),
            tenant: "k1".to_owned(),
        };
        let kill = StoreRetraction::of_head(&place, "sandbox");
        let copy = StoreRetraction::new(&place, "snapshot", None, true);
        uploads.retract(vec![kill.clone(), copy.clone()]);
        assert_eq!(
            uploads.next_retraction("file:///s", false),
            Some(copy.clone())
        );
        uploads.end_retraction(&copy);
        assert_eq!(uploads.next_retraction("file:///s", false), None);
        assert_eq!(uploads.retractions(), 1);
        assert_eq!(uploads.next_retraction("file:///s", true), Some(kill));
    }

    #[test]
    fn uploads_are_limited_per_owner_and_in_total() {
        let uploads = uploads();
        for (id, owner) in [("a1", Some("a")), ("a2", Some("a")), ("n1", None)] {
            uploads.enqueue(id, owner);
        }
        assert_eq!(start_due(&uploads), ["a1", "n1"]);
        assert_eq!(start_due(&uploads), [""; 0]);
        for owner in ["b", "c", "d"] {
            uploads.enqueue(owner, Some(owner));
        }
        assert_eq!(start_due(&uploads), ["b", "c"]);
        uploads.end("a1", UploadEnd::Stored);
        assert_eq!(start_due(&uploads), ["a2"]);
        assert_eq!(uploads.counts(), (1, 4));
    }

    #[test]
    fn a_failed_upload_is_retried_later_or_after_another_success() {
        let uploads = uploads();
        uploads.enqueue("x", None);
        uploads.enqueue("y", Some("y"));
        assert_eq!(start_due(&uploads).len(), 2);
        uploads.end("x", UploadEnd::Failed("gone".into()));
        assert_eq!(uploads.failure("x"), (1, Some("gone".into())));
        let (now, next) = uploads.begin_due();
        assert!(now.is_empty() && next.is_some());
        uploads.end("y", UploadEnd::Stored);
        assert_eq!(start_due(&uploads), ["x"]);
        assert_eq!(retry_delay(0), FIRST_RETRY_DELAY);
        assert_eq!(retry_delay(40), MAX_RETRY_DELAY);
    }

    #[test]
    fn cancelled_uploads_end() {
        let uploads = uploads();
        uploads.enqueue("x", None);
        uploads.enqueue("y", None);
        let (running, _) = uploads.begin_due();
        let (id, cancelled) = &running[0];
        uploads.cancel(id);
        uploads.cancel("y");
        assert!(*cancelled.borrow());
        uploads.end(id, UploadEnd::Dropped);
        assert_eq!(uploads.counts(), (0, 0));
    }
}
