//! Working sets: recorded with a template's snapshot, and read ahead of restores.

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

/// Time for which a working set that was in the page cache is taken to be there still.
const CACHED_FOR: Duration = Duration::from_secs(2);

/// Snapshots whose working sets were in the page cache a moment ago, and when.
#[derive(Debug, Clone, Default)]
pub(super) struct CachedWorkingSets(Arc<Mutex<HashMap<String, Instant>>>);

impl CachedWorkingSets {
    /// Has what a guest of `lineage` touches first read while its VMM starts, if it is on disk
    /// only.
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
            Ok(0) => cached.insert(id),
            Ok(bytes) => tracing::debug!(bytes, "reading a working set ahead"),
            Err(e) => tracing::debug!("not reading a working set ahead: {e}"),
        });
    }

    fn insert(&self, id: String) {
        let mut cached = self.0.lock();
        cached.retain(|_, seen| seen.elapsed() < CACHED_FOR);
        cached.insert(id, Instant::now());
    }
}

impl MicroVmEngine {
    /// Records what a guest of snapshot `id` touches up to the end of its first use.
    pub(super) async fn record_first_use(
        &self,
        template: &str,
        id: &str,
        site: &SiteSettings,
    ) -> Result<(), EngineError> {
        // Mapped, so that what is present afterwards is what was touched.
        let unassigned = self
            .restore_unassigned(id, |_| MemoryPolicy::Map, None)
            .await?;
        let sandbox_identity = SandboxIdentity {
            id: "template".to_owned(),
            site: site.clone(),
            ..SandboxIdentity::default()
        };
        let guest = unassigned.assign(&sandbox_identity).await?;
        // Every template's first use is a command; one without any does with the greeting.
        rehearse(&guest.vm).await;
        let startup = self.prepare(template).await?.startup;
        let recorded = self.record(&guest.vm, startup.first_use.as_ref()).await;
        guest.stop().await;
        let (set, written) = recorded?;
        let snapshot = self.shared.store.get(id).map_err(EngineError::failed)?;
        tracing::debug!(template, id, set.chunks, "working set recorded");
        let put = || match written {
            None => snapshot.put_written_pages(&set.written),
            // Before the other: who finds that one looks for it.
            Some(written) => {
                snapshot.put_first_use_pages(&set.written)?;
                snapshot.put_written_pages(&written)
            }
        };
        let put = snapshot.put_working_set(&set.touched).and_then(|()| put());
        put.map_err(EngineError::failed)
    }

    /// Working set of a guest that has rehearsed. With a first use it has done that, too, and the
    /// index of what was written until then is apart.
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
            tracing::warn!("a template's first use is not rehearsed: {problem}");
        }
        Ok((now().await?, Some(before.written)))
    }
}
