//! Executes one build in a task: all stages and steps, and the publication of the template.
//!
//! A *stage* is a part of a build that starts with a base image (`FROM`) and executes steps. A
//! *permit* counts towards a limit until it is dropped.
//!
//! A build executes a Dockerfile. Each step runs in a sandbox, and a snapshot of this sandbox is
//! the start of the next step.

mod build_sandboxes;
mod copy_step;
mod patience;
mod publish;
mod remote_files;
mod run_mounts;
mod ssh_sockets;
mod stage;
mod step;

use super::failure::BuildFailure;
use super::log::BuildLog;
use super::records::{BuildRecord, TemplateRecord};
use super::secrets::BuildSecrets;
use super::ssh_clients::SshClients;
use super::{BUILD_METADATA_KEY, BuilderInner};
use build_sandboxes::BuildSandboxes;
use jiffy_agent_client::AgentClient;
use jiffy_build_spec::spec::{BuildSpec, BuildStage, BuildStep};
use jiffy_image::TemplateError;
use jiffy_sandbox_manager::{
    CreateSpec, OnTimeout, Prefetch, QuotaAmount, QuotaRequest, SandboxSettings, SandboxSource,
};
use patience::Patience;
pub(super) use stage::signature_policy;
use stage::{StageState, StepCounter, needed_stages};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of characters of a step that messages show.
const MAX_SHOWN_CHARS: usize = 120;
/// Timeout of a build's sandboxes, in case their removal at the end of the build fails.
const SANDBOX_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// A running build.
pub struct BuildJob {
    inner: Arc<BuilderInner>,
    template: TemplateRecord,
    build: BuildRecord,
    spec: BuildSpec,
    /// Secrets for `RUN --mount=type=secret`.
    secrets: BuildSecrets,
    /// SSH agents for `RUN --mount=type=ssh`.
    ssh: Arc<SshClients>,
    log: Arc<BuildLog>,
    /// Stage whose sandbox clones Git repositories. `None` until the first clone.
    git_stage: tokio::sync::Mutex<Option<StageState>>,
    /// Sandboxes of the build.
    sandboxes: BuildSandboxes,
    /// Held while the image is written. The write continues on its thread if the build is
    /// cancelled.
    writing: Arc<tokio::sync::Mutex<()>>,
}

/// Result of a build.
pub struct BuildOutcome {
    /// Version of the template.
    pub version: String,
    /// Keys of the steps that have snapshots.
    pub steps: Vec<String>,
}

impl BuildJob {
    pub fn new(
        inner: Arc<BuilderInner>,
        template: TemplateRecord,
        build: BuildRecord,
        spec: BuildSpec,
        (secrets, ssh): (BuildSecrets, Arc<SshClients>),
        log: Arc<BuildLog>,
    ) -> Self {
        Self {
            sandboxes: BuildSandboxes::new(&inner.sandboxes),
            inner,
            template,
            build,
            spec,
            secrets,
            ssh,
            log,
            git_stage: tokio::sync::Mutex::default(),
            writing: Arc::default(),
        }
    }

    /// Runs the build. The caller must remove its sandboxes afterwards
    /// ([`Self::remove_sandboxes`]).
    pub async fn run(&self) -> Result<BuildOutcome, BuildFailure> {
        let count = self.spec.stages.len();
        // Stages on which the result does not depend are skipped.
        let needed = needed_stages(&self.spec)?;
        let total = needed.iter().zip(&self.spec.stages);
        let counted = |s: &BuildStage| s.steps.iter().filter(|step| !is_generated(step)).count();
        let total = total.map(|(n, s)| if *n { counted(s) } else { 0 }).sum();
        let mut counter = StepCounter { done: 0, total };
        let mut stages: Vec<Option<StageState>> = Vec::with_capacity(count);
        for (stage, needed) in self.spec.stages.iter().zip(needed) {
            let state = if needed {
                Some(self.run_stage(stage, &mut stages, &mut counter).await?)
            } else {
                None
            };
            stages.push(state);
        }
        // The last stage is always needed.
        let last = stages.pop().flatten();
        let last = last.ok_or_else(|| BuildFailure::new("the build has no stages"))?;
        self.publish(last).await.map_err(|e| e.at_step("finalize"))
    }

    /// Returns the retry policy for a shortage of host resources, bounded by the time limit of a
    /// step.
    fn patience(&self) -> Patience<'_> {
        Patience::new(&self.log, self.inner.settings.step_limit)
    }

    /// Removes the sandboxes of the build, including sandboxes that are being created.
    pub async fn remove_sandboxes(&self) {
        for (id, error) in self.sandboxes.remove_all().await {
            self.warn_unremoved(&id, &error);
        }
    }

    fn warn_unremoved(&self, sandbox: &str, error: &dyn std::fmt::Display) {
        let build = &self.build.id;
        tracing::warn!(sandbox, build, %error, "cannot remove the sandbox of a build");
    }

    /// Removes the unfinished template of a failed or cancelled build. The sandboxes must be
    /// removed first: a write in progress reads from a sandbox, and ends when the sandbox is
    /// removed.
    pub async fn remove_unfinished(&self) {
        let _writing = self.writing.lock().await;
        let (templates, name) = (self.inner.templates.clone(), self.unfinished_name());
        let remove = move || match templates.manifest(&name) {
            // No such template: the build failed before it wrote the image.
            Err(TemplateError::Unknown { .. }) => Ok(()),
            _ => templates.remove(&name),
        };
        match tokio::task::spawn_blocking(remove).await {
            Ok(Ok(())) => {}
            Ok(Err(e)) => {
                tracing::warn!(template = self.unfinished_name(), error = %e, "cannot remove an unfinished template")
            }
            Err(e) => {
                tracing::warn!(template = self.unfinished_name(), error = %e, "cannot remove an unfinished template")
            }
        }
    }

    /// Removes the stage's sandbox, which no longer matches the stage's state.
    async fn release_sandbox(&self, at: &mut StageState) {
        if let Some(id) = at.sandbox.take()
            && let Err(e) = self.sandboxes.remove(&id).await
        {
            self.warn_unremoved(&id, &e);
        }
    }

    /// Returns the agent of the stage's sandbox. Creates the sandbox if necessary.
    async fn agent(&self, at: &mut StageState) -> Result<AgentClient, BuildFailure> {
        let sandboxes = &self.inner.sandboxes;
        if at.sandbox.is_none() {
            let spec = CreateSpec {
                size: match at.source {
                    // A snapshot has the size of the sandbox from which it was taken.
                    SandboxSource::Template(_) => Some(at.size),
                    SandboxSource::Snapshot(_) => None,
                },
                source: at.source.clone(),
                name: None,
                engine: None,
                prefetch: Prefetch::default(),
                env: BTreeMap::new(),
                settings: SandboxSettings {
                    owner: self.build.caller.clone(),
                    metadata: [(BUILD_METADATA_KEY.to_owned(), self.build.id.clone())].into(),
                    timeout_s: Some(SANDBOX_TIMEOUT.as_secs()),
                    on_timeout: OnTimeout::Kill,
                    secure: true,
                    ..SandboxSettings::default()
                },
            };
            let cannot = |e: &dyn std::fmt::Display| {
                BuildFailure::new(format!("cannot create a sandbox for the build: {e}"))
            };
            let request = QuotaRequest {
                amount: QuotaAmount {
                    sandboxes: 1,
                    vcpus: at.size.vcpus.into(),
                    memory_mib: at.size.memory_mib.into(),
                    ..QuotaAmount::default()
                },
                disk_floor: None,
            };
            // The permit is held until the sandbox runs.
            let permit = self.inner.reserve(self.build.caller.as_deref(), request);
            let permit = Arc::new(permit.await.map_err(|e| cannot(&e))?);
            let mut patience = self.patience();
            let created = loop {
                match self.sandboxes.create(spec.clone(), permit.clone()).await {
                    // Builds wait for resources instead of failing: their earlier steps took time.
                    Err(e) if patience.pause(&e).await => {}
                    created => break created.map_err(|e| cannot(&e))?,
                }
            };
            at.sandbox = Some(created.id().to_owned());
        }
        // The code above sets `at.sandbox`, so that the default is never used.
        let id = at.sandbox.as_deref().unwrap_or_default();
        sandboxes
            .agent(id)
            .map_err(|e| BuildFailure::new(e.to_string()))
    }
}

/// Returns whether a step was generated rather than written by the author. Generated steps are
/// neither counted nor logged.
fn is_generated(step: &BuildStep) -> bool {
    step.text.is_empty()
}

/// Returns `name` for the default tag, and `name:tag` for other tags.
pub fn tagged(name: &str, tag: &str) -> String {
    match tag {
        super::DEFAULT_TAG => name.to_owned(),
        tag => format!("{name}:{tag}"),
    }
}

/// Truncates the text of a step for a message, and removes control characters.
fn abbreviate(text: &str) -> String {
    let clean: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(MAX_SHOWN_CHARS)
        .collect();
    match text.chars().nth(MAX_SHOWN_CHARS) {
        Some(_) => format!("{clean}…"),
        None => clean,
    }
}
