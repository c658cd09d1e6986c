//! Snapshots that nothing needs any more.

use super::super::Snapshots;
use super::super::snapshot_index::SnapshotIndex;
use crate::journal::JournalChange;
use crate::records::SnapshotRecord;
use crate::store_copies::StoreRetraction;
use jiffy_engine::Engine;
use std::collections::{BTreeMap, HashMap};

/// Snapshots that were taken out of the index.
#[derive(Default)]
struct UnneededSnapshots {
    /// Children before their parents.
    gone: Vec<String>,
    /// Their children, which have another parent now.
    moved: BTreeMap<String, SnapshotRecord>,
    /// Their copies in stores.
    copies: Vec<StoreRetraction>,
}

impl<E: Engine> Snapshots<'_, E> {
    /// Removes those of `candidates` that nothing needs, and of their ancestors those that nothing
    /// else needed. Costs as much as goes, however much there is.
    pub(in super::super) fn gc(self, candidates: impl IntoIterator<Item = String>) {
        let _order = self.0.snapshot_changes.lock();
        let collected = {
            let mut snapshots = self.0.snapshot_index.lock();
            self.take_unneeded(&mut snapshots, candidates.into_iter().collect())
        };
        if collected.gone.is_empty() {
            return;
        }
        // The journal before the files: files without a record are removed by gc, a record
        // without files would be a lie.
        let gone = collected
            .gone
            .iter()
            .cloned()
            .map(JournalChange::NoSnapshot);
        let moved = collected.moved.into_values().map(JournalChange::Snapshot);
        let copies = collected.copies.iter().cloned();
        let copies = copies.map(JournalChange::Retraction);
        self.0
            .journal
            .commit_write_behind(&gone.chain(moved).chain(copies).collect::<Vec<_>>());
        self.0.uploads.retract(collected.copies);
        self.0.file_remover.remove(collected.gone);
    }

    /// Looks at every snapshot that is not kept.
    pub(in super::super) fn gc_all(self) {
        self.gc(self.ids_of(|snapshot| !snapshot.kept));
    }

    fn take_unneeded(
        self,
        snapshots: &mut SnapshotIndex,
        mut queue: Vec<String>,
    ) -> UnneededSnapshots {
        let mut collected = UnneededSnapshots::default();
        let pins = self.0.pins.lock();
        while let Some(id) = queue.pop() {
            if self.is_needed(snapshots, &pins, &id) {
                continue;
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
            collected.gone.push(id);
            queue.extend(record.parent);
        }
        collected
    }

    /// True if a snapshot is kept, something is or is being made from it, or one that is there lies
    /// on its files.
    fn is_needed(self, snapshots: &SnapshotIndex, pins: &HashMap<String, usize>, id: &str) -> bool {
        let lies_on_it = |child: &str| self.0.engine.lies_on(child, id);
        snapshots.get(id).is_some_and(|s| s.kept)
            || pins.contains_key(id)
            || self.0.indexes.users.has_any(id)
            || snapshots.children(id).any(lies_on_it)
    }
}
