//! `jiffy wait`: until sandboxes are in a state, or cannot be any more.

use super::table;
use crate::cli::{AwaitedState, WaitArgs};
use jiffy_api_types::{SandboxInfo, SandboxState};
use jiffy_client::progress::while_waiting;
use jiffy_client::{Client, is_refusal};
use serde::Serialize;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Exit code when the time is over, as that of timeout(1).
const TIMEOUT_EXIT_CODE: u8 = 124;
/// Longest time of one question.
const MAX_WAIT_PER_CALL: Duration = Duration::from_secs(10);

/// Outcome of waiting for a sandbox.
#[derive(Debug, Serialize)]
struct Outcome {
    id: String,
    state: &'static str,
    /// Why it ended, or how it is.
    reason: String,
    reached: bool,
}

/// Waits for each; one that is not found does not spare the others.
pub async fn run(args: &WaitArgs) -> anyhow::Result<ExitCode> {
    let client = jiffy_daemon::open_client(&args.host.server()).await?;
    let end = args.timeout.map(|time| Instant::now() + time);
    let mut all = Vec::new();
    let mut code = 0;
    for id in &args.ids {
        let waiting = wait(&client, id, args.state, end);
        let outcome = match while_waiting("waiting for the sandbox", waiting).await {
            Ok(outcome) => outcome,
            Err(e) => {
                errln!("jiffy: {e:#}");
                code = 1;
                continue;
            }
        };
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

async fn wait(
    client: &Client,
    id: &str,
    wanted: AwaitedState,
    end: Option<Instant>,
) -> anyhow::Result<Outcome> {
    let id = client.sandbox(id).await?.record.id;
    loop {
        let left = end.map_or(MAX_WAIT_PER_CALL, |end| {
            end.saturating_duration_since(Instant::now())
        });
        let name = match wanted {
            AwaitedState::Ended => "ended",
            AwaitedState::Running => "running",
            AwaitedState::Paused => "paused",
        };
        let record = match client.wait(&id, name, left.min(MAX_WAIT_PER_CALL)).await {
            Ok(record) => record,
            // It was there: it ended, and its record went.
            Err(e) if is_refusal(&e, "sandbox_not_found") => {
                return Ok(Outcome {
                    reason: "removed".to_owned(),
                    state: SandboxState::Killed.name(),
                    id,
                    reached: wanted == AwaitedState::Ended,
                });
            }
            Err(e) => return Err(e),
        };
        let ended = matches!(
            record.state,
            SandboxState::Killed | SandboxState::Broken { .. }
        );
        let reached = match wanted {
            AwaitedState::Ended => ended,
            AwaitedState::Running => record.state == SandboxState::Running,
            AwaitedState::Paused => record.state == SandboxState::Paused,
        };
        let over = end.is_some_and(|end| Instant::now() >= end);
        if reached || ended || over {
            return Ok(Outcome {
                reason: reason(&record),
                state: record.state.name(),
                id: record.id,
                reached,
            });
        }
    }
}

/// Why it ended, or how it is.
fn reason(record: &SandboxInfo) -> String {
    match &record.state {
        SandboxState::Broken { cause, .. } => cause.clone(),
        SandboxState::Killed => match record.deadline_ms {
            Some(at) if at <= record.changed_ms => "killed: its time was over".to_owned(),
            _ => "killed".to_owned(),
        },
        state => state.name().to_owned(),
    }
}
