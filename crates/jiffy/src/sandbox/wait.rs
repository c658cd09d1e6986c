//! `jiffy wait`: waits until sandboxes reach a state, or until they cannot reach it.

use super::table;
use crate::cli::{AwaitedState, WaitArgs};
use jiffy_api_types::{SandboxInfo, SandboxState};
use jiffy_client::progress::while_waiting;
use jiffy_client::{Client, has_error_code};
use serde::Serialize;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Exit code for an expired timeout, as in timeout(1).
const TIMEOUT_EXIT_CODE: u8 = 124;
/// Maximum duration of a request that waits for a state.
const MAX_WAIT_PER_CALL: Duration = Duration::from_secs(10);

/// Result for a sandbox.
#[derive(Debug, Serialize)]
struct Outcome {
    id: String,
    state: &'static str,
    /// Exit reason, or the state if the sandbox has not terminated.
    reason: String,
    /// True if the sandbox reached the state.
    reached: bool,
}

/// Waits for all sandboxes. Continues after failures.
pub async fn run(args: &WaitArgs) -> anyhow::Result<ExitCode> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let deadline = args.timeout.map(|time| Instant::now() + time);
    let mut all = Vec::new();
    let mut code = 0;
    for id in &args.ids {
        let result = wait(&client, id, args.state, deadline);
        let outcome = match while_waiting("waiting for the sandbox", result).await {
            Ok(outcome) => outcome,
            Err(e) => {
                errln!("jiffy: {e:#}");
                code = 1;
                continue;
            }
        };
        // The last failure determines the exit code.
        if !outcome.reached {
            let ended = matches!(outcome.state, "killed" | "broken");
            code = if ended { 1 } else { TIMEOUT_EXIT_CODE };
        }
        all.push(outcome);
    }
    table::show(args.json, &all, |all| {
        all.iter().map(|o| format!("{}\n", o.reason)).collect()
    })?;
    Ok(ExitCode::from(code))
}

/// Waits for a state of one sandbox, until the deadline or the end of the sandbox.
async fn wait(
    client: &Client,
    id: &str,
    target: AwaitedState,
    deadline: Option<Instant>,
) -> anyhow::Result<Outcome> {
    // The id, because a name may belong to another sandbox later.
    let id = client.sandbox(id).await?.record.id;
    loop {
        let remaining = deadline.map_or(MAX_WAIT_PER_CALL, |deadline| {
            deadline.saturating_duration_since(Instant::now())
        });
        let name = match target {
            AwaitedState::Ended => "ended",
            AwaitedState::Running => "running",
            AwaitedState::Paused => "paused",
        };
        // Each request waits for a limited time, so that a lost connection is noticed.
        let timeout = remaining.min(MAX_WAIT_PER_CALL);
        let record = match client.wait(&id, name, timeout).await {
            Ok(record) => record,
            // The sandbox existed before: it was killed and its record was removed.
            Err(e) if has_error_code(&e, "sandbox_not_found") => {
                return Ok(Outcome {
                    reason: "removed".to_owned(),
                    state: SandboxState::Killed.name(),
                    id,
                    reached: target == AwaitedState::Ended,
                });
            }
            Err(e) => return Err(e),
        };
        let ended = matches!(
            record.state,
            SandboxState::Killed | SandboxState::Broken { .. }
        );
        let reached = match target {
            AwaitedState::Ended => ended,
            AwaitedState::Running => record.state == SandboxState::Running,
            AwaitedState::Paused => record.state == SandboxState::Paused,
        };
        let is_expired = deadline.is_some_and(|deadline| Instant::now() >= deadline);
        if reached || ended || is_expired {
            return Ok(Outcome {
                reason: reason(&record),
                state: record.state.name(),
                id: record.id,
                reached,
            });
        }
    }
}

/// Returns the exit reason, or the state if the sandbox has not terminated.
fn reason(record: &SandboxInfo) -> String {
    match &record.state {
        SandboxState::Broken { cause, .. } => cause.clone(),
        SandboxState::Killed => match record.deadline_ms {
            // The deadline had passed when the sandbox was killed, so the timeout was the cause.
            Some(at) if at <= record.changed_ms => "killed: timeout expired".to_owned(),
            _ => "killed".to_owned(),
        },
        state => state.name().to_owned(),
    }
}
