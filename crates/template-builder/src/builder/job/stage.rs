//! Stages of a build (the parts of a Dockerfile that begin with `FROM`): their base, their state,
//! and the stages on which they depend. A *trigger* is an instruction in an `ONBUILD` of a
//! template. Builds that are based on the template execute it.
//!
//! A *permit* counts towards a limit until it is dropped. A *stock template* is a template whose
//! recipe Jiffy contains. A *recipe* is a directory with the packages, files and settings of a
//! template.

use super::super::failure::BuildFailure;
use super::super::stage_config::StageConfig;
use super::super::step_key;
use super::copy_step::sources_of;
use super::{BuildJob, abbreviate, is_generated};
use jiffy_build_spec::dockerfile::parse_triggers;
use jiffy_build_spec::spec::{BuildSpec, BuildStage, BuildStep, ImageSource, StageBase};
use jiffy_engine_api::SandboxSize;
use jiffy_image::{Defaults, HistoryStep, Progress, SignaturePolicy, TemplateManifest};
use jiffy_registry_pull::Cancel;
use jiffy_sandbox_manager::SandboxSource;
use std::sync::Arc;
use std::time::Duration;

/// State of a stage after its latest step.
pub(super) struct StageState {
    /// Key of the latest step, which identifies the state ([`step_key`]).
    pub(super) key: String,
    /// Environment, user and other settings for the next step.
    pub(super) config: StageConfig,
    /// Template on which the stage is based.
    pub(super) base: Arc<TemplateManifest>,
    /// Template or snapshot from which sandboxes of the stage are created.
    pub(super) source: SandboxSource,
    /// Id of the stage's sandbox. `None` if no sandbox is running.
    pub(super) sandbox: Option<String>,
    pub(super) size: SandboxSize,
    /// Steps for the history of the template.
    pub(super) history: Vec<HistoryStep>,
    /// Keys of the steps that have snapshots.
    pub(super) steps: Vec<String>,
}

impl StageState {
    /// Adds a step to the history, unless the step was generated.
    pub(super) fn push_history(&mut self, step: &BuildStep, took: Option<Duration>) {
        if is_generated(step) {
            return;
        }
        self.history.push(HistoryStep {
            text: step.text.clone(),
            seconds: took.unwrap_or_default().as_secs_f64(),
            bytes: None,
        });
    }
}

/// Number of the current step and number of all steps, as shown in the log. Generated steps do not
/// count.
pub(super) struct StepCounter {
    pub(super) done: usize,
    pub(super) total: usize,
}

impl BuildJob {
    /// Runs all steps of a stage. `before` contains the earlier stages.
    pub(super) async fn run_stage(
        &self,
        stage: &BuildStage,
        before: &mut [Option<StageState>],
        counter: &mut StepCounter,
    ) -> Result<StageState, BuildFailure> {
        let mut at = self
            .begin_stage(stage, before)
            .await
            .map_err(|e| e.at_step("base"))?;
        // The last stage becomes the template.
        if before.len() + 1 == self.spec.stages.len() {
            self.check_startup(&at, stage)
                .map_err(|e| e.at_step("base"))?;
        }
        // The first step that is not restored from the cache sets this flag.
        let mut fresh = self.spec.force;
        let triggers = self.triggers(stage, &at).map_err(|e| e.at_step("base"))?;
        counter.total += triggers.len();
        for step in triggers.iter().chain(&stage.steps) {
            if !is_generated(step) {
                // Count the step before it runs, because the log numbers steps from 1.
                counter.done += 1;
            }
            let (done, total) = (counter.done, counter.total);
            let shown = format!("[{done}/{total}] {}", abbreviate(&step.text));
            let name = done.to_string();
            let taken = self
                .run_step(step, &mut at, before, &mut fresh, &shown, &name)
                .await;
            // The message shows the line and the text of the step, if the author wrote the step.
            taken.map_err(|e| BuildFailure {
                message: match step.line {
                    Some(line) => format!("line {line}, {}: {}", abbreviate(&step.text), e.message),
                    None if is_generated(step) => e.message,
                    None => format!("{}: {}", abbreviate(&step.text), e.message),
                },
                step: Some(name),
            })?;
        }
        Ok(at)
    }

    /// Returns the steps of the base's `ONBUILD` instructions.
    fn triggers(
        &self,
        stage: &BuildStage,
        at: &StageState,
    ) -> Result<Vec<BuildStep>, BuildFailure> {
        // If the base is an earlier stage, the parser of the Dockerfile has already inserted the
        // triggers of that stage. Triggers of its base template were executed in that stage.
        if let StageBase::Stage(_) = stage.from {
            return Ok(Vec::new());
        }
        let triggers = at.base.origin.as_ref().map(|origin| &origin.on_build[..]);
        parse_triggers(triggers.unwrap_or_default()).map_err(BuildFailure::new)
    }

    /// Returns the state of the stage before its first step.
    pub(super) async fn begin_stage(
        &self,
        stage: &BuildStage,
        before: &[Option<StageState>],
    ) -> Result<StageState, BuildFailure> {
        if let StageBase::Stage(n) = &stage.from {
            let from = before.get(*n).and_then(Option::as_ref);
            let from =
                from.ok_or_else(|| BuildFailure::new("a stage cannot be based on a later stage"))?;
            // The stage has no sandbox yet. `BuildJob::agent` (`job.rs`) creates a sandbox from
            // the source of stage `n` for the first step that is executed.
            return Ok(StageState {
                key: from.key.clone(),
                config: from.config.inherited(),
                base: from.base.clone(),
                source: from.source.clone(),
                sandbox: None,
                size: from.size,
                history: from.history.clone(),
                steps: from.steps.clone(),
            });
        }
        let base = self.base_template(&stage.from).await?;
        let size = self.sandbox_size(&base.defaults)?;
        let name = base.reference();
        // Identifies the content from which sandboxes of the base start.
        let fingerprint = self
            .inner
            .sandboxes
            .templates()
            .fingerprint(&name, size)
            .await;
        let fingerprint = fingerprint.map_err(|e| BuildFailure::new(e.to_string()))?;
        let origin = base.origin.clone().unwrap_or_default();
        let mut config = StageConfig::from_defaults(&base.defaults);
        // The command of the image is not part of a template's defaults.
        (config.entrypoint, config.cmd) = (origin.entrypoint, origin.cmd);
        config.exposed = origin.exposed_ports;
        Ok(StageState {
            key: step_key::base_key(self.template.owner.as_deref(), &fingerprint),
            config,
            source: SandboxSource::Template(name),
            sandbox: None,
            size,
            history: Vec::new(),
            steps: Vec::new(),
            base: Arc::new(base),
        })
    }

    /// Returns the template of a stage's base. Images are imported.
    async fn base_template(&self, from: &StageBase) -> Result<TemplateManifest, BuildFailure> {
        let image = match from {
            StageBase::Template(name) => return self.local_template(name).await,
            // `FROM name` may denote a template or an image.
            StageBase::Name(name) => {
                if self.inner.is_template(name, self.template.owner.as_deref()) {
                    return self.local_template(name).await;
                }
                &ImageSource {
                    reference: name.clone(),
                    credentials: None,
                    cloud: None,
                    plain_http: false,
                }
            }
            StageBase::Image(image) => image,
            StageBase::Scratch => {
                return Err(BuildFailure::new(
                    "a template based on `scratch` has no programs: use an image or a template as the base",
                ));
            }
            StageBase::Stage(_) => return Err(BuildFailure::new("a stage is not a template")),
        };
        self.log
            .info(Some("base"), &format!("image {}", image.reference));
        let (inner, log, image) = (self.inner.clone(), self.log.clone(), image.clone());
        let (owner, caller) = (self.template.owner.clone(), self.build.caller.clone());
        // Limits concurrent pulls, in total and per key.
        let pull_permit = self.inner.pulls.acquire(caller.as_deref()).await;
        let disk = self.inner.image_budget(owner.as_deref()).await;
        let disk = disk.map_err(|e| BuildFailure::from_error(&e))?;
        let cancel = Cancel::new().map_err(|e| BuildFailure::from_error(&e))?;
        let signatures = signature_policy(&self.spec).map_err(BuildFailure::new)?;
        // Dropping the guard cancels the pull when the build is cancelled.
        let _guard = cancel.guard();
        let work = move || {
            let mut on_progress = |progress: Progress<'_>| log.on_progress("base", &progress);
            let (owner, caller) = (owner.as_deref(), caller.as_deref());
            let options = (&cancel, disk, &signatures);
            let imported = inner.import(&image, owner, caller, options, &mut on_progress);
            // The permit is released on the thread: a cancelled build does not end the pull at
            // once.
            drop(pull_permit);
            // The detail states why a registry did not answer. The message of the build omits the
            // detail, because it would give the owner of an API key information about the network
            // of the host. It is logged for the operator instead. Other errors have no detail:
            // their messages are complete.
            if let Err(Some(detail)) = imported.as_ref().map_err(|e| e.detail()) {
                tracing::info!(
                    image = image.reference,
                    detail,
                    "cannot import an image for a key"
                );
            }
            imported
        };
        let imported = tokio::task::spawn_blocking(work).await;
        self.log.end_progress();
        imported
            .map_err(|e| BuildFailure::new(e.to_string()))?
            .map_err(|e| BuildFailure::from_error(&e))
    }

    /// Returns a template of the image store. A stock template is built if necessary.
    async fn local_template(&self, name: &str) -> Result<TemplateManifest, BuildFailure> {
        let owner = self.template.owner.as_deref();
        let found = self.inner.resolve_for(name, owner);
        let name = found.map_err(|e| BuildFailure::new(e.to_string()))?;
        // Only the side effect of this call is needed: it opens the template, and a stock template
        // that is missing or outdated is built first. The fingerprint itself is computed later,
        // with the size of the stage's sandboxes.
        let _fingerprint = self
            .inner
            .sandboxes
            .templates()
            .fingerprint(&name, SandboxSize::default())
            .await
            .map_err(|e| BuildFailure::new(e.to_string()))?;
        let manifest = self.inner.templates.manifest(&name);
        manifest.map_err(|e| BuildFailure::new(e.to_string()))
    }

    /// Returns the size of the build's sandboxes, which is also the size of the template's
    /// sandboxes.
    fn sandbox_size(&self, base: &Defaults) -> Result<SandboxSize, BuildFailure> {
        let default_size = base.size();
        let requested = self.build.size;
        let size = SandboxSize {
            vcpus: requested.vcpus.unwrap_or(default_size.vcpus),
            memory_mib: requested.memory_mib.unwrap_or(default_size.memory_mib),
            // A request below the size of the base's disk has no effect.
            disk_mib: default_size.disk_mib.max(requested.disk_mib.unwrap_or(0)),
        };
        size.check().map_err(|e| BuildFailure::new(e.to_string()))?;
        Ok(size)
    }
}

/// Returns the signatures that each image must have. The error is a message for the author of the
/// build.
pub fn signature_policy(spec: &BuildSpec) -> Result<SignaturePolicy, String> {
    let trust_root = spec.verify_trust_root.as_deref();
    SignaturePolicy::new(&spec.verify_keys, &spec.verify_identities, trust_root)
}

/// Marks the stages on which the last stage depends.
pub(super) fn needed_stages(spec: &BuildSpec) -> Result<Vec<bool>, BuildFailure> {
    let mut needed = vec![false; spec.stages.len()];
    if let Some(last) = needed.last_mut() {
        *last = true;
    }
    // Backwards: a stage depends on earlier stages only, so that one pass suffices.
    for number in (0..spec.stages.len()).rev() {
        if !needed[number] {
            continue;
        }
        let stage = &spec.stages[number];
        let copied = stage.steps.iter().flat_map(sources_of);
        let base = match stage.from {
            StageBase::Stage(n) => Some(n),
            _ => None,
        };
        for n in copied.chain(base) {
            if n >= number {
                return Err(BuildFailure::new(format!(
                    "stage {number} cannot depend on stage {n}: it must be an earlier stage"
                )));
            }
            needed[n] = true;
        }
    }
    Ok(needed)
}
