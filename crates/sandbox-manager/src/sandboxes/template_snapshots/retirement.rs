//! Retirement of template snapshots. If a template was rebuilt or its snapshots are unused, new
//! sandboxes do not use the old snapshot. It is then no longer retained, so that garbage collection
//! removes it.
//!
//! The *warm pool* has guests that were started in advance and wait for a create.
//!
//! The *fingerprint* of a template and size is a hash of everything that determines their guests.

use super::TemplateSnapshots;
use crate::snapshot::Snapshot;
use jiffy_api_types::SnapshotPurpose;
use jiffy_engine_api::now_ms;
use std::time::Duration;

/// Maximum number of sizes of a template that have a snapshot. Callers choose sizes freely, and no
/// quota limits the disk space of template snapshots.
const MAX_SIZES_PER_TEMPLATE: usize = 8;

impl TemplateSnapshots<'_> {
    /// Retires the snapshots among `ids` whose template was changed or removed. No new sandbox uses
    /// them.
    pub(in crate::sandboxes) fn retire_outdated(self, ids: &[String]) {
        let snapshots = self.0.catalog.read();
        let of_template = |s: &&Snapshot| s.purpose == SnapshotPurpose::Template && s.retained;
        let retained = ids.iter().filter_map(|id| snapshots.get(id));
        let retained = retained.filter(of_template);
        let retained: Vec<_> = retained
            .map(|s| (s.id.clone(), s.template.clone()))
            .collect();
        // The engines read manifests from the disk, which must not happen under the lock.
        drop(snapshots);
        // A snapshot is retained if its engine cannot be determined.
        let serves = |id: &str, template: &str| {
            let files = self.0.snapshot_engines.files_of(id);
            files.map_or(true, |files| files.is_current(template, id))
        };
        let unused = retained
            .into_iter()
            .filter(|(id, template)| !serves(id, template));
        self.release(unused.map(|(id, _)| id).collect());
    }

    /// Retires the snapshots of all templates that were changed or removed, and stops their
    /// warm-pool guests. Blocks, because engines read manifests from the disk.
    pub fn retire_removed(self) {
        self.retire_outdated(&self.retained_ids(|_| true));
    }

    /// Retires the snapshots with the same template, size and engine as `newest` but another
    /// fingerprint.
    pub(in crate::sandboxes) fn retire_older(self, newest: &Snapshot) {
        let older = |s: &Snapshot| {
            let same = (&s.template, s.size) == (&newest.template, newest.size);
            s.id != newest.id && same && s.engine == newest.engine
        };
        self.release(self.retained_ids(older));
    }

    /// Retires the least recently used sizes of a template beyond [`MAX_SIZES_PER_TEMPLATE`]. The
    /// next create with a retired size boots the template again.
    pub(in crate::sandboxes) fn retire_surplus(self, newest: &Snapshot) {
        let other = |s: &Snapshot| s.template == newest.template && s.id != newest.id;
        let mut others = self.retained_ids(other);
        // `newest` counts too. `None`: fewer snapshots exist than the limit allows.
        let Some(surplus) = (others.len() + 1).checked_sub(MAX_SIZES_PER_TEMPLATE) else {
            return;
        };
        let uses = self.0.template_snapshots.uses();
        // Sort by the last use. `None`, an unknown use, comes first.
        others.sort_by_key(|id| uses.get(id).copied());
        others.truncate(surplus);
        self.release(others);
    }

    /// Returns the template snapshots that no guest or snapshot uses and that no create has used
    /// for at least `unused_for`. After their retirement the next create boots.
    pub fn idle(self, unused_for: Duration) -> Vec<Snapshot> {
        let waiting = self.0.pool.snapshots();
        let uses = self.0.template_snapshots.uses();
        let unused_ms = u64::try_from(unused_for.as_millis()).unwrap_or(u64::MAX);
        let limit_ms = now_ms().saturating_sub(unused_ms);
        let snapshots = self.0.catalog.read();
        let idle = |s: &&Snapshot| {
            let is_used = match uses.get(&s.id) {
                Some(at) => at.elapsed() < unused_for,
                // Uses before the start of the daemon are unknown.
                None => s.created_ms > limit_ms,
            };
            let is_needed = waiting.contains(&s.id)
                || self.0.indexes.users.has_any(&s.id)
                || snapshots.children(&s.id).next().is_some();
            !is_used && !is_needed
        };
        let retained = snapshots.all_retained_for(SnapshotPurpose::Template);
        retained.filter(idle).cloned().collect()
    }

    /// Retires template snapshots.
    pub fn retire(self, ids: &[String]) {
        let of_template = |id: &String| {
            let snapshots = self.0.catalog.read();
            let snapshot = snapshots.get(id);
            snapshot.is_some_and(|s| s.purpose == SnapshotPurpose::Template)
        };
        self.release(ids.iter().filter(|id| of_template(id)).cloned().collect());
    }

    /// Returns the ids of the matching template snapshots that are not retired.
    pub(in crate::sandboxes) fn retained_ids(
        self,
        matches: impl Fn(&Snapshot) -> bool,
    ) -> Vec<String> {
        let snapshots = self.0.catalog.read();
        let retained = snapshots.all_retained_for(SnapshotPurpose::Template);
        retained
            .filter(|s| matches(s))
            .map(|s| s.id.clone())
            .collect()
    }

    /// Marks template snapshots as not retained, stops their warm-pool guests, and starts garbage
    /// collection for these snapshots.
    fn release(self, ids: Vec<String>) {
        for id in &ids {
            self.0.template_snapshots.forget(id);
            if let Some(retired) = self.0.catalog.update(id, |s| s.retained = false) {
                // Otherwise, guests of the retired snapshot would still be taken for new sandboxes.
                self.0.pool.drop_bucket(&retired.fingerprint);
            }
        }
        self.0.gc.collect(ids);
    }

    /// Assigns the snapshots of template `from` to template `to`, which has the same content.
    pub fn hand_over(self, from: &str, to: &str) {
        for id in self.retained_ids(|s| s.template == from) {
            if let Some(newest) = self.0.catalog.update(&id, |s| s.template = to.to_owned()) {
                self.retire_older(&newest);
            }
        }
    }
}
