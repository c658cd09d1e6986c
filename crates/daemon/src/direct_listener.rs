//! Listener of direct requests to public functions. The daemon reads the host of a connection's
//! first request, and hands the connection over to the process that runs the function.

use crate::direct_connections::{DirectConnections, DirectPlace};
use anyhow::Context;
use axum::Json;
use axum::body::to_bytes;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use hyper::header::{CONNECTION, CONTENT_LENGTH, HeaderValue, RETRY_AFTER};
use jiffy_api::{ApiError, AutoResume, ExchangePermit, KeyStatus, Keys};
use jiffy_function_manager::{
    BoxConnectionPermit, ConnectionPermit as DirectPermit, FunctionError, FunctionRecord, Functions,
};
use jiffy_gateway::admission::{ConnectionAdmission, ConnectionPermit};
use jiffy_gateway::host_name::{HostTarget, classify, parse_host};
use jiffy_gateway::listener::prepare;
use jiffy_gateway::request_id::X_REQUEST_ID;
use jiffy_gateway::{GatewayConfig, RequestId};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Time for the host of the first request to arrive.
const HOST_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes within which it must come.
const MAX_HOST_BYTES: usize = 16 << 10;
/// Time to send a refusal, and to wait until the client has read it.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);
/// Bytes of a request that are read after its refusal.
const MAX_DRAINED_BYTES: usize = 64 << 10;
/// Pause after a failed accept.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Listener, and what decides about its connections.
pub struct DirectListener {
    pub listener: TcpListener,
    pub functions: Functions,
    pub keys: Arc<Keys>,
    /// Counts exchanges of keys.
    pub exchanges: AutoResume,
    /// Counts connections, together with those of the gateway.
    pub admission: Arc<ConnectionAdmission>,
    /// Its domains are those of functions.
    pub config: GatewayConfig,
    /// Counts connections by owner.
    pub connections: Arc<DirectConnections>,
}

/// Resources that a direct connection occupies.
struct DirectUse {
    _connection: ConnectionPermit,
    _place: DirectPlace,
    owner: Option<String>,
    exchanges: AutoResume,
    /// Exchange of the owner's key while a request is under way. `None` also if the key has none
    /// left for a request on a connection that was idle: the function's own limit bounds those.
    exchange: Option<ExchangePermit>,
}

impl DirectPermit for DirectUse {
    fn set_busy(&mut self, is_busy: bool) {
        self.exchange = match (is_busy, &self.owner) {
            (true, Some(owner)) => self.exchange.take().or(self.exchanges.exchange(owner).ok()),
            _ => None,
        };
    }
}

/// Listens at `address`, and prints where.
pub async fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address).await.with_context(|| {
        format!("cannot listen on {address}: choose another with `--functions-listen`")
    })?;
    println!("public functions at http://{}", listener.local_addr()?);
    Ok(listener)
}

/// Reason for which a connection is not handed over.
enum Refusal {
    /// The client sent no host, or nothing for too long.
    Bad(&'static str),
    /// The function's, in the control plane's form.
    Function(FunctionError),
    /// Its owner has disabled it.
    Disabled,
    /// Exchanges of its owner's key are used up.
    Exchanges(String),
    /// Too many connections to functions of its owner, or of all, are open.
    Connections,
}

impl DirectListener {
    /// Serves until `stopping`.
    pub async fn serve(self, stopping: CancellationToken) {
        let shared = Arc::new(self);
        loop {
            let accepted = tokio::select! {
                accepted = shared.listener.accept() => accepted,
                () = stopping.cancelled() => return,
            };
            let Ok((stream, from)) = accepted else {
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                continue;
            };
            // One over the limits is closed without an answer.
            let Ok(permit) = shared.admission.enter(from.ip().to_canonical()) else {
                continue;
            };
            prepare(&stream);
            let (shared, stopping) = (shared.clone(), stopping.clone());
            tokio::spawn(async move {
                tokio::select! {
                    () = shared.connection(stream, permit) => {}
                    () = stopping.cancelled() => {}
                }
            });
        }
    }

    async fn connection(&self, stream: TcpStream, permit: ConnectionPermit) {
        let found = match timeout(HOST_TIMEOUT, first_host(&stream)).await {
            Ok(Ok(Some(host))) => self.find(&host).map(|record| (host, record)),
            Ok(Ok(None)) => Err(Refusal::Bad("the request names no host")),
            Ok(Err(_)) => return,
            Err(_) => Err(Refusal::Bad("the request took too long")),
        };
        let (host, record) = match found {
            Ok(found) => found,
            Err(refusal) => return refuse(stream, refusal).await,
        };
        let owner = record.owner.as_deref();
        let Some(place) = self.connections.enter(owner) else {
            return refuse(stream, Refusal::Connections).await;
        };
        // A request is under way: the connection counts as an exchange until it is idle.
        let exchange = owner.map(|owner| self.exchanges.exchange(owner));
        let exchange = match exchange.transpose() {
            Ok(exchange) => exchange,
            Err(message) => return refuse(stream, Refusal::Exchanges(message)).await,
        };
        // No more notifications of it come here.
        let Ok(stream) = stream.into_std().map(OwnedFd::from) else {
            return;
        };
        permit.mark_known();
        let permit: BoxConnectionPermit = Box::new(DirectUse {
            _connection: permit,
            _place: place,
            owner: record.owner.clone(),
            exchanges: self.exchanges.clone(),
            exchange,
        });
        let handed_over = self.functions.hand_over(&record, &host, &stream, permit);
        if let Err(e) = handed_over.await {
            let stream = TcpStream::from_std(stream.into());
            if let Ok(stream) = stream {
                refuse(stream, Refusal::Function(e)).await;
            }
        }
    }

    /// Public function that a host names.
    fn find(&self, host: &str) -> Result<Arc<FunctionRecord>, Refusal> {
        let unknown = || Refusal::Function(FunctionError::NotFound(host.to_owned()));
        let name = parse_host(host).ok_or_else(unknown)?;
        let HostTarget::Function(label) = classify(&name, &self.config) else {
            return Err(unknown());
        };
        let record = self.functions.find_label(&label);
        let record = record.map_err(Refusal::Function)?;
        let is_over = self.keys.standing(record.owner.as_deref()) == KeyStatus::Ended;
        if !record.public || is_over {
            return Err(Refusal::Function(FunctionError::NotFound(label)));
        }
        match record.enabled {
            true => Ok(record),
            false => Err(Refusal::Disabled),
        }
    }
}

/// Waits for the host of a connection's first request, and leaves everything unread. None if there
/// is none in its head, or not within the limit.
async fn first_host(stream: &TcpStream) -> std::io::Result<Option<String>> {
    let mut buffer = vec![0; 1024];
    let mut is_closed = false;
    loop {
        let length = stream.peek(&mut buffer).await?;
        let head = buffer.get(..length).unwrap_or_default();
        match host_in(head) {
            Some(host) => return Ok(host),
            None if length >= MAX_HOST_BYTES => return Ok(None),
            None if length == buffer.len() => {
                buffer.resize(MAX_HOST_BYTES, 0);
                continue;
            }
            None if length == 0 || is_closed => {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            None => {}
        }
        // Forgotten, so that the next bytes wake this again.
        let _ = stream.try_io(Interest::READABLE, || {
            Err::<(), _>(std::io::ErrorKind::WouldBlock.into())
        });
        // The last bytes may have come with the end.
        is_closed = stream.ready(Interest::READABLE).await?.is_read_closed();
    }
}

/// Host in a head that may be incomplete. None if it may still come; `Some(None)` if it does not.
fn host_in(head: &[u8]) -> Option<Option<String>> {
    let mut lines = head.split_inclusive(|byte| *byte == b'\n');
    let _request_line = lines.next();
    for line in lines {
        let line = line.strip_suffix(b"\n")?;
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            return Some(None);
        }
        let Some((name, value)) = line.split_at_checked(5) else {
            continue;
        };
        if name.eq_ignore_ascii_case(b"host:") {
            let host = std::str::from_utf8(value.trim_ascii()).ok();
            return Some(host.map(str::to_owned));
        }
    }
    None
}

/// Answers a connection's first request, and closes the connection.
async fn refuse(mut stream: TcpStream, refusal: Refusal) {
    let answer = text(refusal.into_response()).await;
    let sent = async {
        stream.write_all(&answer).await?;
        stream.shutdown().await?;
        // Closed with bytes unread, the client might lose the answer.
        let mut drained = 0;
        let mut buffer = [0; 4096];
        while drained < MAX_DRAINED_BYTES {
            match stream.read(&mut buffer).await? {
                0 => break,
                read => drained += read,
            }
        }
        Ok::<_, std::io::Error>(())
    };
    // The client may be gone.
    let _ = timeout(REFUSAL_TIMEOUT, sent).await;
}

/// A response as it is sent.
async fn text(response: Response) -> Vec<u8> {
    let (mut head, body) = response.into_parts();
    let body = to_bytes(body, MAX_DRAINED_BYTES).await.unwrap_or_default();
    head.headers.insert(CONTENT_LENGTH, body.len().into());
    let close = HeaderValue::from_static("close");
    head.headers.insert(CONNECTION, close);
    let id = RequestId::new().value();
    head.headers.insert(X_REQUEST_ID.clone(), id);
    let mut answer = format!("HTTP/1.1 {}\r\n", head.status).into_bytes();
    for (name, value) in &head.headers {
        answer.extend_from_slice(name.as_str().as_bytes());
        answer.extend_from_slice(b": ");
        answer.extend_from_slice(value.as_bytes());
        answer.extend_from_slice(b"\r\n");
    }
    answer.extend_from_slice(b"\r\n");
    answer.extend_from_slice(&body);
    answer
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let (status, error_code, message) = match self {
            Self::Function(e) => return ApiError::from(e).into_response(),
            Self::Bad(message) => (
                StatusCode::BAD_REQUEST,
                "invalid_request",
                message.to_owned(),
            ),
            Self::Disabled => (
                StatusCode::SERVICE_UNAVAILABLE,
                "function_disabled",
                "the function is disabled".to_owned(),
            ),
            Self::Exchanges(message) => (StatusCode::TOO_MANY_REQUESTS, "max_exchanges", message),
            Self::Connections => (
                StatusCode::TOO_MANY_REQUESTS,
                "max_connections",
                "too many direct connections are open: close some, or try again later".to_owned(),
            ),
        };
        let body = Json(serde_json::json!({
            "code": status.as_u16(), "message": message, "error_code": error_code,
        }));
        let mut response = (status, body).into_response();
        if status == StatusCode::TOO_MANY_REQUESTS {
            let soon = HeaderValue::from_static("1");
            response.headers_mut().insert(RETRY_AFTER, soon);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_found_in_a_head_that_arrives_in_parts() {
        let head = b"GET / HTTP/1.1\r\naccept: host: x\r\nHOST:  a.fn.localhost:80 \r\n\r\n";
        let end = head.iter().rposition(|b| *b == b'8').unwrap() + 5;
        for length in 0..head.len() {
            let expected = (length >= end).then(|| Some("a.fn.localhost:80".to_owned()));
            assert_eq!(host_in(&head[..length]), expected, "{length}");
        }
        assert_eq!(host_in(b"GET / HTTP/1.1\n\nhost: x\n"), Some(None));
        assert_eq!(host_in(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), Some(None));
    }

    #[tokio::test]
    async fn a_host_is_waited_for_and_a_client_that_leaves_is_not() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        for (parts, found) in [
            (&["GET / HTTP/1.1\r\nho", "st: a", "\r\n"][..], true),
            (&["GET / HTTP/1.1\r\nhost: a"][..], false),
        ] {
            let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
            let (mut client, stream) = (client.unwrap(), accepted.unwrap().0);
            let sending = async move {
                for part in parts {
                    client.write_all(part.as_bytes()).await.unwrap();
                    tokio::task::yield_now().await;
                }
                client.shutdown().await.unwrap();
                client
            };
            let (host, _client) = tokio::join!(first_host(&stream), sending);
            assert_eq!(host.ok().flatten().is_some(), found, "{parts:?}");
        }
    }

    #[tokio::test]
    async fn a_refusal_is_a_whole_answer() {
        let refusal = Refusal::Disabled.into_response();
        let answer = String::from_utf8(text(refusal).await).unwrap();
        assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains("connection: close") && head.contains("x-request-id: "));
        assert!(body.contains("function_disabled"), "{answer}");
    }
}
