//! Working sets: the memory that a guest touches first. The engine records them for the snapshots
//! of templates, and reads them into the page cache when a restore starts.
//!
//! The *lineage* of a snapshot is the snapshot and the chain of its ancestors. The *first use* is
//! the request or command with which most uses of a template's sandboxes start, as the template
//! describes it. A *rehearsal* runs simple commands, with which most first uses start.

use super::MicroVmEngine;
use crate::rehearsal::{rehearse, use_first};
use jiffy_engine_api::{Engine, EngineError, FirstUse, Guest, SandboxIdentity};
use jiffy_microvm_engine::{MemoryPolicy, MicroVm, WorkingSet};
use jiffy_proto::agent::SiteSettings;
use jiffy_snapshot::{Lineage, Snapshot};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Period for which a working set is assumed to stay in the page cache.
const CACHED_FOR: Duration = Duration::from_secs(2);

/// Snapshots whose working sets were recently in the page cache, with the time of the check.
#[derive(Debug, Clone, Default)]
pub(super) struct CachedWorkingSets(Arc<Mutex<HashMap<String, Instant>>>);

impl CachedWorkingSets {
    /// Reads the working set of `lineage` into the page cache in the background, while the VMM
    /// starts. Does nothing if an earlier call found it there within [`CACHED_FOR`].
    pub fn read_ahead(&self, lineage: &Lineage) {
        let Some(id) = lineage.newest().map(Snapshot::id) else {
            return;
        };
        let seen = self.0.lock().get(id).copied();
        if seen.is_some_and(|seen| seen.elapsed() < CACHED_FOR) {
            return;
        }
        let (cached, id, lineage) = (self.clone(), id.to_owned(), lineage.clone());
        tokio::task::spawn_blocking(move || match lineage.read_ahead() {
            // No bytes were requested: the working set is in the page cache, or is not recorded.
            Ok(0) => cached.insert(id),
            Ok(bytes) => tracing::debug!(id, bytes, "reading ahead a working set"),
            Err(e) => tracing::debug!(id, error = %e, "cannot read ahead a working set"),
        });
    }

    fn insert(&self, id: String) {
        let mut cached = self.0.lock();
        // Bounds the map by the number of restores within the period.
        cached.retain(|_, seen| seen.elapsed() < CACHED_FOR);
        cached.insert(id, Instant::now());
    }
}

impl MicroVmEngine {
    /// Records the memory that a guest of snapshot `id` touches until the end of its first use.
    pub(super) async fn record_first_use(
        &self,
        template: &str,
        id: &str,
        site: &SiteSettings,
    ) -> Result<(), EngineError> {
        // Map the memory: the pages that are present afterwards are exactly the touched pages.
        let unassigned = self
            .restore_unassigned(id, |_| MemoryPolicy::Map, None)
            .await?;
        let sandbox_identity = SandboxIdentity {
            id: "template".to_owned(),
            site: site.clone(),
            ..SandboxIdentity::default()
        };
        let guest = unassigned.assign(&sandbox_identity).await?;
        // A first use usually starts with a command, so every working set includes the rehearsal.
        // If the template has no first use, the working set ends with the rehearsal.
        rehearse(&guest.vm).await;
        let startup = self.prepare(template).await?.startup;
        let recorded = self.record(&guest.vm, startup.first_use.as_ref()).await;
        guest.stop().await;
        let (set, written) = recorded?;
        let snapshot = self.shared.store.get(id).map_err(EngineError::failed)?;
        tracing::debug!(template, id, set.chunks, "recorded a working set");
        let put = || match written {
            None => snapshot.put_written_pages(&set.written),
            // Write the index of the first use before the index of written pages: a reader that
            // finds
            // only the latter assumes that the template has no first use.
            Some(written) => {
                snapshot.put_first_use_pages(&set.written)?;
                snapshot.put_written_pages(&written)
            }
        };
        let put = snapshot.put_working_set(&set.touched).and_then(|()| put());
        put.map_err(EngineError::failed)
    }

    /// Returns the working set of a guest after its rehearsal and, if the template has a first use,
    /// after that use. The second value is the index of the pages written before the first use, or
    /// `None` if the template has no first use.
    async fn record(
        &self,
        vm: &MicroVm,
        first_use: Option<&FirstUse>,
    ) -> Result<(WorkingSet, Option<File>), EngineError> {
        let now = async || {
            vm.working_set(&self.shared.store)
                .await
                .map_err(EngineError::failed)
        };
        let before = now().await?;
        let Some(first_use) = first_use else {
            return Ok((before, None));
        };
        if let Err(problem) = use_first(vm, first_use).await {
            // The working set up to the failure is still useful.
            tracing::warn!(error = %problem, "cannot rehearse the first use of a template");
        }
        Ok((now().await?, Some(before.written)))
    }
}
