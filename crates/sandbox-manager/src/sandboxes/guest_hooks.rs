//! Hooks: executables in a directory of the guest. The host runs them through the agent before it
//! stores the guest's state, and after the guest continues.

use super::Sandboxes;
use super::create::GuestOrigin;
use crate::sandbox::Sandbox;
use jiffy_agent_client::{AgentClient, ClientError, EntryKind, ProcessEvent, ProcessSpec};
use jiffy_engine_api::{Guest, steps};
use jiffy_proto::agent::ENVD_PORT;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// Maximum time of all hooks of one moment together.
const LIMIT: Duration = Duration::from_secs(5);
/// Additional time in which the agent kills a hook and reports its end.
const KILL_LIMIT: Duration = Duration::from_secs(1);
/// Maximum number of hooks of one moment.
const MAX_HOOKS: usize = 64;
/// Permission bits that make a file executable.
const EXECUTABLE: u32 = 0o111;

/// Moment at which hooks run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HookMoment {
    /// Before the state of the guest is stored.
    BeforePause,
    /// After the guest continues: after a snapshot, a pause, a rollback, or in a clone.
    AfterResume,
}

impl HookMoment {
    fn name(self) -> &'static str {
        match self {
            Self::BeforePause => "before-pause",
            Self::AfterResume => "after-resume",
        }
    }

    fn directory(self) -> &'static str {
        match self {
            Self::BeforePause => "/etc/jiffy/before-pause.d",
            Self::AfterResume => "/etc/jiffy/after-resume.d",
        }
    }

    /// Returns the steps that are recorded for the hooks, and for a failure of one of them.
    fn steps(self) -> [&'static str; 2] {
        match self {
            Self::BeforePause => ["before_pause_hooks", "before_pause_hook_failed"],
            Self::AfterResume => ["after_resume_hooks", "after_resume_hook_failed"],
        }
    }
}

impl Sandboxes {
    /// Runs the hooks of `moment` as root, in the order of their names. Returns whether the guest
    /// has any. A failure is logged, counted, and recorded as a step of the operation, which
    /// continues. The caller must hold the sandbox's `op_lock`.
    pub(super) async fn run_hooks(
        &self,
        sandbox: &Sandbox,
        guest: &Arc<dyn Guest>,
        moment: HookMoment,
    ) -> bool {
        // Without this check, every snapshot would wake the guest.
        if !guest.may_have_hooks() {
            return false;
        }
        // The future is boxed, because it is large.
        Box::pin(self.run_found_hooks(sandbox, guest, moment)).await
    }

    /// Lists the hooks in the guest and runs them, all within `LIMIT`. Returns whether a hook was
    /// run.
    async fn run_found_hooks(
        &self,
        sandbox: &Sandbox,
        guest: &Arc<dyn Guest>,
        moment: HookMoment,
    ) -> bool {
        let [name, failed] = moment.steps();
        let began = Instant::now();
        let agent = agent_of(sandbox, guest);
        let hooks = match timeout(LIMIT, hooks_of(&agent, moment)).await {
            Ok(Ok(hooks)) => hooks,
            // The guest has no such directory.
            Ok(Err(e)) if e.is_not_found() => return false,
            Ok(Err(e)) => {
                self.report_failed_hook(sandbox, moment, moment.directory(), &e.to_string());
                return false;
            }
            Err(_) => {
                let problem = "the agent does not respond";
                self.report_failed_hook(sandbox, moment, moment.directory(), problem);
                return false;
            }
        };
        if hooks.is_empty() {
            return false;
        }
        let mut step = steps::begin(name);
        let mut is_failed = false;
        for hook in hooks {
            let remaining = LIMIT.saturating_sub(began.elapsed());
            match run_hook(&agent, &hook, moment, remaining).await {
                Ok(()) => self.0.metrics.hook(moment.name(), "ok"),
                Err(problem) => {
                    is_failed = true;
                    self.report_failed_hook(sandbox, moment, &hook, &problem);
                }
            }
        }
        if is_failed {
            step.next(failed);
        }
        true
    }

    /// Runs the hooks of a guest that continues.
    pub(super) async fn run_resume_hooks(&self, sandbox: &Sandbox, guest: &Arc<dyn Guest>) {
        let moment = HookMoment::AfterResume;
        self.run_hooks(sandbox, guest, moment).await;
    }

    /// Returns whether a guest continues the state of a sandbox, and not of a template.
    pub(super) fn continues_sandbox(&self, origin: &GuestOrigin) -> bool {
        use jiffy_api_types::SnapshotPurpose::{Fork, Pause, Requested};
        let snapshot = origin.snapshot.as_deref();
        let snapshot = snapshot.and_then(|id| self.0.catalog.get(id));
        origin.restore_reason.is_some()
            || snapshot.is_some_and(|s| matches!(s.purpose, Fork | Pause | Requested))
    }

    fn report_failed_hook(&self, sandbox: &Sandbox, moment: HookMoment, hook: &str, problem: &str) {
        self.0.metrics.hook(moment.name(), "failed");
        let (id, moment) = (&sandbox.id, moment.name());
        tracing::warn!(
            sandbox = id,
            moment,
            hook,
            problem,
            "a hook of a sandbox failed"
        );
    }
}

/// Returns a client of the agent of `guest`.
fn agent_of(sandbox: &Sandbox, guest: &Arc<dyn Guest>) -> AgentClient {
    let connector = guest.clone();
    let agent = AgentClient::new(move || {
        let guest = connector.clone();
        async move { guest.connect(ENVD_PORT).await }
    });
    match &sandbox.agent_token {
        Some(token) => agent.with_token(token.clone()),
        None => agent,
    }
}

/// Returns the paths of the executables of `moment`, sorted by name.
async fn hooks_of(agent: &AgentClient, moment: HookMoment) -> Result<Vec<String>, ClientError> {
    let entries = agent.list_dir(moment.directory(), Some("root"), 1).await?;
    let mut hooks: Vec<String> = entries
        .into_iter()
        .filter(|entry| entry.kind == EntryKind::File && entry.mode & EXECUTABLE != 0)
        // The agent cannot start a program whose path is not UTF-8.
        .filter(|entry| entry.path_bytes.is_none())
        .map(|entry| entry.path)
        .collect();
    hooks.sort_unstable();
    hooks.truncate(MAX_HOOKS);
    Ok(hooks)
}

/// Runs a hook for at most `remaining`. Its output is discarded.
async fn run_hook(
    agent: &AgentClient,
    hook: &str,
    moment: HookMoment,
    remaining: Duration,
) -> Result<(), String> {
    if remaining.is_zero() {
        return Err("not started: earlier hooks used the time".to_owned());
    }
    let mut spec = ProcessSpec::new(hook, Vec::<String>::new());
    spec.user = Some("root".to_owned());
    spec.cwd = Some("/".to_owned());
    // The agent kills the hook after this time.
    spec.timeout = Some(remaining);
    spec.envs
        .insert("JIFFY_HOOK".to_owned(), moment.name().to_owned());
    let run = async {
        let mut process = agent.start(&spec).await?;
        while let Some(event) = process.next_event().await? {
            if let ProcessEvent::End(status) = event {
                return Ok(status);
            }
        }
        Err(ClientError::Protocol("no exit was reported".to_owned()))
    };
    let ended: Result<_, ClientError> = timeout(remaining + KILL_LIMIT, run)
        .await
        .map_err(|_| "the agent does not respond".to_owned())?;
    match ended {
        Ok(status) if status.exit_code == 0 => Ok(()),
        // Both texts are written to the log, and the guest determines them, so they are shortened.
        Ok(status) => Err(status.status.chars().take(100).collect()),
        // The agent ends the stream of a process that exceeds its time.
        Err(e) => Err(e.to_string().chars().take(200).collect()),
    }
}
