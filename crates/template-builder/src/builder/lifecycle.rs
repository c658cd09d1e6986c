//! Start, end and cancellation of builds. Each build runs in a task of its own.
//!
//! A *permit* counts towards a limit until it is dropped.

use super::failure::BuildFailure;
use super::job::{BuildJob, BuildOutcome, signature_policy};
use super::log::{BuildLog, BuildProgress};
use super::records::{BuildEnd, BuildRecord, BuildStatus, FailureReason, LogLevel, TemplateRecord};
use super::secrets::BuildSecrets;
use super::ssh_clients::SshClients;
use super::{Builder, BuilderError, RunningBuild, printable};
use jiffy_api_types::EventType;
use jiffy_build_spec::spec::{BuildSpec, StageBase};
use jiffy_event_log::Event;
use std::sync::Arc;
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

/// Maximum number of steps of one build.
const MAX_STEPS: usize = 1000;
/// Images of E2B, and the templates of this host that are used instead.
const E2B_IMAGES: [(&str, &str); 4] = [
    ("e2bdev/base", "base"),
    ("e2bdev/base:latest", "base"),
    ("e2bdev/code-interpreter", "code-interpreter-v1"),
    ("e2bdev/code-interpreter:latest", "code-interpreter-v1"),
];

/// Use of a template's lock by one build. Dropping this value removes the lock from
/// `template_locks` if no other build uses it.
struct TemplateLockEntry<'a> {
    builder: &'a Builder,
    template: &'a str,
}

impl Drop for TemplateLockEntry<'_> {
    fn drop(&mut self) {
        let mut locks = self.builder.0.template_locks.lock();
        // Other builds clone the lock while they hold the lock of the map.
        if locks
            .get(self.template)
            .is_some_and(|lock| Arc::strong_count(lock) == 1)
        {
            locks.remove(self.template);
        }
    }
}

impl Builder {
    /// Starts a build in the background. The secrets and the SSH agents are dropped at its end.
    pub fn start(
        &self,
        template: &TemplateRecord,
        build: &BuildRecord,
        spec: BuildSpec,
        secrets: BuildSecrets,
        ssh: SshClients,
    ) -> Result<(), BuilderError> {
        check_spec(&spec)?;
        if build.status != BuildStatus::Waiting {
            return Err(BuilderError::Started(build.id.clone()));
        }
        // `token` cancels the build; `ended` reports its end to waiting requests.
        let token = CancellationToken::new();
        let ended = CancellationToken::new();
        let log = Arc::new(BuildLog::new(self.0.records.clone(), &build.id));
        let ssh = Arc::new(ssh);
        {
            // The check and the insertion are under one lock, so that two calls cannot start the
            // same build.
            let mut running = self.0.running.lock();
            if running.contains_key(&build.id) {
                return Err(BuilderError::Started(build.id.clone()));
            }
            let this = RunningBuild {
                cancel: token.clone(),
                ended: ended.clone(),
                log: log.clone(),
                ssh: ssh.clone(),
            };
            running.insert(build.id.clone(), this);
        }
        let spec = self.with_local_images(spec);
        let job = BuildJob::new(
            self.0.clone(),
            template.clone(),
            build.clone(),
            spec,
            (secrets, ssh),
            log.clone(),
        );
        self.report(EventType::BuildStarted, template, build, None);
        let (this, template, build) = (self.clone(), template.clone(), build.clone());
        let id = build.id.clone();
        tokio::spawn(async move {
            // A cancellation drops the future of the build at its next await.
            let result = tokio::select! {
                result = this.run_when_permitted(&template, &id, &job, &log) => result,
                () = token.cancelled() => Err(BuildFailure::new("the build was cancelled")),
            };
            // The sandboxes are removed first, so that a build whose end is visible has none.
            job.remove_sandboxes().await;
            let failure = result.as_ref().err().map(|failure| failure.message.clone());
            this.record_end(&template, &id, result, &log).await;
            this.report(
                EventType::BuildFinished,
                &template,
                &build,
                failure.as_deref(),
            );
            ended.cancel();
            job.remove_unfinished().await;
            // Remove the entry last: until then, no other request may treat the build as waiting.
            this.0.running.lock().remove(&id);
        });
        Ok(())
    }

    /// Records an event of a build. `failure` is the reason why it failed.
    fn report(
        &self,
        kind: EventType,
        template: &TemplateRecord,
        build: &BuildRecord,
        failure: Option<&str>,
    ) {
        let caller = build.caller.clone();
        let event = Event {
            owner: template.owner.clone(),
            caller: Some(caller.unwrap_or_else(|| Event::HOST_OWNER.to_owned())),
            template: Some(template.id.clone()),
            build: Some(build.id.clone()),
            ..Event::new(kind)
        };
        self.0.sandboxes.events().append(match failure {
            Some(failure) => event.because(failure),
            None => event,
        });
    }

    /// Waits for earlier builds of the same template and for a permit, and runs the build.
    async fn run_when_permitted(
        &self,
        template: &TemplateRecord,
        id: &str,
        job: &BuildJob,
        log: &BuildLog,
    ) -> Result<BuildOutcome, BuildFailure> {
        // The entry is declared first, so that it is dropped last, when this build no longer uses
        // the lock.
        let _entry = TemplateLockEntry {
            builder: self,
            template: &template.id,
        };
        let lock = self
            .0
            .template_locks
            .lock()
            .entry(template.id.clone())
            .or_default()
            .clone();
        // Take the lock before the permit: a build that waits for its template occupies no permit.
        let _guard = match lock.clone().try_lock_owned() {
            Ok(guard) => guard,
            Err(_) => {
                log.info(None, "waiting for another build of the same template");
                lock.lock_owned().await
            }
        };
        let on_wait = || log.info(None, "waiting for builds of other templates");
        let permit = self.0.queue.acquire(template.owner.as_deref(), on_wait);
        let _permit = permit
            .await
            .ok_or_else(|| BuildFailure::new("the daemon is shutting down"))?;
        let updated = self
            .0
            .records
            .transition(id, BuildStatus::Waiting, BuildStatus::Building);
        if !updated.map_err(|e| BuildFailure::new(e.to_string()))? {
            // The end of the build is already recorded, so the build must not publish a template.
            let why = "the build was cancelled or expired before its start";
            return Err(BuildFailure::new(why));
        }
        job.run().await
    }

    /// Records the end of a build.
    async fn record_end(
        &self,
        template: &TemplateRecord,
        id: &str,
        result: Result<BuildOutcome, BuildFailure>,
        log: &BuildLog,
    ) {
        let ready = result.is_ok();
        let end = match result {
            Ok(outcome) => {
                log.info(None, "the template is ready");
                BuildEnd::Ready(outcome.steps, outcome.version)
            }
            Err(failure) => {
                let step = failure.step.clone();
                log.write(LogLevel::Error, step.as_deref(), &failure.message);
                BuildEnd::Failed(failure.into())
            }
        };
        self.0.records.end_build(&template.id, id, end).await;
        // Steps of earlier builds are no longer needed once the new build is recorded.
        if ready {
            self.release_superseded_steps(&template.id);
        }
    }

    /// Returns the progress of a running build's current operation, if any.
    pub fn progress(&self, build: &str) -> Option<BuildProgress> {
        self.0.running.lock().get(build)?.log.progress()
    }

    /// Waits until a build and its sandboxes have terminated.
    pub async fn ended(&self, build: &str) {
        let ended = self.0.running.lock().get(build).map(|b| b.ended.clone());
        if let Some(ended) = ended {
            ended.cancelled().await;
        }
    }

    /// Waits for a connection of a step to the SSH agent `name` of the build's client.
    ///
    /// # Errors
    /// The build is not running or ends, or the client does not offer the agent.
    pub async fn ssh_connection(
        &self,
        build: &str,
        name: &str,
    ) -> Result<UnixStream, BuilderError> {
        let ended = || BuilderError::NotRunning(build.to_owned());
        let (ssh, end) = {
            let running = self.0.running.lock();
            let running = running.get(build).ok_or_else(ended)?;
            (running.ssh.clone(), running.ended.clone())
        };
        let unknown = || BuilderError::SshAgent(printable(name));
        let connection = ssh.wait(name).ok_or_else(unknown)?;
        tokio::select! {
            connection = connection => connection.map_err(|_| ended()),
            () = end.cancelled() => Err(ended()),
        }
    }

    /// Cancels a build. A finished build is unchanged.
    pub fn cancel(&self, build: &BuildRecord) -> Result<(), BuilderError> {
        if let Some(running) = self.0.running.lock().get(&build.id) {
            running.cancel.cancel();
            return Ok(());
        }
        // The build was not started: no task exists that would record the end.
        Ok(self.0.records.set_failed(
            &build.id,
            &FailureReason {
                message: "the build was cancelled before its start".to_owned(),
                step: None,
            },
        )?)
    }

    /// Replaces images of E2B by the equivalent templates of this host.
    fn with_local_images(&self, mut spec: BuildSpec) -> BuildSpec {
        for stage in &mut spec.stages {
            let named = match &stage.from {
                StageBase::Name(name) => name.as_str(),
                StageBase::Image(image) => image.reference.as_str(),
                _ => continue,
            };
            let replacement = E2B_IMAGES.iter().find(|(image, _)| *image == named);
            if let Some((_, template)) = replacement {
                stage.from = StageBase::Template((*template).to_owned());
            }
        }
        spec
    }
}

/// Checks a build description before the build starts.
fn check_spec(spec: &BuildSpec) -> Result<(), BuilderError> {
    let steps: usize = spec.stages.iter().map(|s| s.steps.len()).sum();
    let reject = |why: String| Err(BuilderError::Spec(why));
    if spec.stages.is_empty() {
        return reject("the build has no stages".to_owned());
    }
    // The limit bounds the number of snapshots, and of the sandboxes that are created for them.
    if steps > MAX_STEPS || spec.stages.len() > MAX_STEPS {
        return reject(format!(
            "too many steps: the build has {steps}, at most {MAX_STEPS} are allowed"
        ));
    }
    if let Some(ready) = &spec.startup.ready
        && let Err(why) = ready.probe()
    {
        return reject(why);
    }
    if let Err(why) = signature_policy(spec) {
        return reject(why);
    }
    Ok(())
}
