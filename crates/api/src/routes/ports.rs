//! Streams to TCP ports of guests, whatever is spoken on them.

use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
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

/// Protocol that a client asks to change to.
const PROTOCOL: &str = "tcp";
/// Time a stream may take to come up, a wake included.
const OPEN_LIMIT: Duration = Duration::from_secs(30);

/// `GET /sandboxes/{id}/ports/{port}` with `Upgrade: tcp`: what follows are the bytes of a TCP
/// connection to the port, also of a server that listens on the guest's loopback only. The stream
/// ends with the key that opened it.
pub(super) async fn stream(
    State(app): State<App>,
    caller: Caller,
    Path((id, port)): Path<(String, String)>,
    mut request: Request,
) -> Result<Response, ApiError> {
    let port = port.parse().ok().filter(|&port: &u16| port != 0);
    let port = port.ok_or_else(|| ApiError::invalid("the port must be 1 to 65535"))?;
    let record = app.sandbox(&caller, &id, Liveness::Alive)?;
    if caller.only_reads() {
        return Err(ApiError::forbidden(
            "a stream lets its holder change the sandbox: a key with the scope `read` gets none",
        ));
    }
    if request.version() != Version::HTTP_11 || !asks(request.headers(), PROTOCOL) {
        return Err(ApiError::new(
            StatusCode::UPGRADE_REQUIRED,
            "upgrade_required",
            "this call answers HTTP/1.1 with `Connection: upgrade` and `Upgrade: tcp` only",
        ));
    }
    if u32::from(port) == ENVD_PORT {
        return Err(ApiError::forbidden(
            "this is the port of the guest's agent, which is reached through the gateway",
        ));
    }
    let Some(ports) = &app.ports else {
        return Err(ApiError::unsupported(
            "this host opens no streams: its daemon serves no data plane",
        ));
    };
    // A stream counts like a request through the gateway, for as long as it is open.
    let owner = record.owner();
    let permit = owner.map(|owner| app.quota.exchange(owner)).transpose()?;
    let opened = timeout(OPEN_LIMIT, ports.open(record.id(), port)).await;
    let too_late = |_| PortRefusal::Unavailable("it could not be opened in time".to_owned());
    let mut guest = opened.map_err(too_late)??;
    let client = hyper::upgrade::on(&mut request);
    let (keys, key) = (app.keys.clone(), caller.owner_id());
    tokio::spawn(async move {
        let _permit = permit;
        let Ok(client) = client.await else { return };
        let mut client = TokioIo::new(client);
        tokio::select! {
            // Either side breaking is an ordinary end.
            _ = copy_bidirectional(&mut client, &mut guest) => {}
            () = keys.over(key.as_deref()) => {}
        }
    });
    let headers = [(CONNECTION, "upgrade"), (UPGRADE, PROTOCOL)];
    Ok((StatusCode::SWITCHING_PROTOCOLS, headers).into_response())
}

/// True if a request asks to change to `protocol`.
pub(super) fn asks(headers: &HeaderMap, protocol: &str) -> bool {
    let says = |name, word: &str| {
        let values = headers.get_all(name).iter().filter_map(|v| v.to_str().ok());
        let mut words = values.flat_map(|value| value.split(','));
        words.any(|said| said.trim().eq_ignore_ascii_case(word))
    };
    says(CONNECTION, "upgrade") && says(UPGRADE, protocol)
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
