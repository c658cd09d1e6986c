//! Pause, resume, rename and removal of sandboxes.

use crate::app::App;
use crate::body::{Optional, Required};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::lookup::Liveness;
use crate::query::Query;
use crate::resumable::Resumable;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use jiffy_agent_client::AgentClient;
use jiffy_api_types::{
    ChangeSandbox, ConnectSandbox, PauseSandbox, ResumeFrom, ResumeSandbox, SandboxDetail,
    SnapshotContent,
};
use jiffy_proto::agent::ENVD_PORT;
use jiffy_sandbox_manager::{
    OnTimeout, OperationError, ResumeOptions, ResumeTimeout, Sandbox, SandboxState,
};
use std::io;
use std::time::Duration;

/// Header of a resume that used a stored state which may be older than the state on a lost host.
const RESUMED_FROM: HeaderName = HeaderName::from_static("jiffy-resumed-from");
/// Timeout of the health check of an agent.
const HEALTH: Duration = Duration::from_secs(3);

impl App {
    /// Resumes a sandbox unless it is running, and extends its timeout. Returns whether the sandbox
    /// was resumed. The timeout changes atomically with the state: an earlier deadline cannot
    /// terminate the sandbox after this function has returned.
    async fn ensure_running(
        &self,
        caller: &Caller,
        sandbox: &Resumable,
        options: ResumeOptions,
    ) -> Result<(Sandbox, bool), ApiError> {
        let (record, time) = (sandbox.record(), options.time);
        if matches!(sandbox, Resumable::Here(_))
            && let Some(now) = self.sandboxes.timeouts().renew(record.id(), time).await?
        {
            return Ok((now, false));
        }
        // Only a sandbox that is not running needs quota. Another request may resume it meanwhile.
        let _permit = match self.quota.reserve_restart(caller, record).await {
            Ok(permit) => permit,
            // The quota may be exhausted because the other request has just resumed the sandbox.
            Err(refusal) => match self.sandboxes.timeouts().renew(record.id(), time).await? {
                Some(now) => return Ok((now, false)),
                None => return Err(refusal),
            },
        };
        self.adopt(sandbox);
        let id = record.id();
        match self.sandboxes.ensure_running_with(id, options).await {
            // Another host has stored a newer pause since.
            Err(e) if e.is_newer() => {
                self.adopt_newer(caller, id).await?;
                Ok(self.sandboxes.ensure_running_with(id, options).await?)
            }
            other => Ok(other?),
        }
    }

    /// Registers a sandbox from the store again. This host had paused it, and another host has
    /// resumed and paused it since.
    async fn adopt_newer(&self, caller: &Caller, id: &str) -> Result<(), ApiError> {
        let stored = self.resumable(caller, id).await?;
        self.adopt(&stored);
        Ok(())
    }

    /// Registers a sandbox of another host, so that it can be resumed here.
    fn adopt(&self, sandbox: &Resumable) {
        match sandbox {
            Resumable::Here(_) => {}
            Resumable::Stored(record) => self.sandboxes.adopt_stored(record),
            Resumable::Older(record) => self.sandboxes.adopt_older(record),
        }
    }

    /// Returns the timeout that a resume sets if the caller requested `timeout`.
    pub(crate) fn resume_timeout(
        &self,
        record: &Sandbox,
        timeout: Option<Option<u64>>,
    ) -> ResumeTimeout {
        match (timeout, record.settings().timeout_s) {
            // The outer option states whether the client sent a timeout, and the inner option is
            // `None` for no timeout.
            (Some(None), _) => ResumeTimeout::Unlimited,
            (Some(Some(seconds)), _) => ResumeTimeout::AtLeast(Duration::from_secs(seconds)),
            // A sandbox with a timeout of zero would be paused again before it can be used.
            (None, Some(0)) => {
                ResumeTimeout::AtLeast(Duration::from_secs(self.config.default_timeout_s))
            }
            (None, _) => ResumeTimeout::Own,
        }
    }

    /// Returns whether the agent of a sandbox responds in time.
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

/// `POST /v2/sandboxes/{id}/connect`: 200 if the sandbox was running, 201 if it was resumed. Never
/// shortens the timeout.
pub(super) async fn connect(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Optional(body): Optional<ConnectSandbox>,
) -> Result<Response, ApiError> {
    let (now, resumed) = resume_or_extend(&app, &caller, &id, &body).await?;
    let status = if resumed {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    Ok((status, Json(app.answer(&caller, &now))).into_response())
}

/// `POST /sandboxes/{id}/connect`: as version 2, but 200 also if the sandbox was resumed.
/// CubeSandbox's clients accept only 200 here; E2B's clients accept both.
pub(super) async fn connect_v1(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Optional(body): Optional<ConnectSandbox>,
) -> Result<Response, ApiError> {
    let (now, _) = resume_or_extend(&app, &caller, &id, &body).await?;
    Ok(Json(app.answer(&caller, &now)).into_response())
}

/// Resumes a sandbox, or extends the timeout of a running one. Returns whether it was resumed.
async fn resume_or_extend(
    app: &App,
    caller: &Caller,
    id: &str,
    body: &ConnectSandbox,
) -> Result<(Sandbox, bool), ApiError> {
    let timeout = body.timeout.map(|t| app.config.timeout(t)).transpose()?;
    let sandbox = app.resumable(caller, id).await?;
    let record = sandbox.record();
    app.check_content(record.engine(), SnapshotContent::with_memory(body.memory))?;
    let options = ResumeOptions {
        time: app.resume_timeout(record, timeout),
        reboot: body.memory == Some(false),
        ..ResumeOptions::default()
    };
    app.ensure_running(caller, &sandbox, options).await
}

/// `POST /sandboxes/{id}/resume`: used by older clients; 409 if the sandbox is running. A sandbox
/// that is broken because of missing memory is started again.
pub(super) async fn resume(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Optional(body): Optional<ResumeSandbox>,
) -> Result<Response, ApiError> {
    let timeout = body.timeout.map(|t| app.config.timeout(t)).transpose()?;
    let from_stored = body.from == Some(ResumeFrom::Stored);
    let sandbox = app.resumable_from(&caller, &id, from_stored).await?;
    let record = sandbox.record();
    app.check_content(record.engine(), SnapshotContent::with_memory(body.memory))?;
    let already_running = || {
        let message = format!("sandbox {} is already running", record.id());
        ApiError::conflict("already_running", message)
    };
    // Check before the quota is reserved: a running sandbox needs no further quota.
    if *record.state() == SandboxState::Running {
        return Err(already_running());
    }
    let options = ResumeOptions {
        time: app.resume_timeout(record, timeout),
        on_timeout: body.auto_pause.map(|pause| {
            if pause {
                OnTimeout::Pause
            } else {
                OnTimeout::Kill
            }
        }),
        reboot: body.memory == Some(false),
    };
    let _permit = app.quota.reserve_restart(&caller, record).await?;
    app.adopt(&sandbox);
    let mut resumed = app.sandboxes.resume_with(record.id(), options).await;
    if matches!(&resumed, Err(e) if e.is_newer()) {
        app.adopt_newer(&caller, record.id()).await?;
        resumed = app.sandboxes.resume_with(record.id(), options).await;
    }
    let now = match resumed {
        Ok(now) => now,
        Err(e) => {
            // Another request may have resumed the sandbox meanwhile.
            let now = app.sandboxes.find(record.id()).map(|r| r.state().clone());
            return Err(match now {
                Some(SandboxState::Running) => already_running(),
                _ => e.into(),
            });
        }
    };
    let mut response = (StatusCode::CREATED, Json(app.answer(&caller, &now))).into_response();
    if matches!(sandbox, Resumable::Older(_)) {
        let headers = response.headers_mut();
        headers.insert(RESUMED_FROM, HeaderValue::from_static("stored"));
    }
    Ok(response)
}

/// `POST /sandboxes/{id}/pause`: 409 if the sandbox is already paused, 503 if the pause failed and
/// the sandbox continues. With `durable`, waits until the store has the snapshot, also for a paused
/// sandbox; 503 if the store lacks the snapshot.
pub(super) async fn pause(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Optional(body): Optional<PauseSandbox>,
) -> Result<StatusCode, ApiError> {
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    let content = SnapshotContent::with_memory(body.memory);
    app.check_content(record.engine(), content)?;
    let durable = body.durable == Some(true);
    if durable {
        // Fail before pausing if the host uses no store.
        app.sandboxes.snapshots().expect_store()?;
    }
    if *record.state() == SandboxState::Paused {
        if durable {
            return wait_until_stored(&app, &record).await;
        }
        let message = format!("sandbox {} is already paused", record.id());
        return Err(ApiError::conflict("already_paused", message));
    }
    // Check the guest before the pause: the client wants to repair an unresponsive guest instead of
    // storing it.
    if body.require_healthy_guest == Some(true) && !app.is_healthy(record.id()).await {
        return Err(ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "sandbox_snapshot_guest_agent_unresponsive",
            format!(
                "cannot pause sandbox {}: its agent does not respond",
                record.id()
            ),
        )
        .permanent());
    }
    match app.sandboxes.pause_with(record.id(), content).await {
        Ok(record) if durable => wait_until_stored(&app, &record).await,
        Ok(_) => Ok(StatusCode::NO_CONTENT),
        // The text of the engine may name files of the host, so only administrators see it.
        Err(e @ OperationError::Engine { .. }) => {
            tracing::warn!(sandbox = record.id(), error = %e, "cannot pause a sandbox");
            let message = if caller.is_admin() {
                e.to_string()
            } else {
                format!(
                    "cannot pause sandbox {}: the engine failed; the sandbox continues to run",
                    record.id()
                )
            };
            let status = StatusCode::SERVICE_UNAVAILABLE;
            Err(ApiError::new(status, "pause_failed", message).permanent())
        }
        Err(e) => Err(e.into()),
    }
}

/// Waits until the store has the snapshot of a paused sandbox.
async fn wait_until_stored(app: &App, record: &Sandbox) -> Result<StatusCode, ApiError> {
    // A paused sandbox always has a snapshot.
    let snapshot = record.snapshot().unwrap_or_default();
    app.sandboxes.snapshots().wait_stored(snapshot).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `PATCH /sandboxes/{id}`: renames a sandbox.
pub(super) async fn change(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Required(body): Required<ChangeSandbox>,
) -> Result<Json<SandboxDetail>, ApiError> {
    let record = app.sandbox(&caller, &id, Liveness::IncludingBroken)?;
    let record = app.sandboxes.rename(record.id(), body.name).await?;
    Ok(Json(app.detail(&caller, &record)))
}

/// `DELETE /sandboxes/{id}`: kills a sandbox. Its record remains for an hour, unless `forget=true`
/// removes it.
pub(super) async fn delete(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    query: Query,
) -> Result<StatusCode, ApiError> {
    let forget = query.flag("forget")?;
    let record = app.sandbox(&caller, &id, Liveness::IncludingBroken)?;
    if forget {
        app.sandboxes.remove(record.id()).await?
    } else {
        app.sandboxes.kill(record.id()).await?
    };
    Ok(StatusCode::NO_CONTENT)
}
