//! Templates as snapshots: booted once, and restored from then on.

use super::create::GuestOrigin;
use super::entry::lock;
use super::{OperationError, Sandboxes};
use crate::quota::QuotaPermit;
use crate::records::{SnapshotPurpose, SnapshotRecord};
use crate::site;
use crate::startup::start_up;
use jiffy_engine::{
    AfterSnapshot, BootMode, Engine, EngineError, Guest, SandboxIdentity, SandboxSize,
    UnassignedGuest, new_id, now_ms,
};
use jiffy_proto::agent::SiteSettings;
use sha1::{Digest, Sha1};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Sizes of one template that keep their snapshot. Callers choose sizes freely, and each snapshot
/// takes disk space that no key is charged for.
const MAX_SIZES_PER_TEMPLATE: usize = 8;

/// A word for the settings that are in every template snapshot.
pub(super) fn site_mark(site: &SiteSettings) -> String {
    if site.is_empty() {
        return String::new();
    }
    // Of strings alone: this cannot fail.
    let text = serde_json::to_vec(site).unwrap_or_default();
    let hash = Sha1::digest(&text);
    let hash: String = hash.iter().map(|b| format!("{b:02x}")).collect();
    format!(" site {hash}")
}

impl<E: Engine> Sandboxes<E> {
    /// A guest of `template` on the engine of this name, or the default: from the warm pool, which
    /// the default has, else from the template's snapshot, which is made first if there is none.
    pub(super) async fn origin_in_template(
        &self,
        engine_name: Option<&str>,
        template: &str,
        size: SandboxSize,
    ) -> Result<GuestOrigin<E::UnassignedGuest>, OperationError> {
        let engine = &self.0.engine;
        let failed = || OperationError::engine(format!("use template `{template}`"));
        let fingerprint = self
            .template_fingerprint(engine_name, template, size)
            .await?;
        if let Some((unassigned, snapshot)) = self.0.pool.take(&fingerprint) {
            self.note_template_use(&snapshot);
            self.refill(&fingerprint, template, &snapshot);
            return Ok(GuestOrigin {
                unassigned,
                mode: BootMode::WarmPool,
                snapshot: Some(snapshot),
                revive_reason: None,
            });
        }
        let found = self.template_snapshot(engine_name, template, size, &fingerprint);
        match found.await {
            Ok(snapshot) => {
                self.note_template_use(&snapshot);
                let (_, _pin) = self.pin(&snapshot)?;
                let origin = self
                    .origin_in_snapshot(template, &snapshot, BootMode::Snapshot)
                    .await?;
                if engine_name.is_none() {
                    self.refill(&fingerprint, template, &snapshot);
                }
                Ok(origin)
            }
            Err(OperationError::Engine {
                source: EngineError::Unsupported { .. },
                ..
            }) => Ok(GuestOrigin {
                unassigned: engine
                    .boot(engine_name, template, size)
                    .await
                    .map_err(failed())?,
                mode: BootMode::Cold,
                snapshot: None,
                revive_reason: None,
            }),
            Err(e) => Err(e),
        }
    }

    /// Makes sure that there is a shelf for `template` in `size`, and has it filled.
    pub(super) async fn cache_template_snapshot(
        &self,
        template: &str,
        size: SandboxSize,
    ) -> Result<(), OperationError> {
        let fingerprint = self.template_fingerprint(None, template, size).await?;
        let snapshot = self.template_snapshot(None, template, size, &fingerprint);
        let snapshot = snapshot.await?;
        self.refill(&fingerprint, template, &snapshot);
        Ok(())
    }

    /// Returns a fingerprint of what the snapshot of a booted template depends on.
    pub(super) async fn template_fingerprint(
        &self,
        engine_name: Option<&str>,
        template: &str,
        size: SandboxSize,
    ) -> Result<String, OperationError> {
        let fingerprint = self.0.engine.fingerprint(engine_name, template, size).await;
        let fingerprint =
            fingerprint.map_err(OperationError::engine(format!("use template `{template}`")))?;
        Ok(fingerprint + &self.0.site_mark)
    }

    fn find_template_snapshot(&self, fingerprint: &str) -> Option<String> {
        let snapshots = lock(&self.0.snapshots);
        let mut found = snapshots.kept_for(SnapshotPurpose::Template, fingerprint);
        found.next().map(|s| s.id.clone())
    }

    /// The snapshot of the booted template. However many ask at once, one makes it and the others
    /// wait.
    pub(super) async fn template_snapshot(
        &self,
        engine_name: Option<&str>,
        template: &str,
        size: SandboxSize,
        fingerprint: &str,
    ) -> Result<String, OperationError> {
        if let Some(id) = self.find_template_snapshot(fingerprint) {
            return Ok(id);
        }
        let making = lock(&self.0.making)
            .entry(fingerprint.to_owned())
            .or_default()
            .clone();
        let _op_guard = making.lock().await;
        if let Some(id) = self.find_template_snapshot(fingerprint) {
            return Ok(id);
        }
        let failed = || OperationError::engine(format!("boot template `{template}`"));
        let engine = &self.0.engine;
        let sandbox_identity = SandboxIdentity {
            id: "template".to_owned(),
            // Site settings that every sandbox gets are there when it is restored, also for running
            // programs.
            site: site::joined(&self.0.site, &SiteSettings::default()),
            ..SandboxIdentity::default()
        };
        let unassigned = engine.boot(engine_name, template, size).await;
        let unassigned = unassigned.map_err(failed())?;
        let guest = Arc::new(
            unassigned
                .assign_identity(&sandbox_identity)
                .await
                .map_err(failed())?,
        );
        if let Err(e) = self.start_up(template, &guest).await {
            guest.stop().await;
            return Err(e);
        }
        guest.rehearse().await;
        let record = SnapshotRecord {
            id: new_id()?,
            name: None,
            purpose: SnapshotPurpose::Template,
            sandbox: String::new(),
            owner: None,
            env: BTreeMap::new(),
            site: SiteSettings::default(),
            template: template.to_owned(),
            fingerprint: fingerprint.to_owned(),
            size,
            engine: None,
            parent: None,
            kept: true,
            stopped_ms: 0.0,
            total_ms: 0.0,
            bytes: 0,
            created_ms: now_ms(),
        };
        let permit = QuotaPermit::unlimited();
        let taken = self.take(&guest, record, AfterSnapshot::Stop, &permit, |_| Vec::new());
        let taken = taken.await;
        guest.stop().await;
        let snapshot = taken?;
        // Sizes that are made at the same time must not take it away before its first use.
        let _pin = self.hold(&snapshot.id);
        self.note_template_use(&snapshot.id);
        self.retire_older(&snapshot);
        self.retire_surplus(&snapshot);
        if let Err(e) = engine
            .record_working_set(template, &snapshot.id, &sandbox_identity.site)
            .await
        {
            tracing::warn!(template, "what its guests touch first is not known: {e}");
        }
        Ok(snapshot.id)
    }

    /// Starts what the template starts in a guest that was booted, not restored, and waits until
    /// that is ready.
    pub(super) async fn start_up(
        &self,
        template: &str,
        guest: &Arc<E::Guest>,
    ) -> Result<(), OperationError> {
        let failed = || OperationError::engine(format!("boot template `{template}`"));
        let startup = self.0.engine.startup(template).await.map_err(failed())?;
        if startup.is_empty() {
            return Ok(());
        }
        let connector = guest.clone();
        let starting = start_up(&startup, move |port| {
            let guest = connector.clone();
            async move { guest.connect(port).await }
        });
        tokio::select! {
            started = starting => started.map_err(|source| OperationError::Startup {
                template: template.to_owned(),
                source,
            }),
            end = guest.ended() => Err(failed()(EngineError::Ended { end })),
        }
    }

    /// Snapshots of templates that have become something else, or are gone, serve no new sandbox
    /// either, and hold what the templates were.
    pub(super) fn retire_unused(&self) {
        let of_template = |s: &SnapshotRecord| s.purpose == SnapshotPurpose::Template && s.kept;
        let snapshots = lock(&self.0.snapshots);
        let kept = snapshots.values().filter(|s| of_template(s));
        let kept: Vec<_> = kept.map(|s| (s.id.clone(), s.template.clone())).collect();
        drop(snapshots);
        let serves = |id: &str, template: &str| self.0.engine.is_current(template, id);
        let unused = kept
            .into_iter()
            .filter(|(id, template)| !serves(id, template));
        self.retire(unused.map(|(id, _)| id).collect());
    }

    /// Snapshots of the same template, size and engine with another fingerprint serve no new
    /// sandbox.
    pub(super) fn retire_older(&self, newest: &SnapshotRecord) {
        let older = |s: &SnapshotRecord| {
            let same = (&s.template, s.size) == (&newest.template, newest.size);
            // Records of earlier versions do not tell: they are of another agent or kernel.
            let other_engine = s.engine.is_some() && s.engine != newest.engine;
            let old = s.purpose == SnapshotPurpose::Template && s.id != newest.id && s.kept;
            old && same && !other_engine
        };
        self.retire(self.ids_of(older));
    }

    /// Lets go of the sizes of a template that were not used for longest, beyond
    /// [`MAX_SIZES_PER_TEMPLATE`]. Their next create boots.
    fn retire_surplus(&self, newest: &SnapshotRecord) {
        let other = |s: &SnapshotRecord| {
            let same = s.template == newest.template && s.id != newest.id;
            s.purpose == SnapshotPurpose::Template && same && s.kept
        };
        let mut others = self.ids_of(other);
        let Some(surplus) = (others.len() + 1).checked_sub(MAX_SIZES_PER_TEMPLATE) else {
            return;
        };
        let uses = lock(&self.0.template_uses);
        // Unused ones come first.
        others.sort_by_key(|id| uses.get(id).copied());
        drop(uses);
        others.truncate(surplus);
        self.retire(others);
    }

    /// Snapshots of booted templates that nothing runs, waits or descends from, and that no create
    /// used for so long. Without one the template's next create boots.
    pub fn idle_template_snapshots(&self, unused_for: Duration) -> Vec<SnapshotRecord> {
        let waiting = self.0.pool.snapshots();
        let uses = lock(&self.0.template_uses).clone();
        let unused_ms = u64::try_from(unused_for.as_millis()).unwrap_or(u64::MAX);
        let limit_ms = now_ms().saturating_sub(unused_ms);
        let snapshots = lock(&self.0.snapshots);
        let idle = |s: &&SnapshotRecord| {
            let used = match uses.get(&s.id) {
                Some(at) => at.elapsed() < unused_for,
                // Uses are known since the daemon started.
                None => s.created_ms > limit_ms,
            };
            let needed = waiting.contains(&s.id)
                || self.0.indexes.users.has_any(&s.id)
                || snapshots.children(&s.id).next().is_some();
            s.purpose == SnapshotPurpose::Template && s.kept && !used && !needed
        };
        snapshots.values().filter(idle).cloned().collect()
    }

    /// Lets go of snapshots of booted templates.
    pub fn retire_templates(&self, ids: &[String]) {
        let of_template = |id: &String| {
            let snapshots = lock(&self.0.snapshots);
            let found = snapshots.get(id);
            found.is_some_and(|s| s.purpose == SnapshotPurpose::Template)
        };
        self.retire(ids.iter().filter(|id| of_template(id)).cloned().collect());
    }

    fn note_template_use(&self, snapshot: &str) {
        lock(&self.0.template_uses).insert(snapshot.to_owned(), Instant::now());
    }

    /// Lets go of the snapshots of booted templates.
    fn retire(&self, ids: Vec<String>) {
        for id in &ids {
            lock(&self.0.template_uses).remove(id);
            if let Some(retired) = self.update_snapshot(id, |s| s.kept = false) {
                self.0.pool.drop_bucket(&retired.fingerprint);
            }
        }
        self.gc_snapshots(ids);
    }

    /// Ids of the snapshots that are `wanted`.
    pub(super) fn ids_of(&self, wanted: impl Fn(&SnapshotRecord) -> bool) -> Vec<String> {
        let snapshots = lock(&self.0.snapshots);
        let wanted = snapshots.values().filter(|s| wanted(s));
        wanted.map(|s| s.id.clone()).collect()
    }
}
