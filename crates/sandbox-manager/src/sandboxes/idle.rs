//! Idle timeouts: pauses a running sandbox that was not used for its idle timeout.
//!
//! A use is a request, a stream, a command of a client, or processor time of the guest. Checks are
//! scheduled (`idle_checks.rs`), and the decision has no I/O (`idle_verdict.rs`).
//!
//! A daemon *adopts* the guests that continued to run while no daemon ran.

use super::entry::SandboxEntry;
use super::events::IDLE;
use super::idle_verdict::{IdleVerdict, UseFigures, idle_verdict, is_busy};
use super::use_clock::clock_ms;
use super::{Sandboxes, SandboxesInner};
use jiffy_agent_client::AgentClient;
use jiffy_api_types::SandboxState;
use jiffy_engine_api::{Guest, now_ms};
use jiffy_proto::agent::ENVD_PORT;
use std::sync::Arc;
use std::time::Duration;

/// Time limit for the answer of the agent.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Minimum delay in milliseconds after which a failed pause is retried.
const RETRY_DELAY_MS: u64 = 30_000;

impl Sandboxes {
    /// Starts the idle timeout of a sandbox whose guest was started or adopted.
    pub(super) fn start_idle_timeout(&self, entry: &SandboxEntry) {
        if let Some(timeout_ms) = entry.idle_timeout_ms() {
            entry.uses().record();
            let at_ms = clock_ms().saturating_add(timeout_ms);
            self.0.schedule_idle_check(entry, at_ms);
        }
    }

    /// Checks the sandboxes whose check is due.
    pub(super) fn check_idle_due(&self) {
        for id in self.0.indexes.idle_checks.take_due(clock_ms()) {
            let entry = self.0.entries.lock().get(&id).cloned();
            let Some(entry) = entry else { continue };
            // A check that finds a recent use needs no task.
            match verdict(&entry) {
                None => {}
                Some(IdleVerdict::InUse { until_ms }) => {
                    self.0.schedule_idle_check(&entry, until_ms);
                }
                Some(IdleVerdict::Idle) => {
                    let this = self.clone();
                    tokio::spawn(async move {
                        if let Some(next_ms) = this.pause_if_idle(&entry).await {
                            this.0.schedule_idle_check(&entry, next_ms);
                        }
                    });
                }
            }
        }
    }

    /// Pauses a sandbox unless it is in use. Returns the time of the next check, or `None` if the
    /// sandbox needs no check: it does not run, or a resume has scheduled one.
    async fn pause_if_idle(&self, entry: &Arc<SandboxEntry>) -> Option<u64> {
        let guest = entry.guest()?;
        record_processor_use(entry, &*guest);
        if let IdleVerdict::InUse { until_ms } = verdict(entry)? {
            return Some(until_ms);
        }
        // This request runs code in the guest, so it is the last check before a pause.
        record_commands(entry, guest).await;
        let _op_guard = entry.op_lock().lock().await;
        // A request may have used, paused or killed the sandbox meanwhile.
        let record = entry.record();
        if record.state != SandboxState::Running {
            return None;
        }
        if let IdleVerdict::InUse { until_ms } = verdict(entry)? {
            return Some(until_ms);
        }
        // The call fails during a shutdown: the next daemon starts the idle timeout again.
        let _operation = self.0.operations.begin().ok()?;
        let content = record.settings.pause_content;
        match self.pause_locked_for(entry, content, Some(IDLE)).await {
            Ok(paused) => {
                tracing::info!(sandbox = paused.id, "paused an idle sandbox");
                None
            }
            Err(error) => {
                tracing::error!(sandbox = record.id, %error, "cannot pause an idle sandbox");
                let delay = entry.idle_timeout_ms()?.max(RETRY_DELAY_MS);
                Some(clock_ms().saturating_add(delay))
            }
        }
    }
}

impl SandboxesInner {
    /// Schedules the next check of a sandbox, and wakes the task that waits for it.
    fn schedule_idle_check(&self, entry: &SandboxEntry, at_ms: u64) {
        self.indexes.idle_checks.schedule(entry.shared_id(), at_ms);
        self.deadlines.notify();
    }
}

/// Decides whether a sandbox is idle, by the uses that were recorded. `None` without an idle
/// timeout.
fn verdict(entry: &SandboxEntry) -> Option<IdleVerdict> {
    let timeout_ms = entry.idle_timeout_ms()?;
    let uses = entry.uses();
    // The flag is read before the time of the last use, which is later if a use ends in between.
    let is_in_use = uses.is_in_progress();
    let figures = UseFigures {
        now_ms: clock_ms(),
        last_use_ms: uses.last_ms(),
        is_in_use,
    };
    Some(idle_verdict(timeout_ms, figures))
}

/// Records a use if the guest has used its processors since the last sample or check.
fn record_processor_use(entry: &SandboxEntry, guest: &dyn Guest) {
    let size = entry.size();
    let Some(usage) = guest.usage() else { return };
    let sample = entry.history().check(now_ms(), size, usage);
    if is_busy(&sample) {
        entry.uses().record();
    }
}

/// Records a use if a command of a client runs in the guest, or when the last one ended. The guest
/// determines the answer, by which it can only delay its own pause.
async fn record_commands(entry: &SandboxEntry, guest: Arc<dyn Guest>) {
    let agent = AgentClient::new(move || {
        let guest = guest.clone();
        async move { guest.connect(ENVD_PORT).await }
    });
    let record = entry.record();
    let agent = match record.agent_token {
        Some(token) => agent.with_token(token),
        None => agent,
    };
    let asked_ms = clock_ms();
    match tokio::time::timeout(ANSWER_LIMIT, agent.commands()).await {
        Ok(Ok(commands)) if commands.running > 0 => entry.uses().record(),
        Ok(Ok(commands)) => {
            if let Some(ago_ms) = commands.ended_ms_ago {
                entry.uses().record_at(asked_ms.saturating_sub(ago_ms));
            }
        }
        // A guest that does not answer serves no client.
        Ok(Err(error)) => {
            tracing::debug!(sandbox = record.id, %error, "cannot list the commands of a sandbox");
        }
        Err(_) => {
            tracing::debug!(
                sandbox = record.id,
                "timed out listing the commands of a sandbox"
            );
        }
    }
}
