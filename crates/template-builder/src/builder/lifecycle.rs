//! Start, end and cancellation of builds.

use super::failure::BuildFailure;
use super::job::{BuildJob, BuildOutcome};
use super::log::{BuildLog, BuildProgress};
use super::pending_ends::BuildEnd;
use super::records::{BuildRecord, BuildStatus, FailureReason, LogLevel, TemplateRecord};
use super::{Builder, BuilderError, RunningBuild, lock};
use crate::spec::{BuildSpec, StageBase};
use jiffy_engine::Engine;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// Most steps of one build.
const MAX_STEPS: usize = 1000;
/// Images by these names are the templates of this host that serve in their place.
const E2B_IMAGES: [(&str, &str); 4] = [
    ("e2bdev/base", "base"),
    ("e2bdev/base:latest", "base"),
    ("e2bdev/code-interpreter", "code-interpreter-v1"),
    ("e2bdev/code-interpreter:latest", "code-interpreter-v1"),
];

impl<E: Engine> Builder<E> {
    /// Starts a build that was entered; it goes on behind this call.
    pub fn start(
        &self,
        template: &TemplateRecord,
        build: &BuildRecord,
        spec: BuildSpec,
    ) -> Result<(), BuilderError> {
        check(&spec)?;
        if build.status != BuildStatus::Waiting {
            return Err(BuilderError::Started(build.id.clone()));
        }
        let token = CancellationToken::new();
        let log = Arc::new(BuildLog::new(self.0.records.clone(), &build.id));
        {
            let mut running = lock(&self.0.running);
            if running.contains_key(&build.id) {
                return Err(BuilderError::Started(build.id.clone()));
            }
            let this = RunningBuild {
                cancel: token.clone(),
                log: log.clone(),
            };
            running.insert(build.id.clone(), this);
        }
        let spec = self.with_stand_ins(spec);
        let job = BuildJob::new(
            self.0.clone(),
            template.clone(),
            build.clone(),
            spec,
            log.clone(),
        );
        let (this, template, id) = (self.clone(), template.clone(), build.id.clone());
        tokio::spawn(async move {
            let built = tokio::select! {
                built = this.carry_out(&template, &id, &job, &log) => built,
                () = token.cancelled() => Err(BuildFailure::of("the build was cancelled")),
            };
            job.clear().await;
            this.conclude(&template, &id, built, &log).await;
            job.remove_hidden().await;
            lock(&this.0.running).remove(&id);
        });
        Ok(())
    }

    async fn carry_out(
        &self,
        template: &TemplateRecord,
        id: &str,
        job: &BuildJob<E>,
        log: &BuildLog,
    ) -> Result<BuildOutcome, BuildFailure> {
        let turn = lock(&self.0.turns)
            .entry(template.id.clone())
            .or_default()
            .clone();
        let _turn = match turn.clone().try_lock_owned() {
            Ok(turn) => turn,
            Err(_) => {
                log.info(None, "waiting: the same template is being built already");
                turn.lock_owned().await
            }
        };
        let on_wait = || log.info(None, "waiting: other templates are being built");
        let slot = self.0.queue.enter(template.owner.as_deref(), on_wait);
        let _slot = slot
            .await
            .ok_or_else(|| BuildFailure::of("the daemon ends"))?;
        let moved = self
            .0
            .records
            .move_on(id, BuildStatus::Waiting, BuildStatus::Building);
        moved.map_err(|e| BuildFailure::of(e.to_string()))?;
        job.run().await
    }

    /// Writes down how a build ended.
    async fn conclude(
        &self,
        template: &TemplateRecord,
        id: &str,
        built: Result<BuildOutcome, BuildFailure>,
        log: &BuildLog,
    ) {
        let ready = built.is_ok();
        let end = match built {
            Ok(outcome) => {
                log.info(None, "the template is ready");
                BuildEnd::Ready(outcome.steps, outcome.version)
            }
            Err(failure) => {
                let step = failure.step.clone();
                log.say(LogLevel::Error, step.as_deref(), &failure.message);
                BuildEnd::Failed(failure.into())
            }
        };
        self.0.records.end(&template.id, id, end).await;
        if ready {
            self.release_steps(&template.id);
        }
    }

    /// What a build does just now that takes a while, if it does.
    pub fn progress(&self, build: &str) -> Option<BuildProgress> {
        lock(&self.0.running).get(build)?.log.progress()
    }

    /// Ends a build. One that is over stays as it is.
    pub fn cancel(&self, build: &BuildRecord) -> Result<(), BuilderError> {
        if let Some(running) = lock(&self.0.running).get(&build.id) {
            running.cancel.cancel();
            return Ok(());
        }
        Ok(self.0.records.fail(
            &build.id,
            &FailureReason {
                message: "the build was cancelled before it began".to_owned(),
                step: None,
            },
        )?)
    }

    fn with_stand_ins(&self, mut spec: BuildSpec) -> BuildSpec {
        for stage in &mut spec.stages {
            let named = match &stage.from {
                StageBase::Name(name) => name.as_str(),
                StageBase::Image(image) => image.reference.as_str(),
                _ => continue,
            };
            let stand_in = E2B_IMAGES.iter().find(|(image, _)| *image == named);
            if let Some((_, template)) = stand_in {
                stage.from = StageBase::Template((*template).to_owned());
            }
        }
        spec
    }
}

/// Whether a build can be begun at all.
fn check(spec: &BuildSpec) -> Result<(), BuilderError> {
    let steps: usize = spec.stages.iter().map(|s| s.steps.len()).sum();
    let refuse = |why: String| Err(BuilderError::Spec(why));
    if spec.stages.is_empty() {
        return refuse("there is no stage to build".to_owned());
    }
    if steps > MAX_STEPS || spec.stages.len() > MAX_STEPS {
        return refuse(format!(
            "a build has at most {MAX_STEPS} steps, and this one has {steps}"
        ));
    }
    if let Some(ready) = &spec.startup.ready
        && let Err(why) = ready.probe()
    {
        return refuse(why);
    }
    Ok(())
}
