//! `POST /prune`: lists or removes unused data.

use crate::app::App;
use crate::body::Optional;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::hooks::TemplateInfo;
use axum::Json;
use axum::extract::State;
use jiffy_api_types::{PruneHost, PruneItem, PruneKind, PrunedHost};
use jiffy_image::is_image_on_demand;
use jiffy_sandbox_manager::{SandboxState, Snapshot, SnapshotPurpose};
use jiffy_template_builder::BuilderError;
use std::collections::HashSet;
use std::time::Duration;

/// Maximum of `unused_seconds`: ten years. Greater values are reduced to it.
const MAX_UNUSED_S: u64 = 10 * 365 * 24 * 3600;

/// Unused data that is to be removed.
struct PrunePlan {
    /// Owner of the data. `None` for the data of the host and of all keys.
    owner: Option<String>,
    /// Minimum time without use. Records of killed sandboxes are removed regardless of their age.
    unused: Duration,
    items: Vec<PruneItem>,
}

fn of_snapshot(kind: PruneKind, snapshot: Snapshot) -> PruneItem {
    PruneItem {
        kind,
        id: snapshot.id().to_owned(),
        name: Some(snapshot.template().to_owned()),
        bytes: snapshot.bytes(),
    }
}

impl PrunePlan {
    fn ids(&self, kind: PruneKind) -> Vec<String> {
        let items = self.items.iter().filter(|item| item.kind == kind);
        items.map(|item| item.id.clone()).collect()
    }

    fn is_of(&self, owner: Option<&str>) -> bool {
        self.owner.is_none() || owner == self.owner.as_deref()
    }

    /// Collects unused data. Reads the disk.
    fn new(app: &App, owner: Option<String>, unused: Duration) -> Result<Self, ApiError> {
        let items = Vec::new();
        let mut plan = Self {
            owner,
            unused,
            items,
        };
        let all = app.sandboxes.list();
        for sandbox in &all {
            // Only the record of a killed sandbox remains.
            if *sandbox.state() == SandboxState::Killed && plan.is_of(sandbox.owner()) {
                plan.items.push(PruneItem {
                    kind: PruneKind::Sandbox,
                    id: sandbox.id().to_owned(),
                    name: sandbox.name().map(str::to_owned),
                    bytes: 0,
                });
            }
        }
        let alive = all.iter().filter(|s| *s.state() != SandboxState::Killed);
        // Templates made on demand from an image of a registry are in use if a sandbox or a
        // retained snapshot was created from them. A snapshot of the template itself does not
        // count.
        let mut used: HashSet<String> = alive.map(|s| s.template().to_owned()).collect();
        let snapshots = app.sandboxes.snapshots().list(None)?;
        let retained = snapshots
            .iter()
            .filter(|s| s.purpose() != SnapshotPurpose::Template);
        used.extend(retained.map(|s| s.template().to_owned()));
        let templates = app.templates.list();
        let templates = templates.map_err(|e| ApiError::internal(e.to_string()))?;
        let on_demand: Vec<TemplateInfo> = templates
            .into_iter()
            .filter(|t| plan.is_old_on_demand(t) && !used.contains(&t.reference()))
            .collect();
        for template in &on_demand {
            plan.items.push(PruneItem {
                kind: PruneKind::Template,
                id: template.reference(),
                name: None,
                // The image files, which are items of their own, occupy the disk space.
                bytes: 0,
            });
        }
        // Snapshots of booted templates belong to the host, so only administrators remove them.
        if plan.owner.is_none() {
            let idle = app.sandboxes.templates().idle(unused);
            let idle = idle
                .into_iter()
                .map(|s| of_snapshot(PruneKind::Snapshot, s));
            plan.items.extend(idle);
        }
        plan.add_builds(app)?;
        Ok(plan)
    }

    /// Returns whether a template was made on demand from an image of a registry at least `unused`
    /// ago. The owner of the template must be in the scope of this plan.
    fn is_old_on_demand(&self, template: &TemplateInfo) -> bool {
        // Times of templates are in seconds.
        let now = jiffy_engine_api::now_ms() / 1000;
        let old = template.created.saturating_add(self.unused.as_secs()) <= now;
        is_image_on_demand(&template.name) && old && self.is_of(template.owner.as_deref())
    }

    /// Adds unused results of builds, and the image files (contents of templates' disks) that no
    /// remaining template requires.
    fn add_builds(&mut self, app: &App) -> Result<(), ApiError> {
        let Some(builder) = &app.builder else {
            return Ok(());
        };
        let found = builder.prunable(self.unused, self.owner.as_deref())?;
        let steps = found
            .steps
            .into_iter()
            .map(|s| of_snapshot(PruneKind::Step, s));
        self.items.extend(steps);
        self.add_uploads(found.upload_bytes);
        if self.owner.is_none() {
            // [`Self::execute`] removes the templates of this plan, and the templates that builds
            // imported from registries (`imports`). The image files of both become unused.
            let mut removed = self.ids(PruneKind::Template);
            removed.extend(found.imports);
            let images = builder.prunable_images(&removed)?;
            self.add_images(&images);
        }
        Ok(())
    }

    fn add_uploads(&mut self, bytes: u64) {
        if bytes > 0 {
            self.items.push(PruneItem {
                kind: PruneKind::Upload,
                id: "uploads".to_owned(),
                name: None,
                bytes,
            });
        }
    }

    /// Adds the removed images to the report.
    fn add_images(&mut self, pruned: &jiffy_image::PrunedImages) {
        // `bytes` is the disk usage of all images, and `size` the apparent size of a sparse file.
        // The total is divided approximately: each image gets its apparent size while the total
        // lasts, and the last one the remainder.
        let mut left = pruned.bytes;
        for (at, image) in pruned.images.iter().enumerate() {
            let last = at + 1 == pruned.images.len();
            let bytes = if last { left } else { image.size.min(left) };
            left -= bytes;
            self.items.push(PruneItem {
                kind: PruneKind::Image,
                id: image.sha256.clone(),
                name: None,
                bytes,
            });
        }
    }

    /// Removes the planned data. Items that are in use by now are not removed, and are dropped from
    /// the result.
    async fn execute(mut self, app: &App) -> Result<Self, ApiError> {
        // Errors are not reported: an item that remains can be pruned later.
        let mut remaining = HashSet::new();
        for id in self.ids(PruneKind::Sandbox) {
            if app.sandboxes.remove(&id).await.is_err() {
                remaining.insert(id);
            }
        }
        for name in self.ids(PruneKind::Template) {
            if remove_template(app, &name).await.is_err() {
                remaining.insert(name);
            }
        }
        app.sandboxes
            .templates()
            // Snapshots that became used since the plan was made are not removed.
            .retire(&self.ids(PruneKind::Snapshot));
        // The planned image files are only a preview: a template that could not be removed still
        // requires its image files. The builder determines the unused image files again below.
        self.items.retain(|item| item.kind != PruneKind::Image);
        self.items.retain(|item| !remaining.contains(&item.id));
        let Some(builder) = app.builder.clone() else {
            return self.drop_remaining(app).await;
        };
        let (owner, unused) = (self.owner.clone(), self.unused);
        let work = tokio::task::spawn_blocking(move || {
            let pruned = builder.prune(unused, owner.as_deref())?;
            let images = match owner {
                None => builder.prune_images()?,
                Some(_) => jiffy_image::PrunedImages::default(),
            };
            Ok::<_, BuilderError>((pruned, images))
        });
        let (of_builds, images) = work
            .await
            .map_err(|e| ApiError::internal(e.to_string()))??;
        self.items.retain(|item| item.kind != PruneKind::Upload);
        self.add_uploads(of_builds.upload_bytes);
        self.add_images(&images);
        self.drop_remaining(app).await
    }

    /// Drops those snapshots from the result that still exist. Waits until the files of the removed
    /// snapshots are deleted, so that the space is free when the call returns.
    async fn drop_remaining(mut self, app: &App) -> Result<Self, ApiError> {
        let left = app.sandboxes.snapshots().list(None)?;
        let left: HashSet<String> = left.into_iter().map(|s| s.id().to_owned()).collect();
        self.items.retain(|item| match item.kind {
            PruneKind::Snapshot | PruneKind::Step => !left.contains(&item.id),
            _ => true,
        });
        app.sandboxes.snapshots().removed_files().await;
        Ok(self)
    }
}

/// Removes a template, with or without a record of the builder.
async fn remove_template(app: &App, name: &str) -> Result<(), ApiError> {
    if let Some(builder) = &app.builder {
        let (owner, own) = match name.split_once('/') {
            Some((owner, own)) => (Some(owner), own),
            None => (None, name),
        };
        // The builder also removes its own record of the template.
        if let Ok(record) = builder.owned_template(own, owner) {
            return Ok(builder.remove(&record).await?);
        }
    }
    let (templates, name) = (app.templates.clone(), name.to_owned());
    let removed = tokio::task::spawn_blocking(move || templates.remove(&name)).await;
    let removed = removed.map_err(|e| ApiError::internal(e.to_string()))?;
    removed.map_err(|e| ApiError::internal(e.to_string()))
}

/// `POST /prune`: a key with the scope `create` prunes its own data, an administrator all data.
pub(super) async fn prune(
    State(app): State<App>,
    caller: Caller,
    Optional(body): Optional<PruneHost>,
) -> Result<Json<PrunedHost>, ApiError> {
    let owner = caller.owner_scope().map(str::to_owned);
    let unused = Duration::from_secs(body.unused_seconds.min(MAX_UNUSED_S));
    let planner = app.clone();
    let plan = tokio::task::spawn_blocking(move || PrunePlan::new(&planner, owner, unused)).await;
    let mut plan = plan.map_err(|e| ApiError::internal(e.to_string()))??;
    if !body.dry_run {
        plan = plan.execute(&app).await?;
    }
    let own = |item: &mut PruneItem| {
        if item.kind == PruneKind::Template {
            item.id = caller.display_name(&item.id);
        }
    };
    plan.items.iter_mut().for_each(own);
    // Cannot overflow: the items are on one file system.
    let bytes: u64 = plan.items.iter().map(|item| item.bytes).sum();
    Ok(Json(PrunedHost {
        dry_run: body.dry_run,
        bytes,
        items: plan.items,
    }))
}
