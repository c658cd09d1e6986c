//! Snapshots that nothing needs any more.

use super::super::Snapshots;
use super::super::snapshot_engine::SnapshotOnDisk;
use super::super::snapshot_index::SnapshotIndex;
use crate::journal::JournalChange;
use crate::snapshot::Snapshot;
use crate::store_copies::StoreRetraction;
use jiffy_engine_api::{EngineError, PreparedFold};
use jiffy_proto::snapshot::FoldedLayers;
use std::collections::{BTreeMap, HashMap};

/// Need of a snapshot.
enum Need {
    /// It is kept, or a sandbox or an operation uses it.
    Used,
    /// Only the files of another snapshot lie on its files.
    LainOn,
    None,
}

/// Snapshots that were taken out of the index.
#[derive(Default)]
struct UnneededSnapshots {
    /// Snapshots that lie on files that nothing else needs: those files can be folded into theirs.
    foldable: Vec<String>,
    /// Children before their parents.
    gone: Vec<SnapshotOnDisk>,
    /// Their children, which have another parent now.
    moved: BTreeMap<String, Snapshot>,
    /// Their copies in stores.
    copies: Vec<StoreRetraction>,
}

impl Snapshots<'_> {
    /// Removes those of `candidates` that nothing needs, and of their ancestors those that nothing
    /// else needed. The cost depends on the number of removed snapshots only. A removed snapshot
    /// whose files one other snapshot needs is queued for a fold.
    pub(in super::super) fn gc(self, candidates: impl IntoIterator<Item = String>) {
        let change = self.0.catalog.change();
        let collected = {
            let mut snapshots = change.index();
            self.take_unneeded(&mut snapshots, candidates.into_iter().collect(), None)
        };
        self.commit_removals(&collected);
        self.removed(collected);
    }

    /// Looks at every snapshot that is not kept.
    pub(in super::super) fn gc_all(self) {
        self.gc(self.ids_of(|snapshot| !snapshot.kept));
    }

    /// Returns true if the files of snapshot `parent` serve no other purpose than that those of
    /// `child` lie on them.
    pub(in super::super) fn is_foldable(self, parent: &str, child: &str) -> bool {
        let snapshots = self.0.catalog.read();
        let pins = self.0.catalog.pins();
        let is_stored = snapshots.get(child).is_some_and(|child| !child.storing);
        is_stored
            && match snapshots.get(parent) {
                Some(_) => matches!(
                    self.need(&snapshots, &pins, parent, Some(child)),
                    Need::None
                ),
                // Its record was removed before a fold that did not complete.
                None => !pins.contains_key(parent),
            }
    }

    /// Completes the fold of the parent of `child`: removes the parent's record, replaces the files
    /// of `child`, and removes those of the parent. Returns `None`, and changes nothing, if the
    /// parent is needed by now.
    pub(in super::super) fn commit_fold(
        self,
        fold: PreparedFold,
        child: &str,
    ) -> Option<Result<FoldedLayers, EngineError>> {
        let change = self.0.catalog.change();
        let parent = fold.parent().to_owned();
        if !self.is_foldable(&parent, child) {
            return None;
        }
        let mut collected = {
            let mut snapshots = change.index();
            let queue = vec![parent.clone()];
            self.take_unneeded(&mut snapshots, queue, Some((&parent, child)))
        };
        // It has no record if an earlier fold did not complete; otherwise a pin may have come.
        if collected.gone.is_empty() && self.0.catalog.get(&parent).is_some() {
            return None;
        }
        // A daemon that is killed here leaves files without a record, which the next one folds.
        self.commit_removals(&collected);
        // No operation waits for the disk: nothing can use the parent from here on.
        drop(change);
        let folded = fold.commit();
        if folded.is_ok()
            && let Some(engine) = self.0.catalog.get(child).map(|record| record.engine)
            && collected.gone.iter().all(|removed| removed.id != parent)
        {
            collected.gone.push(SnapshotOnDisk { id: parent, engine });
        }
        self.removed(collected);
        Some(folded)
    }

    /// Writes removals to the journal before the files go: files without a record are removed by
    /// gc, a record without files would be a lie.
    fn commit_removals(self, collected: &UnneededSnapshots) {
        if collected.gone.is_empty() {
            return;
        }
        let gone = collected.gone.iter();
        let gone = gone.map(|snapshot| JournalChange::NoSnapshot(snapshot.id.clone()));
        let moved = collected.moved.values().cloned();
        let moved = moved.map(JournalChange::Snapshot);
        let copies = collected.copies.iter().cloned();
        let copies = copies.map(JournalChange::Retraction);
        self.0
            .journal
            .commit_write_behind(&gone.chain(moved).chain(copies).collect::<Vec<_>>());
    }

    /// Queues the work behind the removal of records.
    fn removed(self, collected: UnneededSnapshots) {
        for id in &collected.foldable {
            self.0.folder.enqueue(id);
        }
        if !collected.gone.is_empty() {
            self.0.uploads.retract(collected.copies);
            self.0.file_remover.remove(collected.gone);
        }
    }

    /// Takes those of `queue` that nothing needs out of the index, and their ancestors likewise. Of
    /// `folded`, a snapshot and its child, the child does not need the snapshot.
    fn take_unneeded(
        self,
        snapshots: &mut SnapshotIndex,
        mut queue: Vec<String>,
        folded: Option<(&str, &str)>,
    ) -> UnneededSnapshots {
        let mut collected = UnneededSnapshots::default();
        let pins = self.0.catalog.pins();
        while let Some(id) = queue.pop() {
            let child = folded.filter(|(parent, _)| *parent == id);
            match self.need(snapshots, &pins, &id, child.map(|(_, child)| child)) {
                Need::None => {}
                Need::Used => continue,
                Need::LainOn => {
                    let children = snapshots.children(&id).map(str::to_owned);
                    collected.foldable.extend(children);
                    continue;
                }
            }
            let Some(record) = snapshots.remove(&id) else {
                continue;
            };
            // Lineages go on over the gap.
            let children: Vec<String> = snapshots.children(&id).map(str::to_owned).collect();
            for child in children {
                let Some(mut child) = snapshots.get(&child).cloned() else {
                    continue;
                };
                child.parent = record.parent.clone();
                snapshots.insert(child.clone());
                collected.moved.insert(child.id.clone(), child);
            }
            collected.copies.extend(record.store.all_retractions(&id));
            collected.moved.remove(&id);
            collected.gone.push(SnapshotOnDisk {
                id,
                engine: record.engine,
            });
            queue.extend(record.parent);
        }
        collected
    }

    /// Need of snapshot `id`. The files of `except` do not count as lying on it.
    fn need(
        self,
        snapshots: &SnapshotIndex,
        pins: &HashMap<String, usize>,
        id: &str,
        except: Option<&str>,
    ) -> Need {
        let depends_on_it = |child: &str| {
            // Snapshots of an engine that this host lacks are retained.
            let files = snapshots
                .get(child)
                .map(|s| self.0.engines.snapshot_files(&s.engine));
            let files = files.and_then(Result::ok);
            except != Some(child) && files.is_none_or(|files| files.depends_on(child, id))
        };
        if snapshots.get(id).is_some_and(|s| s.kept)
            || pins.contains_key(id)
            || self.0.indexes.users.has_any(id)
        {
            return Need::Used;
        }
        match snapshots.children(id).any(depends_on_it) {
            true => Need::LainOn,
            false => Need::None,
        }
    }
}
