//! Calls on the daemon's host as a whole, for its administrators.

use crate::app::App;
use crate::body::Optional;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::lookup::Liveness;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use jiffy_api_types::{EngineDescription, Host, Process, StopHost, VerifiedSnapshot};

/// `GET /host`: returns the daemon's version and the free resources of the host.
pub(super) async fn host(State(app): State<App>, caller: Caller) -> Result<Json<Host>, ApiError> {
    // Read-only keys may observe the host, and keys with the scope `create` may not.
    if !caller.is_read_only() {
        caller.require_admin("reading the state of the host")?;
    }
    let (figures, limit) = app.sandboxes.figures().host();
    let running = app.sandboxes.list();
    let running = running
        .iter()
        .filter(|r| *r.state() == jiffy_sandbox_manager::SandboxState::Running);
    Ok(Json(Host {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        running: running.count(),
        warm: app.sandboxes.pool().waiting(),
        network: app.sandboxes.network(),
        memory_total_mb: figures.memory_total_mib,
        memory_available_mb: figures.memory_available_mib,
        memory_limit_mb: limit,
        disk_total_mb: figures.disk_total_mib,
        disk_free_mb: figures.disk_free_mib,
        // `about` names files and addresses of the daemon, so only the host's owner receives it.
        jiffy: (app.about.as_ref().filter(|_| caller.is_owner())).map(|about| about()),
    }))
}

/// `GET /engines`: lists the engines of this host. The reason why an engine is not available is
/// shown to the host's owner only.
pub(super) async fn engines(
    State(app): State<App>,
    caller: Caller,
) -> Json<Vec<EngineDescription>> {
    let mut all = app.sandboxes.engines();
    if !caller.is_owner() {
        // The reason may name files and settings of the host.
        all.iter_mut().for_each(|engine| engine.why = None);
    }
    Json(all)
}

/// `GET /sandboxes/{id}/process`: returns the process id of a sandbox's VMM, and the number of KVM
/// exits if the kernel counts them. Process ids are shown to the host's owner only.
pub(super) async fn process(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Process>, ApiError> {
    if !caller.is_owner() {
        return Err(ApiError::forbidden(
            "only the host's owner may read process ids",
        ));
    }
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    let (pid, exits) = app.sandboxes.observe().process(record.id()).await?;
    Ok(Json(Process { pid, exits }))
}

/// `POST /host/stop`: stops the daemon. Restricted to the host's owner.
pub(super) async fn stop(
    State(app): State<App>,
    caller: Caller,
    Optional(how): Optional<StopHost>,
) -> Result<StatusCode, ApiError> {
    if !caller.is_owner() {
        return Err(ApiError::forbidden(
            "only the host's owner may stop the daemon: run `jiffy serve --stop` on the host",
        ));
    }
    let Some(stop) = &app.stop else {
        return Err(ApiError::unsupported(
            "this daemon can only be stopped by a signal",
        ));
    };
    stop(how);
    Ok(StatusCode::ACCEPTED)
}

/// `POST /snapshots/{id}/verify`: verifies the checksums of a snapshot and of its ancestors.
pub(super) async fn verify(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Vec<VerifiedSnapshot>>, ApiError> {
    caller.require_admin("verifying a snapshot")?;
    let snapshot = app.snapshot(&caller, &id)?;
    let found = app.sandboxes.snapshots().verify(snapshot.id()).await?;
    Ok(Json(found))
}
