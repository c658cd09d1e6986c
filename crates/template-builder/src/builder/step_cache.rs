//! Cache of build steps. Each step has a snapshot. Steps that no build has used for some time are
//! pruned. The fingerprint of a step's snapshot is the key of the step, a hash of everything that
//! determines its result.

use super::records::RecordError;
use super::{Builder, BuilderError, BuilderInner};
use jiffy_engine_api::{is_imported_image, now_ms};
use jiffy_image::{PrunedImages, TemplateManifest};
use jiffy_sandbox_manager::{START_DELAY, Snapshot};
use std::collections::HashSet;
use std::sync::Weak;
use std::time::Duration;

/// Interval between removals of unused steps and uploads.
const PRUNE_INTERVAL: Duration = Duration::from_secs(24 * 3600);

/// Removed parts of the build cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PrunedBuildCache {
    /// Snapshots of steps.
    pub steps: usize,
    /// Bytes of uploads.
    pub upload_bytes: u64,
}

/// Unused parts of the build cache.
#[derive(Debug, Clone, Default)]
pub struct PrunableBuildCache {
    /// Snapshots of steps.
    pub steps: Vec<Snapshot>,
    /// Bytes of uploads.
    pub upload_bytes: u64,
    /// Templates that were imported from registries for builds.
    pub imports: Vec<String>,
}

impl BuilderInner {
    /// Records that a build created or restored a step.
    pub(super) fn touch_step(&self, key: &str) {
        if let Err(e) = self.records.touch_step(key, now_ms()) {
            tracing::warn!(error = %e, "cannot record the use of a build step");
        }
    }

    /// Returns the pruning cutoff in milliseconds since 1970. A step is unused if its last use was
    /// at or before the cutoff. The cutoff is before the start of every running build, so that no
    /// step of a running build is pruned.
    fn prune_cutoff_ms(&self, now: u64, unused_for: Duration) -> Result<u64, BuilderError> {
        let unused_ms = u64::try_from(unused_for.as_millis()).unwrap_or(u64::MAX);
        let cutoff_ms = now.saturating_sub(unused_ms);
        Ok(match self.records.building_since()? {
            Some(start_ms) => cutoff_ms.min(start_ms.saturating_sub(1)),
            None => cutoff_ms,
        })
    }

    /// Returns the data that [`Self::prune`] would remove for the owner `of`, or for all owners.
    fn prunable(
        &self,
        unused_for: Duration,
        of: Option<&str>,
    ) -> Result<PrunableBuildCache, BuilderError> {
        let now = now_ms();
        let cutoff_ms = self.prune_cutoff_ms(now, unused_for)?;
        let last_uses = self.records.last_uses()?;
        let mut steps = self.sandboxes.build_steps().list();
        steps.retain(|step| {
            let used = last_uses.get(step.fingerprint()).copied();
            let of_owner = of.is_none() || step.owner() == of;
            // A step may have no recorded use, for example if an earlier version of Jiffy created
            // it. Its creation time then counts as the last use.
            of_owner && used.unwrap_or(step.created_ms()) <= cutoff_ms
        });
        let uploads = self
            .uploads
            .prunable(Duration::from_millis(now - cutoff_ms), of);
        let mut imports = Vec::new();
        if of.is_none() && self.running.lock().is_empty() {
            // A running build may use an imported image that no template refers to yet.
            let all = self.templates.list()?;
            // `created` is in seconds since 1970.
            let old =
                |m: &&TemplateManifest| is_imported_image(&m.name) && m.created <= cutoff_ms / 1000;
            imports.extend(all.iter().filter(old).map(TemplateManifest::reference));
        }
        Ok(PrunableBuildCache {
            steps,
            upload_bytes: uploads.map_err(BuilderError::Directory)?,
            imports,
        })
    }

    /// Removes the unused steps and uploads of the owner `of`, or of all owners.
    fn prune(
        &self,
        unused_for: Duration,
        of: Option<&str>,
    ) -> Result<PrunedBuildCache, BuilderError> {
        let now = now_ms();
        let cutoff_ms = self.prune_cutoff_ms(now, unused_for)?;
        let mut last_uses = self.records.last_uses()?;
        let mut pruned = PrunedBuildCache::default();
        for step in self.sandboxes.build_steps().list() {
            if of.is_some() && step.owner() != of {
                // The step remains, and so does the record of its use.
                last_uses.remove(step.fingerprint());
                continue;
            }
            let used = last_uses.get(step.fingerprint()).copied();
            let is_removed = used.unwrap_or(step.created_ms()) <= cutoff_ms
                // The call fails if sandboxes or other snapshots depend on the snapshot.
                && self.sandboxes.snapshots().remove(step.id()).is_ok();
            if is_removed {
                pruned.steps += 1;
            } else {
                last_uses.remove(step.fingerprint());
            }
        }
        // The remaining entries belong to steps without a snapshot. Only a pass over all owners
        // deletes them.
        for (key, used) in last_uses {
            if of.is_none() && used <= cutoff_ms {
                self.records.delete_step_use(&key)?;
            }
        }
        if of.is_none() {
            self.gc_imported_images(cutoff_ms)?;
        }
        let freed = self
            .uploads
            .prune(Duration::from_millis(now - cutoff_ms), of);
        pruned.upload_bytes = freed.map_err(BuilderError::Directory)?;
        Ok(pruned)
    }
}

impl BuilderInner {
    /// Removes templates that were imported from registries at or before `cutoff_ms`, unless a
    /// build is running.
    fn gc_imported_images(&self, cutoff_ms: u64) -> Result<(), BuilderError> {
        // A build enters `running` before it starts: no build can start while this lock is held.
        let running = self.running.lock();
        if running.is_empty() {
            self.templates.remove_imported_images(cutoff_ms / 1000)?;
        }
        Ok(())
    }
}

impl Builder {
    /// Returns the result of [`Self::prune`] without removing anything.
    pub fn prunable(
        &self,
        unused_for: Duration,
        of: Option<&str>,
    ) -> Result<PrunableBuildCache, BuilderError> {
        self.0.prunable(unused_for, of)
    }

    /// Returns the images that would be removed together with the templates `without`.
    pub fn prunable_images(&self, without: &[String]) -> Result<PrunedImages, BuilderError> {
        Ok(self.0.templates.preview_prune(without)?)
    }

    /// Removes images and template versions without references.
    pub fn prune_images(&self) -> Result<PrunedImages, BuilderError> {
        Ok(self.0.templates.prune()?)
    }

    /// Removes steps and uploads of one owner, or of all owners, that were unused for `unused_for`.
    pub fn prune(
        &self,
        unused_for: Duration,
        of: Option<&str>,
    ) -> Result<PrunedBuildCache, BuilderError> {
        self.0.prune(unused_for, of)
    }

    /// Prunes after a short delay and then once a day, as long as the builder exists.
    pub(super) fn spawn_prune(&self, unused_for: Duration) {
        let builder = std::sync::Arc::downgrade(&self.0);
        tokio::spawn(async move {
            let round = move |builder: Weak<BuilderInner>| {
                builder.upgrade().map(|b| b.prune(unused_for, None))
            };
            // The first pruning is delayed, because it reads the names of all templates.
            tokio::time::sleep(START_DELAY).await;
            loop {
                let builder_now = builder.clone();
                match tokio::task::spawn_blocking(move || round(builder_now)).await {
                    // The builder was dropped, or the runtime shuts down.
                    Ok(None) | Err(_) => return,
                    Ok(Some(Err(e))) => tracing::warn!(error = %e, "cannot prune the build cache"),
                    Ok(Some(Ok(pruned))) if pruned != PrunedBuildCache::default() => {
                        tracing::info!(
                            steps = pruned.steps,
                            upload_bytes = pruned.upload_bytes,
                            "pruned the build cache"
                        )
                    }
                    Ok(Some(Ok(_))) => {}
                }
                tokio::time::sleep(PRUNE_INTERVAL).await;
            }
        });
    }

    /// Releases steps that are used only by superseded builds of a template.
    pub(super) fn release_superseded_steps(&self, template: &str) {
        let records = &self.0.records;
        let result = || -> Result<(), RecordError> {
            let mut current = HashSet::new();
            let mut superseded_steps = HashSet::new();
            for t in records.templates()? {
                for build in records.builds(&t.id)? {
                    // A build without tags is superseded.
                    let superseded = build.tags.is_empty() && t.id == template;
                    let steps = build.steps.into_iter();
                    // Steps that another build also uses remain.
                    if superseded {
                        superseded_steps.extend(steps)
                    } else {
                        current.extend(steps)
                    }
                }
            }
            for step in self.0.sandboxes.build_steps().list() {
                let key = step.fingerprint();
                if superseded_steps.contains(key) && !current.contains(key) {
                    // The call fails if sandboxes or other snapshots depend on the snapshot.
                    let _ = self.0.sandboxes.snapshots().remove(step.id());
                }
            }
            Ok(())
        };
        if let Err(e) = result() {
            tracing::warn!(error = %e, "cannot release the steps of superseded builds");
        }
    }
}
