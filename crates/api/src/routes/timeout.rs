//! Calls that set or extend the timeout of a sandbox: the time at which it is paused or killed.
//! Also validates the timeouts of other calls.

use crate::app::{App, Config};
use crate::body::{Optional, Required};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::lookup::{Liveness, Origin};
use axum::extract::{Path, State};
use axum::http::StatusCode;
use jiffy_api_types::{MAX_REFRESH_S, Refresh, SandboxState, SetTimeout};
use std::time::Duration;

impl Config {
    /// Validates a timeout in seconds. Returns `None` for -1, which means no timeout.
    pub(crate) fn timeout(&self, seconds: i64) -> Result<Option<u64>, ApiError> {
        if seconds == -1 {
            return Ok(None);
        }
        // Other negative values are rejected by the conversion.
        let good = u64::try_from(seconds)
            .ok()
            .filter(|s| *s <= self.max_timeout_s);
        good.map(Some).ok_or_else(|| {
            ApiError::invalid(format!(
                "`timeout` must be 0 to {} seconds, or -1 for no timeout",
                self.max_timeout_s
            ))
        })
    }

    /// Validates an idle timeout in seconds, if present.
    pub(crate) fn idle_timeout(&self, seconds: Option<u64>) -> Result<Option<u64>, ApiError> {
        let most = self.max_timeout_s;
        if seconds.is_some_and(|seconds| seconds > most) {
            return Err(ApiError::invalid(format!(
                "`idleTimeout` must be 0 to {most} seconds: 0 means that the sandbox is never \
                 paused because it is idle"
            )));
        }
        Ok(seconds)
    }

    /// Validates a timeout. Defaults to the configured timeout.
    pub(crate) fn timeout_or_default(&self, seconds: Option<i64>) -> Result<Option<u64>, ApiError> {
        match seconds {
            None => Ok(Some(self.default_timeout_s)),
            Some(seconds) => self.timeout(seconds),
        }
    }
}

impl App {
    /// Returns the idle timeout in seconds of a new sandbox: `requested`, or the default of its
    /// template, or the default of the caller's key. `None` if the sandbox has none.
    pub(crate) fn idle_timeout(
        &self,
        caller: &Caller,
        origin: Option<&Origin>,
        requested: Option<u64>,
    ) -> Result<Option<u64>, ApiError> {
        let most = self.config.max_timeout_s;
        let requested = self.config.idle_timeout(requested)?;
        let of_template = || match origin? {
            Origin::Template(info) => info.idle_timeout_s,
            Origin::Snapshot(_) => None,
        };
        let of_key = || caller.key()?.limits.idle_timeout_s;
        let seconds = requested.or_else(of_template).or_else(of_key);
        // A default of a template or key may exceed the daemon's maximum: the commands that set
        // defaults do not know it. A default is therefore reduced, and not rejected.
        let seconds = seconds.map(|seconds| seconds.min(most));
        Ok(seconds.filter(|seconds| *seconds > 0))
    }
}

/// `POST /sandboxes/{id}/timeout`: sets the timeout or the idle timeout, counted from now. May
/// shorten them.
pub(super) async fn timeout(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Required(body): Required<SetTimeout>,
) -> Result<StatusCode, ApiError> {
    let timeout = body.timeout.map(|s| app.config.timeout(s)).transpose()?;
    let timeout = timeout.map(|limit| limit.map(Duration::from_secs));
    let idle_s = app.config.idle_timeout(body.idle_timeout)?;
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    // Checked after the look-up: such a body is valid by its schema, so the 404 for a sandbox of
    // another key precedes this 400.
    if timeout.is_none() && idle_s.is_none() {
        return Err(ApiError::invalid("`timeout` or `idleTimeout` is missing"));
    }
    let idle_s = idle_s.map(|seconds| Some(seconds).filter(|seconds| *seconds > 0));
    // A sandbox with an idle timeout counts towards its owner's limit of paused sandboxes already
    // while it runs. The permit is held until the changed settings are counted.
    let starts_to_count = matches!(idle_s, Some(Some(_))) && !record.settings().pauses();
    let _permit = match record.state() {
        SandboxState::Running if starts_to_count => {
            Some(app.quota.reserve_pause_when_idle(&caller, &record).await?)
        }
        _ => None,
    };
    let timeouts = app.sandboxes.timeouts();
    timeouts.change(record.id(), timeout, idle_s).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /sandboxes/{id}/refreshes`: extends the timeout to at least `duration` from now.
pub(super) async fn refresh(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Optional(body): Optional<Refresh>,
) -> Result<StatusCode, ApiError> {
    let seconds = body.duration.unwrap_or(app.config.default_timeout_s);
    if seconds > MAX_REFRESH_S {
        return Err(ApiError::invalid(format!(
            "`duration` must be 0 to {MAX_REFRESH_S} seconds"
        )));
    }
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    let more = Duration::from_secs(seconds);
    // Never shortens a longer timeout.
    app.sandboxes.timeouts().extend(record.id(), more).await?;
    Ok(StatusCode::NO_CONTENT)
}
