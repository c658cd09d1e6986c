//! `GET /sandboxes/{id}/ports/{port}`: streams to TCP ports of guests.
//!
//! A *permit* counts towards a limit until it is dropped.

use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::fleet::{ByteStream, ForwardedStream};
use crate::hooks::PortRefusal;
use crate::lookup::Liveness;
use axum::extract::{Path, Request, State};
use axum::http::header::{CONNECTION, HeaderMap, UPGRADE};
use axum::http::{StatusCode, Version};
use axum::response::{IntoResponse, Response};
use hyper_util::rt::TokioIo;
use jiffy_proto::agent::ENVD_PORT;
use std::time::Duration;
use tokio::io::copy_bidirectional;
use tokio::time::timeout;

/// Protocol of the upgrade.
pub(crate) const PROTOCOL: &str = "tcp";
/// Time limit for opening a stream, including a resume.
const OPEN_LIMIT: Duration = Duration::from_secs(30);

/// `GET /sandboxes/{id}/ports/{port}` with `Upgrade: tcp`: opens a TCP connection to the port, also
/// if the server listens on the guest's loopback interface only. The stream is closed when the key
/// that opened it is revoked or expires.
pub(super) async fn stream(
    State(app): State<App>,
    caller: Caller,
    Path((id, port)): Path<(String, String)>,
    mut request: Request,
) -> Result<Response, ApiError> {
    let port = port.parse().ok().filter(|&port: &u16| port != 0);
    let port = port.ok_or_else(|| ApiError::invalid("the port must be 1 to 65535"))?;
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    if caller.is_read_only() {
        return Err(ApiError::forbidden(
            "cannot open a stream with a key of the scope `read`: the stream permits changes of the sandbox",
        ));
    }
    let forwarded = request.extensions().get::<ForwardedStream>().cloned();
    if forwarded.is_none() {
        expect_upgrade(&request, PROTOCOL)?;
    }
    // The gateway checks which paths of the agent clients may request, and a raw stream would
    // bypass the check.
    if u32::from(port) == ENVD_PORT {
        return Err(ApiError::forbidden(
            "the port belongs to the guest's agent: use the gateway to reach the agent",
        ));
    }
    let Some(ports) = &app.ports else {
        return Err(ApiError::unsupported(
            "streams are not available: the daemon of this host serves no data plane",
        ));
    };
    // An open stream counts like a request through the gateway.
    let owner = record.owner();
    let permit = owner.map(|owner| app.quota.exchange(owner)).transpose()?;
    let opened = timeout(OPEN_LIMIT, ports.open(record.id(), port)).await;
    let too_late = |_| PortRefusal::Unavailable("timed out opening the stream".to_owned());
    let mut guest = opened.map_err(too_late)??;
    let client = hyper::upgrade::on(&mut request);
    let (keys, key) = (app.keys.clone(), caller.owner_id());
    // The stream outlives this request, and the permit is held until the stream ends.
    tokio::spawn(async move {
        let _permit = permit;
        let client: Option<Box<dyn ByteStream>> = match forwarded {
            Some(stream) => stream.take(),
            None => match client.await {
                Ok(client) => Some(Box::new(TokioIo::new(client))),
                Err(_) => None,
            },
        };
        let Some(mut client) = client else { return };
        tokio::select! {
            // An error of either side is a normal end of the stream.
            _ = copy_bidirectional(&mut client, &mut guest) => {}
            () = keys.until_invalid(key.as_deref()) => {}
        }
    });
    let headers = [(CONNECTION, "upgrade"), (UPGRADE, PROTOCOL)];
    Ok((StatusCode::SWITCHING_PROTOCOLS, headers).into_response())
}

/// Returns an error unless a request has the headers for a stream of `protocol`.
pub(crate) fn expect_upgrade(request: &Request, protocol: &str) -> Result<(), ApiError> {
    if request.version() == Version::HTTP_11 && requests_upgrade(request.headers(), protocol) {
        return Ok(());
    }
    let message =
        format!("this call requires HTTP/1.1 with `Connection: upgrade` and `Upgrade: {protocol}`");
    Err(ApiError::new(
        StatusCode::UPGRADE_REQUIRED,
        "upgrade_required",
        message,
    ))
}

/// Returns whether a request has headers for an upgrade to `protocol`.
fn requests_upgrade(headers: &HeaderMap, protocol: &str) -> bool {
    let has_word = |name, word: &str| {
        let values = headers.get_all(name).iter().filter_map(|v| v.to_str().ok());
        let mut words = values.flat_map(|value| value.split(','));
        words.any(|value| value.trim().eq_ignore_ascii_case(word))
    };
    has_word(CONNECTION, "upgrade") && has_word(UPGRADE, protocol)
}

impl From<PortRefusal> for ApiError {
    fn from(refusal: PortRefusal) -> Self {
        let message = refusal.to_string();
        match refusal {
            PortRefusal::Closed(_) => Self::new(StatusCode::BAD_GATEWAY, "port_closed", message),
            PortRefusal::NotRunning => Self::conflict("not_running", message),
            PortRefusal::Limit(_) => Self::too_many("limit", message),
            PortRefusal::Unavailable(_) => {
                Self::new(StatusCode::BAD_GATEWAY, "unavailable", message)
            }
        }
    }
}
