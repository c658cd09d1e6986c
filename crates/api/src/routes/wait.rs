//! Calls that wait for a state of a sandbox, or restart its processes.

use crate::app::App;
use crate::body::Optional;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::lookup::Liveness;
use crate::query::Query;
use crate::wire::sandbox::whole;
use axum::Json;
use axum::extract::{Path, State};
use jiffy_api_types::{RestartSandbox, Sandbox, Waited};
use jiffy_sandbox_manager::{MAX_RESTART_GRACE, SandboxState};
use std::time::Duration;

/// Maximum time in seconds that one call waits. Proxies close connections that are idle for longer.
pub(crate) const MAX_WAIT_S: u64 = 10;
/// Default time in milliseconds in which processes may terminate before they are killed.
const DEFAULT_GRACE_MS: u64 = 10_000;
/// Names of the states that a client can wait for.
pub(crate) const AWAITED: [&str; 3] = ["ended", "running", "paused"];

/// State that a client waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Awaited {
    Ended,
    Running,
    Paused,
}

impl Awaited {
    /// Returns whether the wait is over: the state is reached, or can no longer be reached.
    fn is_over(self, state: &SandboxState) -> bool {
        match state {
            // Without a new request of a client, the sandbox will be neither running nor paused.
            SandboxState::Killed | SandboxState::Broken { .. } => true,
            SandboxState::Running => self == Self::Running,
            SandboxState::Paused => self == Self::Paused,
            SandboxState::Creating => false,
        }
    }
}

/// `GET /sandboxes/{id}/wait`: responds with the current state as soon as the requested state is
/// reached, the sandbox has terminated, or the time is over.
pub(super) async fn wait(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    query: Query,
) -> Result<Json<Waited>, ApiError> {
    let [ended, running, paused] = AWAITED;
    let words = [
        (ended, Awaited::Ended),
        (running, Awaited::Running),
        (paused, Awaited::Paused),
    ];
    let awaited = query.word("for", &words)?.unwrap_or(Awaited::Ended);
    let seconds = query.number("seconds", 0..=MAX_WAIT_S)?;
    let limit = Duration::from_secs(seconds.unwrap_or(0));
    let record = app.sandbox(&caller, &id, Liveness::IncludingBroken)?;
    let over = move |state: &SandboxState| awaited.is_over(state);
    // Also returns the record when the time is over: the client compares the state.
    let record = app.sandboxes.wait(record.id(), limit, over).await?;
    let reason = match &record.state() {
        SandboxState::Broken { cause, .. } => Some(cause.clone()),
        _ => None,
    };
    Ok(Json(Waited {
        sandbox_id: caller.shown_id(record.id()).to_owned(),
        state: record.state().kind(),
        jiffy: whole(&caller, record),
        reason,
    }))
}

/// `POST /sandboxes/{id}/restart`: terminates the sandbox's processes and runs the start command of
/// its template.
pub(super) async fn restart(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Optional(body): Optional<RestartSandbox>,
) -> Result<Json<Sandbox>, ApiError> {
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    let grace = Duration::from_millis(body.grace_ms.unwrap_or(DEFAULT_GRACE_MS));
    if grace > MAX_RESTART_GRACE {
        return Err(ApiError::invalid(format!(
            "`graceMs` must be 0 to {} milliseconds",
            MAX_RESTART_GRACE.as_millis()
        )));
    }
    let record = app.sandboxes.restart(record.id(), grace).await?;
    Ok(Json(app.answer(&caller, &record)))
}
