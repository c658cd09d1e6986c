//! Waking, sleeping and the end.

use crate::app::App;
use crate::body::Optional;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::find::Wanted;
use crate::query::Query;
use crate::quota::Room;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use jiffy_agent_client::AgentClient;
use jiffy_engine::{Engine, SandboxSize};
use jiffy_host::{OnTimeout, OperationError, SandboxRecord, State as Life};
use jiffy_proto::agent::ENVD_PORT;
use serde::Deserialize;
use std::io;
use std::time::Duration;

/// Time an agent has to say that it is well.
const HEALTH: Duration = Duration::from_secs(3);

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct WakeBody {
    timeout: Option<i64>,
    auto_pause: Option<bool>,
    memory: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct PauseBody {
    memory: Option<bool>,
    require_healthy_guest: Option<bool>,
}

impl<E: Engine> App<E> {
    /// Room for sandboxes that are about to run; only keys have limits.
    pub(crate) async fn room(
        &self,
        caller: &Caller,
        size: SandboxSize,
        count: usize,
        new: bool,
    ) -> Result<Option<Room>, ApiError> {
        let Some(key) = caller.key() else {
            return Ok(None);
        };
        let room = self.quota.room(&self.sandboxes, key, size, count, new);
        room.await.map(Some)
    }

    /// Makes sure that a sandbox runs and has its time; says whether it had to be woken.
    async fn wake(
        &self,
        caller: &Caller,
        record: &SandboxRecord,
        timeout: Option<Option<u64>>,
    ) -> Result<(SandboxRecord, bool), ApiError> {
        let _room = match record.state {
            Life::Running => None,
            _ => self.room(caller, record.size, 1, false).await?,
        };
        let (now, woken) = self.sandboxes.wake(&record.id).await?;
        let now = match timeout {
            // Its time began anew with waking.
            None if woken => now,
            None => match now.terms.timeout_s {
                Some(own) => self.extend(&now.id, own).await?,
                None => now,
            },
            Some(None) => self.sandboxes.set_timeout(&now.id, None).await?,
            Some(Some(seconds)) if woken => {
                let limit = Some(Duration::from_secs(seconds));
                self.sandboxes.set_timeout(&now.id, limit).await?
            }
            Some(Some(seconds)) => self.extend(&now.id, seconds).await?,
        };
        Ok((now, woken))
    }

    async fn extend(&self, id: &str, seconds: u64) -> Result<SandboxRecord, OperationError> {
        let more = Duration::from_secs(seconds);
        self.sandboxes.extend_timeout(id, more).await
    }

    async fn is_healthy(&self, id: &str) -> bool {
        let (sandboxes, id) = (self.sandboxes.clone(), id.to_owned());
        let client = AgentClient::new(move || {
            let (sandboxes, id) = (sandboxes.clone(), id.clone());
            async move {
                let stream = sandboxes.connect(&id, ENVD_PORT).await;
                stream.map_err(io::Error::other)
            }
        });
        let answer = tokio::time::timeout(HEALTH, client.health()).await;
        matches!(answer, Ok(Ok(())))
    }
}

fn no_cold_start(memory: Option<bool>) -> Result<(), ApiError> {
    match memory {
        Some(false) => Err(ApiError::unsupported(
            "`memory: false` is not supported: sandboxes sleep and wake with their memory",
        )),
        _ => Ok(()),
    }
}

/// `POST /sandboxes/{id}/connect`: 200 if it ran, 201 if it was woken. Never shortens its time.
pub(super) async fn connect<E: Engine>(
    State(app): State<App<E>>,
    caller: Caller,
    Path(id): Path<String>,
    Optional(body): Optional<WakeBody>,
) -> Result<Response, ApiError> {
    let timeout = body.timeout.map(|t| app.config.timeout(t)).transpose()?;
    let record = app.sandbox(&caller, &id, Wanted::Alive)?;
    no_cold_start(body.memory)?;
    let (now, woken) = app.wake(&caller, &record, timeout).await?;
    let status = match woken {
        true => StatusCode::CREATED,
        false => StatusCode::OK,
    };
    Ok((status, Json(app.answer(&caller, &now))).into_response())
}

/// `POST /sandboxes/{id}/resume`: as older clients wake a sandbox; 409 if it runs.
pub(super) async fn resume<E: Engine>(
    State(app): State<App<E>>,
    caller: Caller,
    Path(id): Path<String>,
    Optional(body): Optional<WakeBody>,
) -> Result<Response, ApiError> {
    let timeout = body.timeout.map(|t| app.config.timeout(t)).transpose()?;
    let record = app.sandbox(&caller, &id, Wanted::Alive)?;
    no_cold_start(body.memory)?;
    let runs = || {
        let message = format!("sandbox {} runs already", record.id);
        ApiError::conflict("already_running", message)
    };
    if record.state == Life::Running {
        return Err(runs());
    }
    let (now, woken) = app.wake(&caller, &record, timeout).await?;
    if !woken {
        return Err(runs());
    }
    if let Some(pause) = body.auto_pause {
        let change = move |terms: &mut jiffy_host::Terms| {
            terms.on_timeout = match pause {
                true => OnTimeout::Pause,
                false => OnTimeout::Kill,
            };
        };
        app.sandboxes.change_terms(&now.id, change).await?;
    }
    Ok((StatusCode::CREATED, Json(app.answer(&caller, &now))).into_response())
}

/// `POST /sandboxes/{id}/pause`: 409 if it sleeps, 503 if it could not be put to sleep and runs on.
pub(super) async fn pause<E: Engine>(
    State(app): State<App<E>>,
    caller: Caller,
    Path(id): Path<String>,
    Optional(body): Optional<PauseBody>,
) -> Result<StatusCode, ApiError> {
    let record = app.sandbox(&caller, &id, Wanted::Alive)?;
    no_cold_start(body.memory)?;
    if record.state == Life::Paused {
        let message = format!("sandbox {} is paused already", record.id);
        return Err(ApiError::conflict("already_paused", message));
    }
    if body.require_healthy_guest == Some(true) && !app.is_healthy(&record.id).await {
        return Err(ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "sandbox_snapshot_guest_agent_unresponsive",
            format!(
                "the agent of sandbox {} does not answer: it was not paused",
                record.id
            ),
        )
        .permanent());
    }
    match app.sandboxes.pause(&record.id).await {
        Ok(_) => Ok(StatusCode::NO_CONTENT),
        Err(e @ OperationError::Engine { .. }) => {
            tracing::warn!("{e}");
            let message = match caller.is_admin() {
                true => e.to_string(),
                false => format!("sandbox {} could not be paused", record.id),
            };
            let status = StatusCode::SERVICE_UNAVAILABLE;
            Err(ApiError::new(status, "pause_failed", message).permanent())
        }
        Err(e) => Err(e.into()),
    }
}

/// `DELETE /sandboxes/{id}`. With `forget=true` also its record goes; otherwise that stays for an hour.
pub(super) async fn delete<E: Engine>(
    State(app): State<App<E>>,
    caller: Caller,
    Path(id): Path<String>,
    query: Query,
) -> Result<StatusCode, ApiError> {
    let forget = query.flag("forget")?;
    let record = app.sandbox(&caller, &id, Wanted::Mendable)?;
    match forget {
        true => app.sandboxes.remove(&record.id).await?,
        false => app.sandboxes.kill(&record.id).await?,
    };
    Ok(StatusCode::NO_CONTENT)
}
