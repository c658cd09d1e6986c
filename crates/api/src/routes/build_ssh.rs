//! `GET /templates/{id}/builds/{build}/ssh/{name}`: connections of build steps to SSH agents of the
//! client.
//!
//! A *permit* counts towards a limit until it is dropped.

use super::ports::expect_upgrade;
use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::http::header::{CONNECTION, UPGRADE};
use axum::response::{IntoResponse, Response};
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional;

/// Protocol of the upgrade.
const PROTOCOL: &str = "ssh-agent";

/// `GET /templates/{id}/builds/{build}/ssh/{name}` with `Upgrade: ssh-agent`: waits until a program
/// of the build connects to the SSH agent `name`. The response then carries the connection, in
/// which the client is the agent.
pub(super) async fn stream(
    State(app): State<App>,
    caller: Caller,
    Path((id, build, name)): Path<(String, String, String)>,
    mut request: Request,
) -> Result<Response, ApiError> {
    let builder = app.builder()?;
    let (_, build) = builder.owned_build(&id, &build, caller.owner_scope())?;
    if caller.is_read_only() {
        return Err(ApiError::forbidden(
            "cannot offer an SSH agent with a key of the scope `read`",
        ));
    }
    expect_upgrade(&request, PROTOCOL)?;
    // A waiting or open stream counts like a request through the gateway.
    let key = caller.owner_id();
    let permit = key.as_deref().map(|owner| app.quota.exchange(owner));
    let permit = permit.transpose()?;
    let mut program = builder.ssh_connection(&build.id, &name).await?;
    let client = hyper::upgrade::on(&mut request);
    let keys = app.keys.clone();
    // The stream outlives this request, and the permit is held until the stream ends.
    tokio::spawn(async move {
        let _permit = permit;
        let Ok(client) = client.await else { return };
        let mut client = TokioIo::new(client);
        tokio::select! {
            // An error of either side is a normal end of the stream.
            _ = copy_bidirectional(&mut client, &mut program) => {}
            () = keys.until_invalid(key.as_deref()) => {}
        }
    });
    let headers = [(CONNECTION, "upgrade"), (UPGRADE, PROTOCOL)];
    Ok((StatusCode::SWITCHING_PROTOCOLS, headers).into_response())
}
