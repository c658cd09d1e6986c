//! Snapshots of steps: which were used when, and which are let go.

use super::records::{BuildRecords, RecordError, loaded, now_ms, stored};
use super::{Builder, BuilderError, BuilderInner, lock};
use jiffy_engine::Engine;
use jiffy_host::SnapshotRecord;
use jiffy_image::{Manifest, Pruned as PrunedImages, is_imported_image};
use rusqlite::params;
use std::collections::{HashMap, HashSet};
use std::sync::Weak;
use std::time::Duration;

/// When a step was made, or taken up by a build, for the last time. Earlier versions of this program do without.
pub(super) const STEPS_TABLE: &str = "
    CREATE STEPS_TABLE IF NOT EXISTS steps (
        key TEXT PRIMARY KEY,
        used_ms INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
";
/// How often is looked for what nobody used.
const PRUNE_INTERVAL: Duration = Duration::from_secs(24 * 3600);

/// What was removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PrunedBuildCache {
    /// Snapshots of steps.
    pub steps: usize,
    /// Bytes of uploads.
    pub upload_bytes: u64,
}

/// Things that make later builds faster and were not used for long.
#[derive(Debug, Clone, Default)]
pub struct PrunableBuildCache {
    /// Snapshots of steps.
    pub steps: Vec<SnapshotRecord>,
    /// Bytes of uploads.
    pub upload_bytes: u64,
    /// Templates that images of registries became for builds.
    pub imports: Vec<String>,
}

impl BuildRecords {
    /// Writes down that a step was used.
    pub fn use_step(&self, key: &str, at_ms: u64) -> Result<(), RecordError> {
        self.with(|c| {
            let write = "INSERT INTO steps (key, used_ms) VALUES (?1, ?2)
                ON CONFLICT (key) DO UPDATE SET used_ms = ?2";
            c.execute(write, params![key, stored(at_ms)]).map(drop)
        })
    }

    /// When each step was used last.
    fn uses(&self) -> Result<HashMap<String, u64>, RecordError> {
        self.with(|c| {
            let mut query = c.prepare_cached("SELECT key, used_ms FROM steps")?;
            let row = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, loaded(row.get(1)?)));
            query.query_map([], row)?.collect()
        })
    }

    fn forget_step(&self, key: &str) -> Result<(), RecordError> {
        self.with(|c| {
            c.execute("DELETE FROM steps WHERE key = ?1", [key])
                .map(drop)
        })
    }

    /// When the first of the builds that are under way began.
    fn building_since(&self) -> Result<Option<u64>, RecordError> {
        self.with(|c| {
            let query = "SELECT min(changed_ms) FROM builds WHERE status = 'building'";
            let first: Option<i64> = c.query_row(query, [], |row| row.get(0))?;
            Ok(first.map(loaded))
        })
    }
}

impl<E: Engine> BuilderInner<E> {
    /// Writes down that a build made or took up a step.
    pub(super) fn use_step(&self, key: &str) {
        if let Err(e) = self.records.use_step(key, now_ms()) {
            tracing::warn!("when a step was used is not written down: {e}");
        }
    }

    /// The latest moment, in milliseconds since 1970, whose last uses are so long ago. What a build
    /// that is under way took up is still needed.
    fn oldest_use(&self, now: u64, unused_for: Duration) -> Result<u64, BuilderError> {
        let unused_ms = u64::try_from(unused_for.as_millis()).unwrap_or(u64::MAX);
        let oldest = now.saturating_sub(unused_ms);
        Ok(match self.records.building_since()? {
            Some(began) => oldest.min(began.saturating_sub(1)),
            None => oldest,
        })
    }

    fn prunable(
        &self,
        unused_for: Duration,
        of: Option<&str>,
    ) -> Result<PrunableBuildCache, BuilderError> {
        let now = now_ms();
        let oldest = self.oldest_use(now, unused_for)?;
        let uses = self.records.uses()?;
        let mut steps = self.sandboxes.steps();
        steps.retain(|step| {
            let used = uses.get(&step.fingerprint).copied();
            let of_owner = of.is_none() || step.owner.as_deref() == of;
            of_owner && used.unwrap_or(step.created_ms) <= oldest
        });
        let uploads = self
            .uploads
            .prunable(Duration::from_millis(now - oldest), of);
        let mut imports = Vec::new();
        if of.is_none() && lock(&self.running).is_empty() {
            let all = self.templates.list()?;
            let old = |m: &&Manifest| is_imported_image(&m.name) && m.created <= oldest / 1000;
            imports.extend(all.iter().filter(old).map(Manifest::reference));
        }
        Ok(PrunableBuildCache {
            steps,
            upload_bytes: uploads.map_err(BuilderError::Directory)?,
            imports,
        })
    }

    fn prune(
        &self,
        unused_for: Duration,
        of: Option<&str>,
    ) -> Result<PrunedBuildCache, BuilderError> {
        let now = now_ms();
        let oldest = self.oldest_use(now, unused_for)?;
        let mut uses = self.records.uses()?;
        let mut pruned = PrunedBuildCache::default();
        for step in self.sandboxes.steps() {
            if of.is_some() && step.owner.as_deref() != of {
                uses.remove(&step.fingerprint);
                continue;
            }
            let used = uses.get(&step.fingerprint).copied();
            let gone = used.unwrap_or(step.created_ms) <= oldest
                && self.sandboxes.release_snapshot(&step.id).is_ok();
            match gone {
                true => pruned.steps += 1,
                false => drop(uses.remove(&step.fingerprint)),
            }
        }
        // What is left are those of steps that are gone.
        for (key, used) in uses {
            if of.is_none() && used <= oldest {
                self.records.forget_step(&key)?;
            }
        }
        if of.is_none() {
            self.remove_images(oldest)?;
        }
        let freed = self.uploads.prune(Duration::from_millis(now - oldest), of);
        pruned.upload_bytes = freed.map_err(BuilderError::Directory)?;
        Ok(pruned)
    }
}

impl<E: Engine> BuilderInner<E> {
    /// Removes templates that images of registries became for builds before `oldest_ms`, unless a
    /// build is under way.
    fn remove_images(&self, oldest_ms: u64) -> Result<(), BuilderError> {
        // None is started meanwhile.
        let running = lock(&self.running);
        if running.is_empty() {
            self.templates.remove_imported_images(oldest_ms / 1000)?;
        }
        Ok(())
    }
}

impl<E: Engine> Builder<E> {
    /// Tells what [`Self::prune`] would remove.
    pub fn prunable(
        &self,
        unused_for: Duration,
        of: Option<&str>,
    ) -> Result<PrunableBuildCache, BuilderError> {
        self.0.prunable(unused_for, of)
    }

    /// Tells what images would go with the templates `without`.
    pub fn prunable_images(&self, without: &[String]) -> Result<PrunedImages, BuilderError> {
        Ok(self.0.templates.would_prune(without)?)
    }

    /// Removes images and versions of templates that nothing needs.
    pub fn prune_images(&self) -> Result<PrunedImages, BuilderError> {
        Ok(self.0.templates.prune()?)
    }

    /// Removes what makes later builds faster, if it was not used for so long: steps and uploads of one owner, or of all.
    /// Returns how many there were.
    pub fn prune(
        &self,
        unused_for: Duration,
        of: Option<&str>,
    ) -> Result<PrunedBuildCache, BuilderError> {
        self.0.prune(unused_for, of)
    }

    /// Does so now and once a day, as long as the builder is there.
    pub(super) fn keep_pruned(&self, unused_for: Duration) {
        let builder = std::sync::Arc::downgrade(&self.0);
        tokio::spawn(async move {
            let round = move |builder: Weak<BuilderInner<E>>| {
                builder.upgrade().map(|b| b.prune(unused_for, None))
            };
            loop {
                let builder_now = builder.clone();
                match tokio::task::spawn_blocking(move || round(builder_now)).await {
                    Ok(None) | Err(_) => return,
                    Ok(Some(Err(e))) => tracing::warn!("what builds keep stays for now: {e}"),
                    Ok(Some(Ok(pruned))) if pruned != PrunedBuildCache::default() => {
                        tracing::info!(
                            steps = pruned.steps,
                            upload_bytes = pruned.upload_bytes,
                            "removed what no build used for a long time"
                        )
                    }
                    Ok(Some(Ok(_))) => {}
                }
                tokio::time::sleep(PRUNE_INTERVAL).await;
            }
        });
    }

    /// Lets go of the steps that only older builds of a template were made of.
    pub(super) fn release_steps(&self, template: &str) {
        let records = &self.0.records;
        let result = || -> Result<(), RecordError> {
            let mut current = HashSet::new();
            let mut older = HashSet::new();
            for t in records.templates()? {
                for build in records.builds(&t.id)? {
                    // Without a tag it is not to be found any more.
                    let superseded = build.tags.is_empty() && t.id == template;
                    let steps = build.steps.into_iter();
                    match superseded {
                        true => older.extend(steps),
                        false => current.extend(steps),
                    }
                }
            }
            for step in self.0.sandboxes.steps() {
                let key = &step.fingerprint;
                if older.contains(key) && !current.contains(key) {
                    let _ = self.0.sandboxes.release_snapshot(&step.id);
                }
            }
            Ok(())
        };
        if let Err(e) = result() {
            tracing::warn!("steps of older builds stay: {e}");
        }
    }
}
