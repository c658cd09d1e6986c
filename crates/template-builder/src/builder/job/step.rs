//! Execution of steps. A step that changes files runs in the stage's sandbox, and a snapshot of the
//! sandbox is cached as the result of the step.
//!
//! The *key* of a step is a hash of everything that determines its result. A *stage* is a part of a
//! build that starts with a base image (`FROM`) and executes steps.

use super::super::copy::{self, ROOT_USER};
use super::super::failure::BuildFailure;
use super::super::log::LineSplitter;
use super::super::user::add_user;
use super::super::{step_key, transfer};
use super::copy_step::CopiedFiles;
use super::run_mounts::has_secrets;
use super::stage::StageState;
use super::{BuildJob, is_generated};
use jiffy_agent_client::{AgentClient, ProcessEvent, ProcessSpec};
use jiffy_api_types::SnapshotContent;
use jiffy_build_spec::spec::{BuildStep, StepAction, StepCommand};
use jiffy_proto::process_mounts::ProcessMounts;
use jiffy_sandbox_manager::SandboxSource;
use std::time::Instant;

/// Shell of the commands that E2B's clients send.
const BASH_PATH: &str = "/bin/bash";

impl BuildJob {
    /// Runs a step, or restores the cached result of an identical step. `before` contains the
    /// earlier stages. If `fresh` is true, no cached result is used: the build or a step requested
    /// that, or an earlier step of the stage was executed. For the log, `shown` is the text and
    /// `name` the number of the step.
    pub(super) async fn run_step(
        &self,
        step: &BuildStep,
        at: &mut StageState,
        before: &mut [Option<StageState>],
        fresh: &mut bool,
        shown: &str,
        name: &str,
    ) -> Result<(), BuildFailure> {
        *fresh |= step.force;
        let files = self.copied_files(step, &at.config, before).await?;
        // Update the key before the step is executed: it identifies the state after the step.
        let file_keys: Vec<String> = files.iter().map(CopiedFiles::key).collect();
        at.key = step_key::step_key(&at.key, step, &file_keys);
        let began = Instant::now();
        let changes_files = matches!(
            step.action,
            StepAction::Run { .. }
                | StepAction::Copy(_)
                | StepAction::Workdir(_)
                | StepAction::AddUser(_)
        );
        let log_step = |message: &str| {
            if !is_generated(step) {
                self.log.info(Some(name), message);
            }
        };
        // Only the configuration changes: neither a sandbox nor a snapshot is necessary.
        if !changes_files {
            log_step(shown);
            return at.config.apply(&step.action).map_err(BuildFailure::new);
        }
        // Record the key of a cached result as well: the build uses the result.
        at.steps.push(at.key.clone());
        let cached = if *fresh {
            None
        } else {
            self.inner.sandboxes.build_steps().newest(&at.key)
        };
        if let Some(snapshot) = cached {
            self.inner.touch_step(&at.key);
            log_step(&format!("CACHED {shown}"));
            at.config.apply(&step.action).map_err(BuildFailure::new)?;
            at.source = SandboxSource::Snapshot(snapshot.id().to_owned());
            // The sandbox has the state of an earlier step. The next executed step creates a new
            // sandbox from the snapshot.
            self.release_sandbox(at).await;
            at.push_history(step, None);
            return Ok(());
        }
        // Later steps depend on this new result, so their cached results are invalid.
        *fresh = true;
        log_step(shown);
        // Secrets may remain in the memory of the guest, which neither the snapshot nor a later
        // step may contain.
        let secret = matches!(&step.action, StepAction::Run { mounts, .. } if has_secrets(mounts));
        let without_memory = SnapshotContent::Filesystem;
        let is_storable = (self.inner.sandboxes)
            .check_content(None, without_memory)
            .is_ok();
        let content = if secret && is_storable {
            without_memory
        } else {
            SnapshotContent::Full
        };
        let agent = self.agent(at).await?;
        let done = match &step.action {
            StepAction::Run {
                command,
                user,
                mounts,
            } => {
                let prepared = self
                    .prepare_mounts(&agent, at, mounts, files, before)
                    .await?;
                let process = prepared.process.clone();
                let user = user.as_deref();
                let run = self.run_command(&agent, at, command, user, process, name);
                let done = run.await;
                let finished = self
                    .finish_mounts(&agent, prepared, done.is_ok(), name)
                    .await;
                done.and(finished)
            }
            StepAction::Copy(copy) => self.run_copy(&agent, at, copy, files, before).await,
            StepAction::AddUser(user) => add_user(&agent, user).await,
            // `WORKDIR` creates its directory below, because `config.apply` determines the path.
            _ => Ok(()),
        };
        // A step fails after a disk failure, even if its programs ignored the I/O errors.
        let sandbox = at.sandbox.as_deref().unwrap_or_default();
        match self.inner.sandboxes.observe().disk_failure(sandbox) {
            Some(reason) => return Err(BuildFailure::new(reason)),
            None => done?,
        }
        at.config.apply(&step.action).map_err(BuildFailure::new)?;
        if let StepAction::Workdir(_) = step.action {
            // The stage's user creates the directory if the parent directory permits that;
            // otherwise root does.
            let (path, user) = (&at.config.workdir, &at.config.user);
            if copy::create_directory(&agent, path, user).await.is_err() {
                copy::create_directory(&agent, path, ROOT_USER).await?;
            }
        }
        if secret && !is_storable {
            // Without such snapshots, only the files of the guest reach a new guest.
            self.replace_guest(&agent, at).await?;
        }
        let sandbox = at.sandbox.as_deref().unwrap_or_default();
        let mut patience = self.patience();
        let snapshot = loop {
            let steps = self.inner.sandboxes.build_steps();
            match steps.snapshot(sandbox, &at.key, content).await {
                Err(e) if patience.pause(&e).await => {}
                taken => break taken.map_err(|e| BuildFailure::new(e.to_string()))?,
            }
        };
        self.inner.touch_step(&at.key);
        at.source = SandboxSource::Snapshot(snapshot.id().to_owned());
        if secret && is_storable {
            self.release_sandbox(at).await;
        }
        at.push_history(step, Some(began.elapsed()));
        Ok(())
    }

    /// Replaces the stage's sandbox by a new sandbox of the base with the same files, so that
    /// nothing in the memory of the present sandbox reaches later steps or snapshots. `agent` is
    /// the agent of the present sandbox.
    async fn replace_guest(
        &self,
        agent: &AgentClient,
        at: &mut StageState,
    ) -> Result<(), BuildFailure> {
        let layer = agent.layer().await;
        let layer = layer.map_err(|e| BuildFailure::agent("read the changes of the build", e))?;
        let present = at.sandbox.take();
        let base = at.base.clone();
        let source = base.reference();
        // The changes apply to this version of the base only.
        let is_same = || {
            let now = self.inner.templates.manifest(&source);
            now.is_ok_and(|manifest| manifest.version() == base.version())
        };
        let changed = || {
            BuildFailure::new(format!(
                "the template `{source}` was changed during the build: build again"
            ))
        };
        if !is_same() {
            at.sandbox = present;
            return Err(changed());
        }
        at.source = SandboxSource::Template(source.clone());
        let created = self.agent(at).await?;
        if !is_same() {
            return Err(changed());
        }
        transfer::copy_layer(layer, &created).await?;
        if let Some(id) = present {
            self.sandboxes.remove(&id).await.map_err(|e| {
                BuildFailure::new(format!(
                    "cannot remove the sandbox of a step with secrets: {e}"
                ))
            })?;
        }
        Ok(())
    }

    /// Runs the command of a `RUN` step in the sandbox, and writes its output to the build's log.
    async fn run_command(
        &self,
        agent: &AgentClient,
        at: &StageState,
        command: &StepCommand,
        user: Option<&str>,
        mounts: Option<ProcessMounts>,
        name: &str,
    ) -> Result<(), BuildFailure> {
        let words = match command {
            StepCommand::Line(line) => at.config.shell_words(line),
            StepCommand::Exec(words) => words.clone(),
        };
        let (program, args) = words
            .split_first()
            .ok_or_else(|| BuildFailure::new("the command is empty"))?;
        // E2B's clients always send bash; images without it get `/bin/sh`.
        let is_bash_missing =
            program.as_str() == BASH_PATH && agent.stat(BASH_PATH, Some(ROOT_USER)).await.is_err();
        // Only the default shell is replaced, and not another missing program.
        let program: &str = if is_bash_missing { "/bin/sh" } else { program };
        let limit = self.inner.settings.step_limit;
        let spec = ProcessSpec {
            envs: at.config.environment(),
            cwd: Some(at.config.workdir.clone()),
            user: Some(user.unwrap_or(&at.config.user).to_owned()),
            timeout: Some(limit),
            mounts,
            ..ProcessSpec::new(program, args)
        };
        let began = Instant::now();
        let mut process = agent
            .start(&spec)
            .await
            .map_err(|e| BuildFailure::agent(&format!("run {program}"), e))?;
        let (mut out, mut err) = (LineSplitter::default(), LineSplitter::default());
        let log_lines = |lines: Vec<String>| {
            for line in lines {
                self.log.info(Some(name), &self.secrets.hide(line));
            }
        };
        let end = loop {
            let event = process.next_event().await;
            match event.map_err(|e| BuildFailure::agent("read the output of the command", e))? {
                Some(ProcessEvent::Stdout(bytes)) => log_lines(out.push(&bytes)),
                Some(ProcessEvent::Stderr(bytes)) => log_lines(err.push(&bytes)),
                Some(ProcessEvent::End(end)) => break end,
                Some(_) => {}
                None => {
                    return Err(BuildFailure::new(
                        "the sandbox terminated while the command was running",
                    ));
                }
            }
        };
        // The last lines may have no line break.
        log_lines(out.finish().into_iter().chain(err.finish()).collect());
        if end.exited && end.exit_code == 0 {
            return Ok(());
        }
        Err(BuildFailure::new(match end {
            // The agent terminates the command at the time limit, which the status does not show.
            _ if began.elapsed() >= limit => format!(
                "the command exceeded the time limit of {} s",
                limit.as_secs()
            ),
            end if end.oom_killed => format!(
                "the command ran out of memory ({} MiB): increase the memory of the template with --memory",
                at.size.memory_mib
            ),
            end => format!("the command failed: {}", end.status),
        }))
    }
}
