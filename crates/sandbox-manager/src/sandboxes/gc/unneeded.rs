//! Decides which snapshots are unneeded, and removes their records. The removal of a snapshot may
//! make its ancestors unneeded, which are then removed as well.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors. A *pin* protects a
//! snapshot from garbage collection. A *fold* merges the files of a snapshot that is needed only as
//! a dependency into the files of its only child.

use super::super::snapshot_engine::SnapshotOnDisk;
use super::super::snapshot_index::SnapshotIndex;
use super::GarbageCollector;
use crate::journal::JournalChange;
use crate::lineage_record::PrunedAncestors;
use crate::snapshot::Snapshot;
use crate::store_copies::StoreRetraction;
use jiffy_engine_api::{EngineError, PreparedFold};
use jiffy_proto::snapshot::FoldedLayers;
use std::collections::{BTreeMap, HashMap};

/// Reason why a snapshot is needed.
enum Need {
    /// The snapshot is retained, or a sandbox or an operation uses it.
    Used,
    /// Only the files of another snapshot depend on its files.
    Dependency,
    /// The snapshot can be removed.
    None,
}

/// Result of a collection: removed snapshots, and the effects of their removal.
#[derive(Default)]
struct UnneededSnapshots {
    /// Children of snapshots that serve only as a dependency. The files of such a parent can be
    /// folded into the files of its only child.
    foldable: Vec<String>,
    /// Removed snapshots, children before their parents.
    removed: Vec<SnapshotOnDisk>,
    /// Children of removed snapshots, with their new parent.
    moved: BTreeMap<String, Snapshot>,
    /// Copies of removed snapshots in stores.
    copies: Vec<StoreRetraction>,
}

impl GarbageCollector {
    /// Removes the unneeded snapshots among `candidates`, and their ancestors that become unneeded.
    /// The cost depends on the number of removed snapshots only. A snapshot that serves only as a
    /// dependency stays, and its children are queued, so that its files can be folded into a child
    /// if there is only one.
    pub fn collect(&self, candidates: impl IntoIterator<Item = String>) {
        let change = self.parts.catalog.change();
        let collected = {
            let mut snapshots = change.index();
            self.take_unneeded(&mut snapshots, candidates.into_iter().collect(), None)
        };
        self.commit_removals(&collected);
        self.finish_removals(collected);
    }

    /// Checks every snapshot that is not retained.
    pub(super) fn collect_all(&self) {
        let snapshots = self.parts.catalog.read();
        let candidates = snapshots.values().filter(|snapshot| !snapshot.retained);
        let candidates: Vec<_> = candidates.map(|snapshot| snapshot.id.clone()).collect();
        drop(snapshots);
        self.collect(candidates);
    }

    /// Returns whether the files of snapshot `parent` are needed only as a dependency of
    /// the files of `child`.
    pub fn is_foldable(&self, parent: &str, child: &str) -> bool {
        let snapshots = self.parts.catalog.read();
        let pins = self.parts.catalog.pins();
        // The files of a `storing` child are not complete on the disk yet.
        let is_stored = snapshots.get(child).is_some_and(|child| !child.storing);
        is_stored
            && match snapshots.get(parent) {
                Some(_) => matches!(
                    self.need(&snapshots, &pins, parent, Some(child)),
                    Need::None
                ),
                // A fold that did not complete has removed the parent's record.
                None => !pins.contains_key(parent),
            }
    }

    /// Completes the fold of the parent of `child`: removes the parent's record, replaces the files
    /// of `child`, and removes the parent's files. Returns `None`, and changes nothing, if the
    /// parent is in use by now.
    pub fn commit_fold(
        &self,
        fold: PreparedFold,
        child: &str,
    ) -> Option<Result<FoldedLayers, EngineError>> {
        let change = self.parts.catalog.change();
        let parent = fold.parent().to_owned();
        // The condition is checked while `change` excludes other changes, so that the parent gets
        // no new user.
        if !self.is_foldable(&parent, child) {
            return None;
        }
        let mut collected = {
            let mut snapshots = change.index();
            let queue = vec![parent.clone()];
            self.take_unneeded(&mut snapshots, queue, Some((&parent, child)))
        };
        // If an earlier fold did not complete, the parent has no record and nothing is collected.
        // If the parent has a record, an operation has pinned the parent after the check above.
        if collected.removed.is_empty() && self.parts.catalog.get(&parent).is_some() {
            return None;
        }
        // If the daemon crashes between this commit and the fold, the parent's files remain without
        // a record, and the next daemon folds them.
        self.commit_removals(&collected);
        // The catalog is unlocked before the disk is written, so that no operation waits for the
        // disk. Without a record the parent cannot be used any longer.
        drop(change);
        let folded = fold.commit();
        // After an earlier fold that did not complete, `collected` lacks the parent: its record was
        // removed then, and its files are removed now.
        if folded.is_ok()
            && let Some(engine) = self.parts.catalog.get(child).map(|record| record.engine)
            && collected.removed.iter().all(|removed| removed.id != parent)
        {
            collected
                .removed
                .push(SnapshotOnDisk { id: parent, engine });
        }
        self.finish_removals(collected);
        Some(folded)
    }

    /// Writes removals to the journal before the files are removed. After a crash between the two
    /// steps, garbage collection removes the files without a record. The reverse order could leave
    /// a record without files.
    fn commit_removals(&self, collected: &UnneededSnapshots) {
        if collected.removed.is_empty() {
            return;
        }
        let removed = collected.removed.iter();
        let removed = removed.map(|snapshot| JournalChange::NoSnapshot(snapshot.id.clone()));
        let moved = collected.moved.values().cloned();
        let moved = moved.map(JournalChange::Snapshot);
        let copies = collected.copies.iter().cloned();
        let copies = copies.map(JournalChange::Retraction);
        self.parts
            .journal
            .commit_write_behind(&removed.chain(moved).chain(copies).collect::<Vec<_>>());
    }

    /// Queues the work that follows the removal of records.
    fn finish_removals(&self, collected: UnneededSnapshots) {
        for id in &collected.foldable {
            self.parts.folder.enqueue(id);
        }
        if !collected.removed.is_empty() {
            self.parts.uploads.retract(collected.copies);
            self.file_remover.remove(collected.removed);
        }
    }

    /// Removes unneeded snapshots of `queue`, and their unneeded ancestors, from the index.
    /// `folded` is a snapshot and its child; the child does not count as a user of the snapshot.
    fn take_unneeded(
        &self,
        snapshots: &mut SnapshotIndex,
        mut queue: Vec<String>,
        folded: Option<(&str, &str)>,
    ) -> UnneededSnapshots {
        let mut collected = UnneededSnapshots::default();
        let pins = self.parts.catalog.pins();
        while let Some(id) = queue.pop() {
            let child = folded.filter(|(parent, _)| *parent == id);
            match self.need(snapshots, &pins, &id, child.map(|(_, child)| child)) {
                Need::None => {}
                Need::Used => continue,
                Need::Dependency => {
                    let children = snapshots.children(&id).map(str::to_owned);
                    collected.foldable.extend(children);
                    continue;
                }
            }
            let Some(record) = snapshots.remove(&id) else {
                continue;
            };
            // The children's lineage continues with the parent of the removed snapshot.
            let children: Vec<String> = snapshots.children(&id).map(str::to_owned).collect();
            for child in children {
                let Some(mut child) = snapshots.get(&child).cloned() else {
                    continue;
                };
                child.parent = record.parent.clone();
                PrunedAncestors::add_to(&mut child, &record);
                snapshots.insert(child.clone());
                collected.moved.insert(child.id.clone(), child);
            }
            collected.copies.extend(record.store.all_retractions(&id));
            // An earlier iteration may have moved this snapshot to another parent.
            collected.moved.remove(&id);
            collected.removed.push(SnapshotOnDisk {
                id,
                engine: record.engine,
            });
            // The parent may have lost its last user.
            queue.extend(record.parent);
        }
        collected
    }

    /// Returns why snapshot `id` is needed. The child `except` does not count as a user.
    fn need(
        &self,
        snapshots: &SnapshotIndex,
        pins: &HashMap<String, usize>,
        id: &str,
        except: Option<&str>,
    ) -> Need {
        let depends_on_it = |child: &str| {
            // If this host lacks the child's engine, the dependencies of the child are unknown, so
            // the child counts as dependent.
            let files = snapshots
                .get(child)
                .map(|s| self.parts.engines.files(&s.engine));
            let files = files.and_then(Result::ok);
            except != Some(child) && files.is_none_or(|files| files.depends_on(child, id))
        };
        // The cheap checks come first: `depends_on_it` may read the disk.
        if snapshots.get(id).is_some_and(|s| s.retained)
            || pins.contains_key(id)
            || self.parts.indexes.users.has_any(id)
        {
            return Need::Used;
        }
        if snapshots.children(id).any(depends_on_it) {
            Need::Dependency
        } else {
            Need::None
        }
    }
}
