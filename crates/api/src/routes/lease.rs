//! Sandboxes that live as long as a connection.

use super::ports::asks;
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::lookup::Liveness;
use axum::extract::{Path, Request, State};
use axum::http::header::{CONNECTION, UPGRADE};
use axum::http::{StatusCode, Version};
use axum::response::{IntoResponse, Response};
use hyper_util::rt::TokioIo;
use jiffy_sandbox_manager::{OperationError, Sandboxes};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::{MissedTickBehavior, interval};

/// Protocol that a client asks to change to.
const PROTOCOL: &str = "lease";
/// Time that a sandbox with a time limit has left at any moment of its lease. A daemon that is
/// killed leaves the sandbox to the next one, which ends it when this is over.
const TERM: Duration = Duration::from_secs(60);
/// Time between two extensions.
const RENEWAL: Duration = Duration::from_secs(20);

/// `POST /sandboxes/{id}/lease` with `Upgrade: lease`: the sandbox is removed when the connection
/// ends, however that happens. Bytes of the client mean nothing; they keep proxies patient.
pub(super) async fn lease(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    mut request: Request,
) -> Result<Response, ApiError> {
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    if request.version() != Version::HTTP_11 || !asks(request.headers(), PROTOCOL) {
        return Err(ApiError::new(
            StatusCode::UPGRADE_REQUIRED,
            "upgrade_required",
            "this call answers HTTP/1.1 with `Connection: upgrade` and `Upgrade: lease` only",
        ));
    }
    // An open connection counts like a request through the gateway.
    let owner = record.owner();
    let permit = owner.map(|owner| app.quota.exchange(owner)).transpose()?;
    let client = hyper::upgrade::on(&mut request);
    let (keys, key) = (app.keys.clone(), caller.owner_id());
    let sandboxes = app.sandboxes.clone();
    tokio::spawn(async move {
        let _permit = permit;
        // A client that is gone before the answer has ended its lease, too.
        if let Ok(client) = client.await {
            tokio::select! {
                () = closed(TokioIo::new(client)) => {}
                () = renew(&sandboxes, record.id()) => {}
                () = keys.over(key.as_deref()) => {}
            }
        }
        match sandboxes.remove(record.id()).await {
            Ok(_) | Err(OperationError::Unknown { .. }) => {}
            Err(e) => tracing::warn!("sandbox {} outlives its lease: {e}", record.id()),
        }
    });
    let headers = [(CONNECTION, "upgrade"), (UPGRADE, PROTOCOL)];
    Ok((StatusCode::SWITCHING_PROTOCOLS, headers).into_response())
}

/// Waits for the end of a stream.
async fn closed(mut stream: impl AsyncRead + Unpin) {
    let mut bytes = [0; 64];
    while matches!(stream.read(&mut bytes).await, Ok(1..)) {}
}

/// Extends the time of a sandbox until it is gone.
async fn renew(sandboxes: &Sandboxes, id: &str) {
    let mut ticks = interval(RENEWAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first is now, and the sandbox was made a moment ago.
    ticks.tick().await;
    loop {
        ticks.tick().await;
        match sandboxes.timeouts().extend(id, TERM).await {
            Ok(_) => {}
            // Killed or removed by somebody: there is nothing to hold any more.
            Err(OperationError::Unknown { .. } | OperationError::State { .. }) => return,
            Err(e) => tracing::warn!("cannot extend the time of sandbox {id}: {e}"),
        }
    }
}
