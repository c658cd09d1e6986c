//! Warm pool: restored guests that wait for an identity.
//!
//! The *fingerprint* of a template and size is a hash of everything that determines their guests. A
//! *pin* protects a snapshot from garbage collection. The *greeting* is the first message of the
//! agent to the host, which answers with the identity of the sandbox.
//!
//! Each guest is restored up to the greeting of its agent. It receives its identity, entropy and
//! clock when a create takes it, and never returns to the pool.

mod demand;

pub use demand::PoolDemand;

use super::{OperationError, Sandboxes, SandboxesInner, detached};
use crate::admission::{Occupant, Reservation};
use crate::site;
use jiffy_engine_api::{EngineError, SandboxSize, UnassignedGuest};
use jiffy_proto::agent::SiteSettings;
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

/// Warm pool: restored guests that wait for an identity.
#[derive(Clone, Copy)]
pub struct WarmPool<'a>(pub(super) &'a Arc<SandboxesInner>);

impl Sandboxes {
    /// Returns the operations on the warm pool.
    pub fn pool(&self) -> WarmPool<'_> {
        WarmPool(&self.0)
    }
}

/// Delay of a refill after the last create, so that it does not compete with a burst of creates.
const DEBOUNCE: Duration = Duration::from_millis(500);
/// Maximum number of delays, so that a continuous stream of creates does not starve the pool.
const MAX_QUIET_ROUNDS: u32 = 6;

/// Numbers of a template's guests in the warm pool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct PoolSize {
    /// Template.
    pub template: String,
    /// Configured number of guests for each size in use.
    pub wanted: usize,
    /// Present number of guests of all sizes.
    pub waiting: usize,
}

/// Guests of one template and size that were restored from one snapshot.
struct PoolBucket {
    template: String,
    snapshot: String,
    /// Guests that wait for an identity, with their resources.
    waiting: Vec<(Box<dyn UnassignedGuest>, Reservation)>,
    /// Number of creates that requested a guest, including creates that found none. A refill
    /// compares two values to detect a burst.
    takes: u64,
}

/// Waiting guests by the fingerprint of their template and size.
pub(super) struct Pool {
    /// Default number of guests per template.
    default_target: usize,
    /// Numbers of guests that were set for templates.
    targets: Mutex<BTreeMap<String, usize>>,
    /// Demand of the fleet.
    demand: Mutex<demand::Demand>,
    /// Locked before `targets`, `demand` and `refilling`.
    buckets: Mutex<HashMap<String, PoolBucket>>,
    /// Fingerprints whose bucket a task refills. Separate from the buckets: a bucket may be removed
    /// and created again while a task restores a guest for it.
    refilling: Mutex<HashSet<String>>,
}

impl Pool {
    pub fn new(default_target: usize) -> Self {
        Self {
            default_target,
            targets: Mutex::default(),
            demand: Mutex::default(),
            buckets: Mutex::default(),
            refilling: Mutex::default(),
        }
    }

    /// Returns the number of guests of a bucket: the number that was set for its template, or the
    /// larger of the default and the demand.
    fn target(&self, fingerprint: &str, template: &str) -> usize {
        let set = self.targets.lock().get(template).copied();
        set.unwrap_or_else(|| self.default_target.max(self.demand.lock().of(fingerprint)))
    }

    /// Returns the configured number of guests of a template for [`PoolSize`].
    fn target_of_template(&self, template: &str) -> usize {
        let set = self.targets.lock().get(template).copied();
        let demand = || self.demand.lock().of_template(template);
        set.unwrap_or_else(|| self.default_target.max(demand()))
    }

    /// Sets the number of guests for `template`, and stops surplus ones. Returns the fingerprints
    /// and snapshots of its buckets.
    fn set_target(&self, template: &str, target: usize) -> Vec<(String, String)> {
        self.targets.lock().insert(template.to_owned(), target);
        // The vector precedes the lock, so that its guests are dropped after the lock is released,
        // because stopping them takes time.
        let mut surplus = Vec::new();
        let mut buckets = self.buckets.lock();
        let of_template = buckets.iter_mut().filter(|(_, s)| s.template == template);
        let buckets_of_template = of_template.map(|(fingerprint, bucket)| {
            let retained = bucket.waiting.len().min(target);
            surplus.extend(bucket.waiting.drain(retained..));
            (fingerprint.clone(), bucket.snapshot.clone())
        });
        let buckets_of_template = buckets_of_template.collect();
        drop(buckets);
        buckets_of_template
    }

    /// Returns the number of waiting sandboxes of each template, and the wanted number.
    fn sizes(&self) -> Vec<PoolSize> {
        let mut waiting: BTreeMap<String, usize> = BTreeMap::new();
        for bucket in self.buckets.lock().values() {
            *waiting.entry(bucket.template.clone()).or_default() += bucket.waiting.len();
        }
        for template in self.targets.lock().keys() {
            waiting.entry(template.clone()).or_default();
        }
        let sizes = waiting.into_iter().map(|(template, waiting)| PoolSize {
            wanted: self.target_of_template(&template),
            template,
            waiting,
        });
        sizes.collect()
    }

    pub fn len(&self) -> usize {
        self.buckets.lock().values().map(|s| s.waiting.len()).sum()
    }

    /// Takes a waiting guest. Returns also the snapshot that it was restored from.
    pub fn take(&self, fingerprint: &str) -> Option<(Box<dyn UnassignedGuest>, String)> {
        let mut buckets = self.buckets.lock();
        let bucket = buckets.get_mut(fingerprint)?;
        bucket.takes += 1;
        // A guest whose process has exited meanwhile is dropped together with its reservation.
        while let Some((unassigned, _reservation)) = bucket.waiting.pop() {
            if unassigned.is_waiting() {
                // The caller has a reservation of its own, so the guest's is released.
                return Some((unassigned, bucket.snapshot.clone()));
            }
        }
        None
    }

    /// Returns the snapshots that the waiting guests were restored from.
    pub fn snapshots(&self) -> Vec<String> {
        let buckets = self.buckets.lock();
        let in_use = buckets.values().filter(|s| !s.waiting.is_empty());
        in_use.map(|s| s.snapshot.clone()).collect()
    }

    /// Stops one waiting guest. Returns whether there was one.
    pub fn evict(&self) -> bool {
        let mut buckets = self.buckets.lock();
        let evicted = buckets.values_mut().find_map(|s| s.waiting.pop());
        // Release the lock before the guest is dropped, because stopping it takes time.
        drop(buckets);
        evicted.is_some()
    }

    /// Removes a bucket and stops its guests.
    pub fn drop_bucket(&self, fingerprint: &str) {
        let bucket = self.buckets.lock().remove(fingerprint);
        // The guests are stopped here, after the lock is released, because stopping takes time.
        drop(bucket);
    }

    /// Removes all buckets and stops their guests.
    pub fn clear(&self) {
        let buckets = std::mem::take(&mut *self.buckets.lock());
        drop(buckets);
    }

    /// Returns true to the one caller that is to refill the bucket.
    fn begin_refill(&self, fingerprint: &str, template: &str, snapshot: &str) -> bool {
        let target = self.target(fingerprint, template);
        let mut buckets = self.buckets.lock();
        let bucket = buckets
            .entry(fingerprint.to_owned())
            .or_insert_with(|| PoolBucket {
                template: template.to_owned(),
                snapshot: snapshot.to_owned(),
                waiting: Vec::new(),
                takes: 0,
            });
        // One task refills a bucket, so that restores for the pool run one at a time.
        target > bucket.waiting.len() && self.refilling.lock().insert(fingerprint.to_owned())
    }

    /// Returns template and snapshot of the next guest that the refilling task restores. `None` if
    /// the bucket is full or was removed: the refill has then ended.
    fn next_refill(&self, fingerprint: &str) -> Option<(String, String)> {
        let buckets = self.buckets.lock();
        let bucket = buckets.get(fingerprint);
        let next = bucket
            .filter(|bucket| bucket.waiting.len() < self.target(fingerprint, &bucket.template));
        if next.is_none() {
            // The mark is removed under the lock of the buckets: a create that takes a guest
            // afterwards begins a refill.
            self.refilling.lock().remove(fingerprint);
        }
        next.map(|bucket| (bucket.template.clone(), bucket.snapshot.clone()))
    }

    fn takes(&self, fingerprint: &str) -> Option<u64> {
        self.buckets.lock().get(fingerprint).map(|s| s.takes)
    }

    /// Adds an unassigned guest with its reservation unless the bucket was dropped.
    fn put(
        &self,
        fingerprint: &str,
        template: &str,
        snapshot: &str,
        (unassigned, mut reservation): (Box<dyn UnassignedGuest>, Reservation),
    ) {
        // The guest's memory is part of the host's figures from now on.
        reservation.mark_started();
        let target = self.target(fingerprint, template);
        let mut buckets = self.buckets.lock();
        // The target may have been lowered, or the bucket replaced, meanwhile. The guest is then
        // dropped.
        if let Some(bucket) = buckets.get_mut(fingerprint)
            && bucket.snapshot == snapshot
            && bucket.waiting.len() < target
        {
            bucket.waiting.push((unassigned, reservation));
        }
    }

    fn end_refill(&self, fingerprint: &str) {
        self.refilling.lock().remove(fingerprint);
    }

    /// Waits until no sandbox was taken from the pool for a short time, because filling it would
    /// delay creates. The waiting is limited.
    async fn wait_until_quiet(&self, fingerprint: &str) {
        for _ in 0..MAX_QUIET_ROUNDS {
            let before = self.takes(fingerprint);
            tokio::time::sleep(DEBOUNCE).await;
            if self.takes(fingerprint) == before {
                return;
            }
        }
    }
}

impl WarmPool<'_> {
    /// Returns the numbers of guests, for each template that has a pool.
    pub fn sizes(self) -> Vec<PoolSize> {
        self.0.pool.sizes()
    }

    /// Sets the number of guests of `template` for each size in use, including `size`. The guests
    /// are restored in the background, and surplus guests are stopped. The setting is lost when the
    /// daemon exits.
    pub async fn set(
        self,
        template: &str,
        size: SandboxSize,
        target: usize,
    ) -> Result<PoolSize, OperationError> {
        size.check()?;
        let (this, template) = (Sandboxes(self.0.clone()), template.to_owned());
        detached(async move {
            let buckets = this.0.pool.set_target(&template, target);
            for (fingerprint, snapshot) in buckets {
                this.pool().refill(&fingerprint, &template, &snapshot);
            }
            if target > 0 {
                this.templates().cache(&template, size).await?;
            }
            let pool_size = this
                .pool()
                .sizes()
                .into_iter()
                .find(|p| p.template == template);
            Ok(pool_size.unwrap_or_default())
        })
        .await
    }

    /// Restores a guest of a template's snapshot without an identity, and warms it up.
    async fn restore_to_wait(
        self,
        snapshot: &str,
    ) -> Result<Box<dyn UnassignedGuest>, EngineError> {
        let mut unassigned = self
            .0
            .snapshot_engines
            .engine_of(snapshot)?
            .restore(snapshot, None)
            .await?;
        let site = site::joined(&self.0.site, &SiteSettings::default());
        unassigned.rehearse(&site).await?;
        Ok(unassigned)
    }

    /// Refills the bucket in the background, after a burst of creates has ended.
    pub(super) fn refill(self, fingerprint: &str, template: &str, snapshot: &str) {
        if !self.0.pool.begin_refill(fingerprint, template, snapshot) {
            return;
        }
        // The reference is weak, so that a task which has not run yet does not keep the sandboxes
        // alive.
        let inner = Arc::downgrade(self.0);
        let fingerprint = fingerprint.to_owned();
        tokio::spawn(async move {
            let Some(this) = inner.upgrade().map(Sandboxes) else {
                return;
            };
            this.0.pool.wait_until_quiet(&fingerprint).await;
            while let Some((template, snapshot)) = this.0.pool.next_refill(&fingerprint) {
                // No restore starts during a shutdown, and the shutdown waits for a restore in
                // flight.
                let Ok(_operation) = this.0.operations.begin() else {
                    break;
                };
                // The pin protects the snapshot while the guest is restored.
                let Ok((record, _pin)) = this.snapshots().pin(&snapshot) else {
                    break;
                };
                // A rejection is no error: the next create tries again.
                let Ok(reservation) = this.0.admission.admit(Occupant::WarmPool, record.size)
                else {
                    break;
                };
                match this.pool().restore_to_wait(&snapshot).await {
                    Ok(unassigned) => {
                        let unassigned = (unassigned, reservation);
                        this.0
                            .pool
                            .put(&fingerprint, &template, &snapshot, unassigned);
                    }
                    Err(e) => {
                        tracing::warn!(template, error = %e, "cannot refill the warm pool");
                        break;
                    }
                }
            }
            this.0.pool.end_refill(&fingerprint);
        });
    }

    /// Returns the number of guests in the warm pool.
    pub fn waiting(self) -> usize {
        self.0.pool.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_that_is_created_again_is_refilled_by_one_task() {
        let pool = Pool::new(1);
        assert!(pool.begin_refill("f", "base", "old"));
        pool.drop_bucket("f");
        // The task continues with the new bucket.
        assert!(!pool.begin_refill("f", "base", "new"));
        let next = pool.next_refill("f");
        assert_eq!(next, Some(("base".to_owned(), "new".to_owned())));
        // A refill that ended can begin again.
        pool.drop_bucket("f");
        assert_eq!(pool.next_refill("f"), None);
        assert!(pool.begin_refill("f", "base", "new"));
        pool.set_target("base", 0);
        assert_eq!(pool.next_refill("f"), None);
        assert!(!pool.begin_refill("f", "base", "new"));
    }
}
