//! Publication of a build's result: writes the image, boots the template once, and assigns its
//! names.
//!
//! A *stage* is a part of a build that starts with a base image (`FROM`) and executes steps.

use super::super::failure::BuildFailure;
use super::super::{DEFAULT_TAG, step_key, transfer};
use super::stage::StageState;
use super::{BuildJob, BuildOutcome};
use jiffy_build_spec::spec::{BuildStage, BuildStep, StepAction};
use jiffy_engine_api::{StartCommand, Startup};
use jiffy_image::{
    Defaults, DerivedTemplate, DiskBudget, Progress, TemplateManifest, Visibility, unfinished_build,
};
use jiffy_sandbox_manager::Bytes;

/// Error for a build that starts the image's command, if the image has none.
const NO_IMAGE_COMMAND: &str = "no command to start: neither the Dockerfile nor its base \
     has a CMD or an ENTRYPOINT; specify a command with --start";

impl BuildJob {
    /// Publishes the result of the last stage as a template.
    pub(super) async fn publish(&self, mut at: StageState) -> Result<BuildOutcome, BuildFailure> {
        let startup = self.startup(&at)?;
        let defaults = Defaults {
            user: at.config.user.clone(),
            workdir: at.config.workdir.clone(),
            env: at.config.env.clone(),
            vcpus: Some(at.size.vcpus),
            memory_mib: Some(at.size.memory_mib),
            disk_mib: at.size.disk_mib,
        };
        // The image is written only if the first name has no template with the same content and
        // settings, or if the build is forced.
        let settings = serde_json::to_string(&(&defaults, &startup, &at.config.labels));
        let mut settings = settings.unwrap_or_default();
        // Templates without an idle timeout and network settings have the same key as in earlier
        // versions of Jiffy, so that existing templates are recognised.
        if let Some(seconds) = self.spec.idle_timeout_s {
            settings = format!("{settings}idle {seconds}");
        }
        if !self.spec.network.is_empty() {
            let network = serde_json::to_string(&self.spec.network).unwrap_or_default();
            settings = format!("{settings}network {network}");
        }
        let sum = step_key::template_key(&at.key, &settings);
        let names = self.template_names();
        let existing = self.inner.templates.manifest(&names[0]);
        // Disk space to reserve for the write: twice the size of the sandbox's disk, plus the
        // base's images, which the write may merge into the new image.
        let images: u64 = at.base.images.iter().map(|i| i.size).sum();
        let max_bytes = (at.size.disk_mib << 20)
            .saturating_mul(2)
            .saturating_add(images);
        let owner = self.template.owner.as_deref();
        let manifest = match existing {
            Ok(existing) if existing.recipe_sha256 == sum && !self.spec.force => existing,
            _ => {
                let permit = self.inner.reserve_template(owner, &[], max_bytes).await;
                let permit = permit.map_err(|e| BuildFailure::new(e.message))?;
                let free_bytes = permit.disk_bytes();
                let derived = self.derive(&mut at, defaults, startup, &sum, free_bytes);
                let manifest = derived.await?;
                self.check_image_size(&manifest, &at, free_bytes)?;
                manifest
            }
        };
        // Hold the permit until the names refer to the template, which then counts towards the
        // quota.
        let permit = self.inner.reserve_template(owner, &names, 0).await;
        let _permit = permit.map_err(|e| self.discard(&manifest, e.message))?;
        self.release_sandbox(&mut at).await;
        self.make_ready(&manifest, &at, &names).await?;
        Ok(BuildOutcome {
            version: manifest.version(),
            steps: at.steps,
        })
    }

    /// Removes a new template that exceeds a quota. Returns the failure.
    fn discard(&self, manifest: &TemplateManifest, why: String) -> BuildFailure {
        let reference = manifest.reference();
        // A template that existed before the build is not removed.
        if reference == self.unfinished_name()
            && let Err(e) = self.inner.templates.remove(&reference)
        {
            tracing::warn!(template = reference, error = %e, "cannot remove a template that exceeds the quota");
        }
        BuildFailure::new(why)
    }

    /// Fails if the template's new images are larger than `free_bytes`, the free disk quota.
    fn check_image_size(
        &self,
        manifest: &TemplateManifest,
        at: &StageState,
        free_bytes: Option<u64>,
    ) -> Result<(), BuildFailure> {
        // The build has not written the images of the base.
        let new = manifest
            .images
            .iter()
            .filter(|i| !at.base.images.contains(i));
        let bytes: u64 = new.map(|i| i.size).sum();
        match free_bytes.filter(|free_bytes| bytes > *free_bytes) {
            Some(free_bytes) => Err(self.discard(manifest, over_budget(bytes, free_bytes))),
            None => Ok(()),
        }
    }

    /// Rejects startups that would otherwise fail only after all steps and a timeout.
    pub(super) fn check_startup(
        &self,
        at: &StageState,
        stage: &BuildStage,
    ) -> Result<(), BuildFailure> {
        let config = &at.config;
        let sets_command = |step: &BuildStep| {
            matches!(step.action, StepAction::Cmd(_) | StepAction::Entrypoint(_))
        };
        let inherits = !config.entrypoint.is_empty() || !config.cmd.is_empty();
        if self.spec.start_image_command && !inherits && !stage.steps.iter().any(sets_command) {
            return Err(BuildFailure::new(NO_IMAGE_COMMAND));
        }
        let startup = &self.spec.startup;
        let starts = startup.start.is_some()
            || self.spec.start_image_command
            || at.base.startup.start.is_some();
        let port = startup.ready.as_ref().and_then(|ready| ready.port);
        match port.filter(|_| !starts) {
            Some(port) => Err(BuildFailure::new(format!(
                "the readiness check waits for port {port}, but the template has no start command"
            ))),
            None => Ok(()),
        }
    }

    /// Returns the startup of the template: the build's startup if it is specified, otherwise the
    /// base's startup.
    fn startup(&self, at: &StageState) -> Result<Startup, BuildFailure> {
        let mut startup = self.spec.startup.clone();
        if self.spec.start_image_command {
            let config = &at.config;
            let mut words = config.entrypoint.iter().chain(&config.cmd).cloned();
            let command = words
                .next()
                .ok_or_else(|| BuildFailure::new(NO_IMAGE_COMMAND))?;
            startup.start = Some(StartCommand {
                command,
                args: Some(words.collect()),
                user: None,
                workdir: None,
            });
        } else if startup.is_empty() {
            startup = at.base.startup.clone();
        } else if startup.start.is_none() {
            startup.start.clone_from(&at.base.startup.start);
        }
        Ok(startup)
    }

    /// Returns the names of the template, with owner and tag.
    fn template_names(&self) -> Vec<String> {
        let tags = self.build.tags.iter();
        let mut names: Vec<String> = tags.map(|tag| self.template.reference(tag)).collect();
        if names.is_empty() {
            names.push(self.template.reference(DEFAULT_TAG));
        }
        names
    }

    /// Returns the internal name of the template until it is ready.
    pub(super) fn unfinished_name(&self) -> String {
        let name = unfinished_build(&self.build.id);
        match &self.template.owner {
            Some(owner) => format!("{owner}/{name}"),
            None => name,
        }
    }

    /// Writes the changes of the stage's sandbox as an image, under the internal name of the build.
    async fn derive(
        &self,
        at: &mut StageState,
        defaults: Defaults,
        startup: Startup,
        sum: &str,
        free_bytes: Option<u64>,
    ) -> Result<TemplateManifest, BuildFailure> {
        self.log.info(Some("finalize"), "writing the image");
        let agent = self.agent(at).await?;
        let layer = agent.layer().await;
        let layer = layer.map_err(|e| BuildFailure::agent("read the changes of the build", e))?;
        let mut origin = at.base.origin.clone().unwrap_or_default();
        origin.entrypoint.clone_from(&at.config.entrypoint);
        origin.cmd.clone_from(&at.config.cmd);
        origin.exposed_ports.clone_from(&at.config.exposed);
        origin.on_build.clone_from(&at.config.on_build);
        // A template that was built from another template has no image of its own.
        if origin.from.is_empty() {
            origin.from = at.base.reference();
        }
        // The write runs on a thread for blocking calls, and owns its inputs.
        let (inner, log, base, sum) = (
            self.inner.clone(),
            self.log.clone(),
            at.base.clone(),
            sum.to_owned(),
        );
        let (name, history) = (self.unfinished_name(), at.history.clone());
        let (idle_timeout_s, network) = (self.spec.idle_timeout_s, self.spec.network.clone());
        let reader = transfer::blocking_reader(layer);
        let disk = free_bytes.map_or_else(DiskBudget::default, |free_bytes| {
            DiskBudget::new(move |bytes| {
                if bytes <= free_bytes {
                    Ok(())
                } else {
                    Err(over_budget(bytes, free_bytes))
                }
            })
        });
        // The lock is moved into the thread: a cancelled build must not remove the template during
        // the write.
        let writing = self.writing.clone().lock_owned().await;
        let work = move || {
            let _writing = writing;
            let derived = DerivedTemplate {
                name: &name,
                visibility: Some(Visibility::Internal),
                base: &base,
                defaults,
                idle_timeout_s,
                network,
                startup,
                origin: Some(origin),
                history,
                recipe_sha256: sum,
                limits: inner.settings.limits,
                disk,
            };
            let mut on_progress = |progress: Progress<'_>| log.on_progress("finalize", &progress);
            derived.build(&inner.templates, reader, &mut on_progress)
        };
        let template = tokio::task::spawn_blocking(work).await;
        self.log.end_progress();
        let template = template
            .map_err(|e| BuildFailure::new(e.to_string()))?
            .map_err(|e| BuildFailure::from_error(&e))?;
        Ok(template.manifest)
    }

    /// Boots the template, runs its startup, and then publishes its names.
    async fn make_ready(
        &self,
        manifest: &TemplateManifest,
        at: &StageState,
        names: &[String],
    ) -> Result<(), BuildFailure> {
        let reference = manifest.reference();
        // False if a template with the same content existed: then only its names change.
        let is_unfinished = reference == self.unfinished_name();
        if !manifest.startup.is_empty() {
            self.log.info(Some("finalize"), "running the start command");
        }
        let mut patience = self.patience();
        let ready = loop {
            let templates = self.inner.sandboxes.templates();
            match templates.make_ready(&reference, at.size).await {
                Err(e) if patience.pause(&e).await => {}
                ready => break ready,
            }
        };
        let publish = || -> Result<(), String> {
            // Read the record at the end: the owner may have changed the visibility during the
            // build.
            let record = self.inner.records.template(&self.template.id);
            let public = record.ok().flatten().is_some_and(|t| t.public);
            let visibility = if public {
                Visibility::Public
            } else {
                Visibility::Private
            };
            for name in names {
                // An existing template may already have one of the names.
                if *name != reference {
                    let tagged = self.inner.templates.tag(&reference, name, visibility);
                    tagged.map_err(|e| e.to_string())?;
                }
            }
            Ok(())
        };
        let published = match ready {
            Ok(_) => publish(),
            Err(e) => Err(e.to_string()),
        };
        // The snapshot of the booted template moves to its final name.
        if let (true, Ok(()), Some(name)) = (is_unfinished, &published, names.first()) {
            (self.inner.sandboxes)
                .templates()
                .hand_over(&reference, name);
        }
        // The tags share the image, so that the internal name is not needed any longer. After a
        // failure, this removes the unfinished template.
        if is_unfinished && let Err(e) = self.inner.templates.remove(&reference) {
            tracing::warn!(template = reference, error = %e, "cannot remove an unfinished template");
        }
        published.map_err(BuildFailure::new)
    }
}

/// Returns the message for an image of at least `bytes` while `free_bytes` of the disk quota are
/// free.
fn over_budget(bytes: u64, free_bytes: u64) -> String {
    format!(
        "the template's image requires at least {}, but only {} of this key's disk quota are free: remove \
         snapshots, templates or paused sandboxes, or raise the limit",
        Bytes(bytes),
        Bytes(free_bytes)
    )
}
