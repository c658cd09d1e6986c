//! Snapshots that nobody needs any more.

use super::Sandboxes;
use super::entry::lock;
use crate::journal::Change;
use crate::record::State;
use jiffy_engine::Engine;
use std::collections::HashSet;

impl<E: Engine> Sandboxes<E> {
    /// Removes every snapshot that is not kept, that nothing is or is being made from, and that nothing needed descends from.
    pub(super) fn collect(&self) {
        let mut snapshots = lock(&self.0.snapshots);
        let mut roots: Vec<String> = lock(&self.0.pins).keys().cloned().collect();
        roots.extend(snapshots.values().filter(|s| s.kept).map(|s| s.id.clone()));
        for entry in lock(&self.0.entries).values() {
            let record = entry.record();
            if record.state != State::Killed {
                roots.extend(record.snapshot);
            }
        }
        let mut needed = HashSet::new();
        while let Some(id) = roots.pop() {
            if !needed.insert(id.clone()) {
                continue;
            }
            // What is kept is a root anyway; the rest is needed for its files only.
            let parent = snapshots.get(&id).and_then(|s| s.parent.clone());
            let needs = |p: &String| snapshots.get(p).is_some_and(|p| !p.kept);
            if let Some(parent) = parent.filter(needs)
                && !self.0.engine.is_independent(&id)
            {
                roots.push(parent);
            }
        }
        let mut gone: Vec<_> = snapshots
            .values()
            .filter(|s| !needed.contains(&s.id))
            .cloned()
            .collect();
        if gone.is_empty() {
            return;
        }
        // Lineages go on over the gaps.
        let moved: Vec<_> = snapshots
            .values()
            .filter(|s| needed.contains(&s.id))
            .filter(|s| s.parent.as_ref().is_some_and(|p| !needed.contains(p)))
            .map(|s| {
                let mut child = s.clone();
                while let Some(parent) = child.parent.take_if(|p| !needed.contains(p)) {
                    child.parent = snapshots.get(&parent).and_then(|p| p.parent.clone());
                }
                child
            })
            .collect();
        // The journal first: files without a record are removed at the next start, a record without files would be a lie.
        let changes: Vec<_> = gone
            .iter()
            .map(|s| Change::NoSnapshot(s.id.clone()))
            .chain(moved.iter().cloned().map(Change::Snapshot))
            .collect();
        self.0.journal.settle(&changes);
        snapshots.extend(moved.into_iter().map(|s| (s.id.clone(), s)));
        snapshots.retain(|id, _| needed.contains(id));
        // Children before their parents.
        gone.sort_by_key(|s| std::cmp::Reverse(s.created_ms));
        let mut left: Vec<String> = gone.into_iter().map(|s| s.id).collect();
        remove_files(&self.0.engine, &mut left);
    }
}

/// Removes files of snapshots, in whichever order the engine lets them go.
pub(super) fn remove_files<E: Engine>(engine: &E, left: &mut Vec<String>) {
    loop {
        let before = left.len();
        left.retain(|id| match engine.remove_snapshot(id) {
            Ok(()) => false,
            Err(e) => {
                tracing::debug!(id, "a snapshot's files stay for now: {e}");
                true
            }
        });
        if left.is_empty() || left.len() == before {
            return;
        }
    }
}
