//! The template of a build: its image, its startup and its names.

use super::super::failure::BuildFailure;
use super::super::{DEFAULT_TAG, step_key, transfer};
use super::stage::StageState;
use super::{BuildJob, BuildOutcome};
use crate::spec::{BuildStage, BuildStep, StepAction};
use jiffy_engine::{Engine, StartCommand, Startup};
use jiffy_host::Bytes;
use jiffy_image::{Defaults, Derived, Manifest, Progress, Visibility, unfinished_build};

/// Refusal to start the command of an image that has none.
const NO_IMAGE_COMMAND: &str = "there is no command to start: neither the Dockerfile nor what it \
     begins with has a CMD or an ENTRYPOINT; name one with --start";

impl<E: Engine> BuildJob<E> {
    /// Makes the template of what the last stage has come to.
    pub(super) async fn finish(&self, mut at: StageState) -> Result<BuildOutcome, BuildFailure> {
        let startup = self.startup(&at)?;
        let defaults = Defaults {
            user: at.setting.user.clone(),
            workdir: at.setting.workdir.clone(),
            env: at.setting.env.clone(),
            vcpus: Some(at.size.vcpus),
            memory_mib: Some(at.size.memory_mib),
            disk_mib: at.size.disk_mib,
        };
        let about = serde_json::to_string(&(&defaults, &startup, &at.setting.labels));
        let sum = step_key::template_key(&at.key, &about.unwrap_or_default());
        let names = self.names();
        let there = self.inner.templates.manifest(&names[0]);
        // Nothing of a sandbox's disk is written twice; the rest are images that become one with it.
        let images: u64 = at.base.images.iter().map(|i| i.size).sum();
        let most = (at.size.disk_mib << 20)
            .saturating_mul(2)
            .saturating_add(images);
        let owner = self.template.owner.as_deref();
        let manifest = match there {
            Ok(there) if there.recipe_sha256 == sum && !self.spec.force => there,
            _ => {
                let room = self.inner.reserve_template(owner, &[], most).await;
                let room = room.map_err(|e| BuildFailure::of(e.message))?;
                let manifest = self.derive(&mut at, defaults, startup, &sum).await?;
                self.measure(&manifest, &at, room.disk_bytes())?;
                manifest
            }
        };
        // Held until its names lead to it.
        let room = self.inner.reserve_template(owner, &names, 0).await;
        let _room = room.map_err(|e| self.give_up(&manifest, e.message))?;
        self.let_go(&mut at).await;
        self.make_ready(&manifest, &at, &names).await?;
        Ok(BuildOutcome {
            version: manifest.version(),
            steps: at.steps,
        })
    }

    /// Removes a template that was just made and may not stay.
    fn give_up(&self, manifest: &Manifest, why: String) -> BuildFailure {
        let reference = manifest.reference();
        if reference == self.hidden()
            && let Err(e) = self.inner.templates.remove(&reference)
        {
            tracing::warn!("template {reference} stays: {e}");
        }
        BuildFailure::of(why)
    }

    /// Refuses a template whose images beside its base's have more bytes than `most`.
    fn measure(
        &self,
        made: &Manifest,
        at: &StageState,
        most: Option<u64>,
    ) -> Result<(), BuildFailure> {
        let new = made.images.iter().filter(|i| !at.base.images.contains(i));
        let bytes: u64 = new.map(|i| i.size).sum();
        match most.filter(|most| bytes > *most) {
            Some(most) => {
                let why = format!(
                    "the template's image has {}, and {} are left of this key's disk budget: remove snapshots, templates \
                     or paused sandboxes, or raise the limit",
                    Bytes(bytes),
                    Bytes(most)
                );
                Err(self.give_up(made, why))
            }
            None => Ok(()),
        }
    }

    /// Refuses at once what would be found out after all steps and a minute of waiting.
    pub(super) fn check_startup(
        &self,
        at: &StageState,
        stage: &BuildStage,
    ) -> Result<(), BuildFailure> {
        let setting = &at.setting;
        let says = |step: &BuildStep| {
            matches!(step.action, StepAction::Cmd(_) | StepAction::Entrypoint(_))
        };
        let inherits = !setting.entrypoint.is_empty() || !setting.cmd.is_empty();
        if self.spec.start_image_command && !inherits && !stage.steps.iter().any(says) {
            return Err(BuildFailure::of(NO_IMAGE_COMMAND));
        }
        let startup = &self.spec.startup;
        let starts = startup.start.is_some()
            || self.spec.start_image_command
            || at.base.startup.start.is_some();
        let port = startup.ready.as_ref().and_then(|ready| ready.port);
        match port.filter(|_| !starts) {
            Some(port) => Err(BuildFailure::of(format!(
                "nothing would listen on port {port}, which is awaited: the template starts nothing"
            ))),
            None => Ok(()),
        }
    }

    /// What the template starts and awaits: as the build says, else as what it begins with does.
    fn startup(&self, at: &StageState) -> Result<Startup, BuildFailure> {
        let mut startup = self.spec.startup.clone();
        if self.spec.start_image_command {
            let setting = &at.setting;
            let mut words = setting.entrypoint.iter().chain(&setting.cmd).cloned();
            let command = words
                .next()
                .ok_or_else(|| BuildFailure::of(NO_IMAGE_COMMAND))?;
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

    /// By which names the template is to be found.
    fn names(&self) -> Vec<String> {
        let tags = self.build.tags.iter();
        let mut names: Vec<String> = tags.map(|tag| self.template.called(tag)).collect();
        if names.is_empty() {
            names.push(self.template.called(DEFAULT_TAG));
        }
        names
    }

    /// Internal name of the template until it is ready.
    pub(super) fn hidden(&self) -> String {
        let name = unfinished_build(&self.build.id);
        match &self.template.owner {
            Some(owner) => format!("{owner}/{name}"),
            None => name,
        }
    }

    async fn derive(
        &self,
        at: &mut StageState,
        defaults: Defaults,
        startup: Startup,
        sum: &str,
    ) -> Result<Manifest, BuildFailure> {
        self.log.info(Some("finalize"), "writing the image");
        let agent = self.agent(at).await?;
        let layer = agent.layer().await;
        let layer = layer.map_err(|e| BuildFailure::agent("read what the build changed", e))?;
        let mut origin = at.base.origin.clone().unwrap_or_default();
        origin.entrypoint.clone_from(&at.setting.entrypoint);
        origin.cmd.clone_from(&at.setting.cmd);
        origin.exposed_ports.clone_from(&at.setting.exposed);
        if origin.from.is_empty() {
            origin.from = at.base.reference();
        }
        let (inner, log, base, sum) = (
            self.inner.clone(),
            self.log.clone(),
            at.base.clone(),
            sum.to_owned(),
        );
        let (name, history) = (self.hidden(), at.history.clone());
        let reader = transfer::reader(layer);
        let writing = self.writing.clone().lock_owned().await;
        let work = move || {
            let _writing = writing;
            let derived = Derived {
                name: &name,
                visibility: Some(Visibility::Internal),
                base: &base,
                defaults,
                startup,
                origin: Some(origin),
                history,
                recipe_sha256: sum,
                limits: inner.settings.limits,
            };
            let mut on_progress = |progress: Progress<'_>| log.on_progress("finalize", &progress);
            inner.templates.derive(&derived, reader, &mut on_progress)
        };
        let template = tokio::task::spawn_blocking(work).await;
        self.log.end_progress();
        let template = template
            .map_err(|e| BuildFailure::of(e.to_string()))?
            .map_err(|e| BuildFailure::because(&e))?;
        Ok(template.manifest)
    }

    /// Starts what the template starts, once, and only then lets it be found.
    async fn make_ready(
        &self,
        manifest: &Manifest,
        at: &StageState,
        names: &[String],
    ) -> Result<(), BuildFailure> {
        let reference = manifest.reference();
        let hidden = reference == self.hidden();
        if !manifest.startup.is_empty() {
            self.log.info(Some("finalize"), "starting what it starts");
        }
        let ready = self.inner.sandboxes.make_ready(&reference, at.size).await;
        let publish = || -> Result<(), String> {
            let record = self.inner.records.template(&self.template.id);
            let public = record.ok().flatten().is_some_and(|t| t.public);
            let visibility = match public {
                true => Visibility::Public,
                false => Visibility::Private,
            };
            for name in names {
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
        if let (true, Ok(()), Some(name)) = (hidden, &published, names.first()) {
            (self.inner.sandboxes).hand_over_template(&reference, name);
        }
        if hidden && let Err(e) = self.inner.templates.remove(&reference) {
            tracing::warn!("template {reference} stays: {e}");
        }
        published.map_err(BuildFailure::of)
    }
}
