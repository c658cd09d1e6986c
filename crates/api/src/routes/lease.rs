//! Leases: a leased sandbox exists as long as a connection of its client.
//!
//! `jiffy run` uses a lease: if the command is killed, the daemon removes its sandbox.

use super::ports::expect_upgrade;
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::fleet::{ByteStream, ForwardedStream};
use crate::lookup::Liveness;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::http::header::{CONNECTION, UPGRADE};
use axum::response::{IntoResponse, Response};
use hyper_util::rt::TokioIo;
use jiffy_sandbox_manager::{OperationError, Sandboxes};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::{MissedTickBehavior, interval};

/// Protocol of the upgrade.
pub(crate) const PROTOCOL: &str = "lease";
/// Timeout to which a lease extends a sandbox that has a timeout. If the daemon is killed, the
/// lease ends without a removal, and a later daemon handles this timeout.
const TERM: Duration = Duration::from_secs(60);
/// Interval between extensions of the timeout. It is a third of `TERM`, so that the sandbox remains
/// if one extension fails or is late.
const RENEWAL: Duration = Duration::from_secs(20);

/// `POST /sandboxes/{id}/lease` with `Upgrade: lease`: removes the sandbox when the connection ends
/// for any reason, or when the caller's key is revoked or expires. Received bytes are ignored;
/// clients send them to keep the connection open through proxies.
pub(super) async fn lease(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    mut request: Request,
) -> Result<Response, ApiError> {
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    let forwarded = request.extensions().get::<ForwardedStream>().cloned();
    if forwarded.is_none() {
        expect_upgrade(&request, PROTOCOL)?;
    }
    // An open connection counts like a request through the gateway.
    let owner = record.owner();
    let permit = owner.map(|owner| app.quota.exchange(owner)).transpose()?;
    let client = hyper::upgrade::on(&mut request);
    let (keys, key) = (app.keys.clone(), caller.owner_id());
    let sandboxes = app.sandboxes.clone();
    tokio::spawn(async move {
        let _permit = permit;
        // A client that disconnects before the response also ends its lease, so the sandbox is
        // removed below.
        let client: Option<Box<dyn ByteStream>> = match forwarded {
            Some(stream) => stream.take(),
            None => match client.await {
                Ok(client) => Some(Box::new(TokioIo::new(client))),
                Err(_) => None,
            },
        };
        if let Some(client) = client {
            tokio::select! {
                () = closed(client) => {}
                () = renew(&sandboxes, record.id()) => {}
                () = keys.until_invalid(key.as_deref()) => {}
            }
        }
        match sandboxes.remove(record.id()).await {
            Ok(_) | Err(OperationError::Unknown { .. }) => {}
            Err(e) => {
                tracing::warn!(sandbox = record.id(), error = %e, "cannot remove a sandbox after its lease")
            }
        }
    });
    let headers = [(CONNECTION, "upgrade"), (UPGRADE, PROTOCOL)];
    Ok((StatusCode::SWITCHING_PROTOCOLS, headers).into_response())
}

/// Waits until the client closes the stream.
async fn closed(mut stream: impl AsyncRead + Unpin) {
    // Clients send single bytes.
    let mut bytes = [0; 64];
    while matches!(stream.read(&mut bytes).await, Ok(1..)) {}
}

/// Extends the timeout of a sandbox until the sandbox is removed.
async fn renew(sandboxes: &Sandboxes, id: &str) {
    let mut ticks = interval(RENEWAL);
    // After a pause of the host, one extension is enough.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Skip the first tick, which is immediate. Jiffy's clients lease a sandbox right after its
    // create, with a timeout longer than `RENEWAL`.
    ticks.tick().await;
    loop {
        ticks.tick().await;
        match sandboxes.timeouts().extend(id, TERM).await {
            Ok(_) => {}
            // The sandbox was killed or removed: the lease has ended.
            Err(OperationError::Unknown { .. } | OperationError::State { .. }) => return,
            Err(e) => {
                tracing::warn!(sandbox = id, error = %e, "cannot extend the timeout of a leased sandbox");
            }
        }
    }
}
