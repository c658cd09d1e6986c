//! Restarts, and waiting for what becomes of a sandbox.

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

/// Longest time of one call, in seconds: proxies on the way give up on what is silent for longer.
pub(crate) const MAX_WAIT_S: u64 = 10;
/// Time that processes have to end by themselves when nobody says, in milliseconds.
const USUAL_GRACE_MS: u64 = 10_000;
/// Words for what can be waited for.
pub(crate) const AWAITED: [&str; 3] = ["ended", "running", "paused"];

/// States that can be waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Awaited {
    Ended,
    Running,
    Paused,
}

impl Awaited {
    /// True if a sandbox in this state is as it is waited for, or will not be.
    fn is_over(self, state: &SandboxState) -> bool {
        match state {
            SandboxState::Killed | SandboxState::Broken { .. } => true,
            SandboxState::Running => self == Self::Running,
            SandboxState::Paused => self == Self::Paused,
            SandboxState::Creating => false,
        }
    }
}

/// `GET /sandboxes/{id}/wait`: answers when it is in the state that is waited for, when it has
/// ended, or when the time is over, with what it is then.
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
    let record = app.sandbox(&caller, &id, Liveness::Mendable)?;
    let over = move |state: &SandboxState| awaited.is_over(state);
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

/// `POST /sandboxes/{id}/restart`: ends its processes and starts what its template starts.
pub(super) async fn restart(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Optional(body): Optional<RestartSandbox>,
) -> Result<Json<Sandbox>, ApiError> {
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    let grace = Duration::from_millis(body.grace_ms.unwrap_or(USUAL_GRACE_MS));
    if grace > MAX_RESTART_GRACE {
        return Err(ApiError::invalid(format!(
            "`graceMs` must be 0 to {}",
            MAX_RESTART_GRACE.as_millis()
        )));
    }
    let record = app.sandboxes.restart(record.id(), grace).await?;
    Ok(Json(app.answer(&caller, &record)))
}
