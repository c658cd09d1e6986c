//! Listener of direct requests to public functions, which bypass the gateway. The daemon reads the
//! host name of the first request of a connection, and transfers the connection to the process that
//! runs the function.
//!
//! An *exchange* is a request to a sandbox or function with its response or stream. Each key has a
//! limit of exchanges at the same time. A *permit* counts towards a limit until it is dropped. The
//! *head* of a request or response is its first line and its headers, without the body.

use crate::direct_connections::{DirectConnectionPermit, DirectConnections};
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

/// Timeout for the host name of the first request.
const HOST_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of the request head up to the host name, in bytes.
const MAX_HOST_BYTES: usize = 16 << 10;
/// Timeout for sending an error response and for the client to read it.
const ERROR_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of request bytes that are read after an error response.
const MAX_DRAINED_BYTES: usize = 64 << 10;
/// Delay after a failed accept.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Listener and the dependencies that accept or reject its connections.
pub struct DirectListener {
    pub listener: TcpListener,
    pub functions: Functions,
    pub keys: Arc<Keys>,
    /// Issues the permits for exchanges of a key. The gateway uses the same value, so that requests
    /// through the gateway count towards the same limit. The listener does not use the other task
    /// of this type, which is to resume paused sandboxes.
    pub exchanges: AutoResume,
    /// Limits connections, including the connections of the gateway.
    pub admission: Arc<ConnectionAdmission>,
    /// Configuration with the domains of functions.
    pub config: GatewayConfig,
    /// Limits direct connections per owner.
    pub connections: Arc<DirectConnections>,
}

/// Permits that a direct connection holds.
struct DirectUse {
    _connection: ConnectionPermit,
    _direct_connection: DirectConnectionPermit,
    owner: Option<String>,
    exchanges: AutoResume,
    /// Permit of the owner's key while a request is in flight. `None` also if a request arrives on
    /// an idle connection while the limit of the key is reached. The limit of the function still
    /// applies to such requests.
    exchange: Option<ExchangePermit>,
}

impl DirectPermit for DirectUse {
    /// Acquires or releases the permit of the owner's key when the connection becomes busy or idle.
    fn set_busy(&mut self, is_busy: bool) {
        self.exchange = match (is_busy, &self.owner) {
            (true, Some(owner)) => self.exchange.take().or(self.exchanges.exchange(owner).ok()),
            _ => None,
        };
    }
}

/// Binds to `address` and prints it.
pub async fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address).await.with_context(|| {
        format!("cannot listen on {address}: choose another address with --functions-listen")
    })?;
    println!("public functions at http://{}", listener.local_addr()?);
    Ok(listener)
}

/// Error for which a connection is not transferred.
enum DirectError {
    /// The client sent no host name or exceeded the timeout.
    Invalid(&'static str),
    /// Error of the function, which is returned in the format of the API.
    Function(FunctionError),
    /// The function is disabled.
    Disabled,
    /// The limit of in-flight requests of the owner's key is reached.
    Exchanges(String),
    /// The limit of connections per owner or in total is reached.
    Connections,
}

impl DirectListener {
    /// Serves connections until `stopping` is cancelled.
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
            // Connections above the limit are closed without a response.
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

    /// Handles one connection. Reads the host name of the first request without consuming it, finds
    /// the function, and acquires permits for a connection and a request of its owner. The socket
    /// is then handed over to the process of the owner. After a failure, the daemon itself sends an
    /// error response.
    async fn connection(&self, stream: TcpStream, permit: ConnectionPermit) {
        let result = match timeout(HOST_TIMEOUT, first_host(&stream)).await {
            Ok(Ok(Some(host))) => self.find(&host).map(|record| (host, record)),
            Ok(Ok(None)) => Err(DirectError::Invalid("the request has no host name")),
            // The client has disconnected.
            Ok(Err(_)) => return,
            Err(_) => Err(DirectError::Invalid("timed out reading the request")),
        };
        let (host, record) = match result {
            Ok(target) => target,
            Err(error) => return send_error(stream, error).await,
        };
        let owner = record.owner.as_deref();
        let Some(direct_connection) = self.connections.acquire(owner) else {
            return send_error(stream, DirectError::Connections).await;
        };
        // The first request is in flight, so the connection starts with a permit of the key. The
        // permit is released when the connection becomes idle.
        let exchange = owner.map(|owner| self.exchanges.exchange(owner));
        let exchange = match exchange.transpose() {
            Ok(exchange) => exchange,
            Err(message) => return send_error(stream, DirectError::Exchanges(message)).await,
        };
        // Deregisters the stream from the event loop.
        let Ok(stream) = stream.into_std().map(OwnedFd::from) else {
            return;
        };
        // The request reaches a function, so the connection no longer counts towards the limit of
        // connections of unknown clients.
        permit.mark_known();
        let permit: BoxConnectionPermit = Box::new(DirectUse {
            _connection: permit,
            _direct_connection: direct_connection,
            owner: record.owner.clone(),
            exchanges: self.exchanges.clone(),
            exchange,
        });
        let transfer = self.functions.hand_over(&record, &host, &stream, permit);
        if let Err(e) = transfer.await {
            let stream = TcpStream::from_std(stream.into());
            // The stream was not transferred, so it is still open in this process.
            if let Ok(stream) = stream {
                send_error(stream, DirectError::Function(e)).await;
            }
        }
    }

    /// Returns the public function with a host name.
    fn find(&self, host: &str) -> Result<Arc<FunctionRecord>, DirectError> {
        let unknown = || DirectError::Function(FunctionError::NotFound(host.to_owned()));
        let name = parse_host(host).ok_or_else(unknown)?;
        let HostTarget::Function(label) = classify(&name, &self.config) else {
            return Err(unknown());
        };
        let record = self
            .functions
            .find_label(&label)
            .map_err(DirectError::Function)?;
        // Functions of a terminated key are unreachable before they are removed.
        let is_terminated = self.keys.status(record.owner.as_deref()) == KeyStatus::Ended;
        if !record.public || is_terminated {
            return Err(DirectError::Function(FunctionError::NotFound(label)));
        }
        if record.enabled {
            Ok(record)
        } else {
            Err(DirectError::Disabled)
        }
    }
}

/// Waits for the host name of the first request of a connection without consuming data. Returns
/// `None` if the head has no host name within the size limit.
async fn first_host(stream: &TcpStream) -> std::io::Result<Option<String>> {
    let mut buffer = vec![0; 1024];
    let mut is_closed = false;
    loop {
        let length = stream.peek(&mut buffer).await?;
        let head = buffer.get(..length).unwrap_or_default();
        match host_in(head) {
            Some(host) => return Ok(host),
            None if length >= MAX_HOST_BYTES => return Ok(None),
            // The buffer is full, so more data may be available: peek again with a larger one.
            None if length == buffer.len() => {
                buffer.resize(MAX_HOST_BYTES, 0);
                continue;
            }
            None if length == 0 || is_closed => {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            None => {}
        }
        // Clears the readiness, so that the task is notified of further data.
        let _ = stream.try_io(Interest::READABLE, || {
            Err::<(), _>(std::io::ErrorKind::WouldBlock.into())
        });
        // The last data may arrive together with the end of the stream.
        is_closed = stream.ready(Interest::READABLE).await?.is_read_closed();
    }
}

/// Returns the host name in a possibly incomplete head. `None` if further data is needed, and
/// `Some(None)` if the head has no host name.
fn host_in(head: &[u8]) -> Option<Option<String>> {
    let mut lines = head.split_inclusive(|byte| *byte == b'\n');
    let _request_line = lines.next();
    for line in lines {
        let line = line.strip_suffix(b"\n")?;
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            // The head has ended.
            return Some(None);
        }
        // Lines shorter than `host:` are other headers.
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

/// Sends an error response to the first request of a connection, and closes the connection.
async fn send_error(mut stream: TcpStream, error: DirectError) {
    let response = serialize(error.into_response()).await;
    let send = async {
        stream.write_all(&response).await?;
        stream.shutdown().await?;
        // If unread data remained at the close, the client could receive a reset instead of the
        // response.
        let mut drained = 0;
        let mut buffer = [0; 4096];
        while drained < MAX_DRAINED_BYTES {
            match stream.read(&mut buffer).await? {
                0 => break,
                length => drained += length,
            }
        }
        Ok::<_, std::io::Error>(())
    };
    // Errors are ignored, because the client may have disconnected.
    let _ = timeout(ERROR_TIMEOUT, send).await;
}

/// Serialises a response as HTTP/1.1.
async fn serialize(response: Response) -> Vec<u8> {
    let (mut head, body) = response.into_parts();
    // The limit only bounds memory. A larger body would be omitted.
    let body = to_bytes(body, MAX_DRAINED_BYTES).await.unwrap_or_default();
    head.headers.insert(CONTENT_LENGTH, body.len().into());
    let close = HeaderValue::from_static("close");
    head.headers.insert(CONNECTION, close);
    let id = RequestId::new().value();
    head.headers.insert(X_REQUEST_ID.clone(), id);
    let mut bytes = format!("HTTP/1.1 {}\r\n", head.status).into_bytes();
    for (name, value) in &head.headers {
        bytes.extend_from_slice(name.as_str().as_bytes());
        bytes.extend_from_slice(b": ");
        bytes.extend_from_slice(value.as_bytes());
        bytes.extend_from_slice(b"\r\n");
    }
    bytes.extend_from_slice(b"\r\n");
    bytes.extend_from_slice(&body);
    bytes
}

impl IntoResponse for DirectError {
    fn into_response(self) -> Response {
        let (status, error_code, message) = match self {
            Self::Function(e) => return ApiError::from(e).into_response(),
            Self::Invalid(message) => (
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
                "too many direct connections are open: close connections or retry later".to_owned(),
            ),
        };
        let body = Json(serde_json::json!({
            "code": status.as_u16(), "message": message, "error_code": error_code,
        }));
        let mut response = (status, body).into_response();
        if status == StatusCode::TOO_MANY_REQUESTS {
            let one_second = HeaderValue::from_static("1");
            response.headers_mut().insert(RETRY_AFTER, one_second);
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
        // The line of the host ends with the five bytes `80 \r\n`.
        let end = head.iter().rposition(|b| *b == b'8').unwrap() + 5;
        for length in 0..head.len() {
            let expected = (length >= end).then(|| Some("a.fn.localhost:80".to_owned()));
            assert_eq!(host_in(&head[..length]), expected, "{length}");
        }
        assert_eq!(host_in(b"GET / HTTP/1.1\n\nhost: x\n"), Some(None));
        assert_eq!(host_in(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), Some(None));
    }

    #[tokio::test]
    async fn the_host_name_is_awaited_until_the_client_disconnects() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        for (parts, is_complete) in [
            (&["GET / HTTP/1.1\r\nho", "st: a", "\r\n"][..], true),
            (&["GET / HTTP/1.1\r\nhost: a"][..], false),
        ] {
            let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
            let (mut client, stream) = (client.unwrap(), accepted.unwrap().0);
            let client = async move {
                for part in parts {
                    client.write_all(part.as_bytes()).await.unwrap();
                    tokio::task::yield_now().await;
                }
                client.shutdown().await.unwrap();
                client
            };
            let (host, _client) = tokio::join!(first_host(&stream), client);
            assert_eq!(host.ok().flatten().is_some(), is_complete, "{parts:?}");
        }
    }

    #[tokio::test]
    async fn an_error_is_a_complete_response() {
        let response = DirectError::Disabled.into_response();
        let text = String::from_utf8(serialize(response).await).unwrap();
        assert!(text.starts_with("HTTP/1.1 503 "), "{text}");
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains("connection: close") && head.contains("x-request-id: "));
        assert!(body.contains("function_disabled"), "{text}");
    }
}
