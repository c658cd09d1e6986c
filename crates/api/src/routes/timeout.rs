//! Calls that change the timeout of a sandbox.

use crate::app::{App, Config};
use crate::body::{Optional, Required};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::lookup::Liveness;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use jiffy_api_types::{MAX_REFRESH_S, Refresh, SetTimeout};
use std::time::Duration;

impl Config {
    /// Validates a timeout in seconds. -1 means no timeout, for which the result is `None`.
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

    /// Validates a timeout. Defaults to the configured timeout.
    pub(crate) fn timeout_or_default(&self, seconds: Option<i64>) -> Result<Option<u64>, ApiError> {
        match seconds {
            None => Ok(Some(self.default_timeout_s)),
            Some(seconds) => self.timeout(seconds),
        }
    }
}

/// `POST /sandboxes/{id}/timeout`: sets the timeout, counted from now. May shorten it.
pub(super) async fn timeout(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Required(body): Required<SetTimeout>,
) -> Result<StatusCode, ApiError> {
    let timeout = app.config.timeout(body.timeout)?;
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    let timeout = timeout.map(Duration::from_secs);
    app.sandboxes.timeouts().set(record.id(), timeout).await?;
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
