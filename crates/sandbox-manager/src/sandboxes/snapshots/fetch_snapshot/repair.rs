//! Repair of damaged snapshots: their files are fetched again if the store has them.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors. The *warm pool* has
//! guests that were started in advance and wait for a create. A *layer* is the part of a memory or
//! disk that one snapshot stores: the content that differs from its ancestors.

use super::{Fetch, Missing, Pulled};
use crate::operation_error::{ErrorKind, OperationError};
use crate::sandboxes::{Sandboxes, Snapshots};
use crate::snapshot::Snapshot;
use jiffy_engine_api::ExistingSnapshot;
use jiffy_store::host::PulledFile;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Descriptions of damage by the ids of the damaged snapshots.
type Damages = BTreeMap<String, String>;

impl Snapshots<'_> {
    /// Fetches the damaged snapshots of the lineage of `id` again: the snapshots of `reported`, and
    /// snapshots whose damage is detected without reading layers. Running guests continue with the
    /// old files.
    ///
    /// Returns the damage of the replaced snapshots. It is empty if no snapshot is damaged, or if
    /// the store has no copy. Concurrent repairs of one snapshot share one fetch, except that
    /// snapshots of `reported` are always fetched.
    pub(in crate::sandboxes) async fn repair(
        self,
        id: &str,
        reported: Damages,
    ) -> Result<Damages, OperationError> {
        let Some(remote) = self.0.uploads.remote.clone() else {
            return Ok(Damages::new());
        };
        let mut damages = self.find_damages(id).await?;
        damages.extend(reported.clone());
        let Some(first) = damages.keys().next() else {
            return Ok(damages);
        };
        let lock = self.0.fetch_locks.get(format!("repair/{first}"));
        let _guard = lock.lock().await;
        // Another call may have repaired the snapshot while this one waited for the lock.
        let mut remaining = self.find_damages(id).await?;
        remaining.extend(reported);
        if remaining.is_empty() {
            return Ok(damages);
        }
        for (id, damage) in &remaining {
            tracing::warn!(id, damage, "a snapshot is damaged on this host");
        }
        let fetch = Fetch {
            this: Sandboxes(self.0.clone()),
            remote,
            owner: self.0.catalog.get(id).and_then(|record| record.owner),
        };
        // The future is boxed, because it is large.
        let renewed = Box::pin(fetch.renew(id, &remaining)).await;
        let counters = &self.0.uploads.counters;
        let counter = match &renewed {
            Ok(true) => &counters.repaired,
            Ok(false) | Err(_) => &counters.failed_repairs,
        };
        let count = u64::try_from(remaining.len()).unwrap_or(u64::MAX);
        // `Relaxed`, since the counters are read for metrics only.
        counter.fetch_add(count, Ordering::Relaxed);
        if !renewed? {
            tracing::warn!(id, "the store has no copy of the damaged snapshots");
            return Ok(Damages::new());
        }
        tracing::info!(id, "fetched damaged snapshots again");
        // Guests in the warm pool may already have read damaged memory.
        self.clear_damaged_pool(&remaining);
        Ok(remaining)
    }

    /// Like [`Self::repair`], after an operation on snapshot `id` failed with `error`. Returns the
    /// error to report, unless a retry of the operation may succeed.
    pub(in crate::sandboxes) async fn repair_after(
        self,
        id: &str,
        error: OperationError,
    ) -> Result<(), OperationError> {
        match self.repair(id, Damages::new()).await {
            Ok(repaired) if !repaired.is_empty() => Ok(()),
            Ok(_) => Err(error),
            // A client can retry after `Busy`, but not after `error`.
            Err(e) if e.kind() == ErrorKind::Busy => Err(e),
            Err(e) => {
                tracing::warn!(id, error = %e, "cannot fetch a damaged snapshot again");
                Err(error)
            }
        }
    }

    /// Returns the damage in the lineage of `id` that is detected without reading layers.
    async fn find_damages(self, id: &str) -> Result<Damages, OperationError> {
        // Snapshots of a lineage have one engine.
        let Ok(engine) = self.0.snapshot_engines.engine_of(id).cloned() else {
            return Ok(Damages::new());
        };
        let mut lineage = Vec::new();
        let mut next = Some(id.to_owned());
        while let Some(id) = next.filter(|id| !lineage.contains(id)) {
            // An independent snapshot needs no ancestor, so the search ends there.
            let based = !engine.snapshot_files().is_independent(&id);
            next = self.0.catalog.get(&id).and_then(|record| record.parent);
            next = next.filter(|_| based);
            lineage.push(id);
        }
        let search = tokio::task::spawn_blocking(move || {
            let damages = lineage.into_iter().filter_map(|id| {
                let damage = engine.snapshot_files().find_damage(&id)?;
                Some((id, damage))
            });
            damages.collect()
        });
        search
            .await
            .map_err(|e| OperationError::Lost(e.to_string()))
    }

    /// Stops the guests of the warm pool if one of them was restored from a damaged snapshot.
    fn clear_damaged_pool(self, damaged: &Damages) {
        let waiting = self.0.pool.snapshots();
        let mut lineages = waiting.iter().map(|id| self.lineage(Some(id)));
        if lineages.any(|lineage| damaged.keys().any(|id| lineage.contains(id))) {
            self.0.pool.clear();
        }
    }
}

impl Fetch {
    /// Fetches the snapshots of `damaged` in the lineage of `id`, and their ancestors that are not
    /// on this host. Returns false if the store lacks one of them.
    async fn renew(&self, id: &str, damaged: &Damages) -> Result<bool, OperationError> {
        // The search has several starting points: a snapshot that was not uploaded may descend from
        // an uploaded one.
        let names = std::iter::once(id).chain(damaged.keys().map(String::as_str));
        for name in names {
            if self.renew_below(name, damaged).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Fetches the snapshots of `damaged` if the lineage of `id` in the store contains all of them.
    /// Returns whether they were fetched.
    async fn renew_below(&self, id: &str, damaged: &Damages) -> Result<bool, OperationError> {
        let lineage = self.remote.find(self.owner.as_deref(), id).await;
        let Some(lineage) = lineage.map_err(Self::store_error(id))? else {
            return Ok(false);
        };
        let is_in_lineage = |id: &String| lineage.iter().any(|source| source.id == *id);
        if !damaged.keys().all(is_in_lineage) {
            return Ok(false);
        }
        let pins = lineage
            .iter()
            .map(|source| self.this.0.catalog.pin(&source.id));
        let _pins: Vec<_> = pins.collect();
        let mut missing: Vec<Missing> = Vec::new();
        let mut is_needed = false;
        for (depth, source) in lineage.into_iter().enumerate() {
            let is_local = self.find_local(&source.id).is_some();
            // A merge may have removed ancestors from this host on which the store's copy of a
            // needed snapshot depends. These ancestors are fetched too.
            is_needed = damaged.contains_key(&source.id) || (is_needed && !is_local);
            if is_needed {
                missing.push(self.describe(source, depth == 0, None).await?);
            }
        }
        // No quota is reserved: the snapshots already count in the usage of their owner.
        self.check_disk(&missing)?;
        let pulls = missing.iter().map(|missing| Box::pin(self.pull(missing)));
        let pulled: Vec<_> = futures_util::future::try_join_all(pulls).await?;
        // Oldest first: an engine imports a snapshot only if its parent is on the disk.
        for (missing, files) in missing.into_iter().zip(pulled).rev() {
            match self.find_local(&missing.source.id) {
                Some(held) => self.replace(missing, files, held.snapshot()).await?,
                None => self.store_fetched(missing, files).await?,
            }
        }
        Ok(true)
    }

    /// Replaces the files of a snapshot by the fetched ones.
    async fn replace(
        &self,
        missing: Missing,
        files: Vec<PulledFile>,
        record: &Snapshot,
    ) -> Result<(), OperationError> {
        let id = &record.id;
        let lock = self.this.0.fetch_locks.get(id.clone());
        let _guard = lock.lock().await;
        let failed = || OperationError::engine(format!("replace damaged snapshot {id}"));
        let engine = &missing.import.engine;
        let stored = self
            .this
            .0
            .engines
            .snapshot_files(engine)
            .map_err(failed())?;
        let files = files.into_iter().map(|file| Arc::new(Pulled(file)) as _);
        stored
            .import(&missing.import, files.collect(), ExistingSnapshot::Replace)
            .await
            .map_err(failed())?;
        let bytes = stored.size(id).unwrap_or(record.bytes);
        self.this.0.catalog.update(id, |record| {
            record.bytes = bytes;
            // The copy may depend on ancestors that a merge had removed on this host.
            record.parent = missing.import.parent;
        });
        self.this.0.upkeep.enqueue_checksums(id);
        Ok(())
    }
}
