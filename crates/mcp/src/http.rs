//! MCP server over the transport "streamable HTTP", for a listener that has authenticated the
//! caller.
//!
//! A request with `initialize` starts a session, whose id the following requests name. All other
//! requests belong to no session: newer versions of the protocol have none, and simple clients call
//! a tool with one request. Sessions belong to the key that started them.

use crate::images::Templates;
use crate::options::McpOptions;
use crate::server::Server;
use crate::session::Session;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Body, Bytes};
use hyper::{Method, Request, Response, StatusCode, header};
use jiffy_client::Client;
use parking_lot::Mutex;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::session::never::NeverSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use serde::Deserialize;
use serde_json::json;
use std::collections::HashMap;
use std::convert::Infallible;
use std::error::Error;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Maximum size of a message in bytes.
const MAX_MESSAGE_BYTES: usize = 4 << 20;
/// Header with the id of a session.
const SESSION_HEADER: &str = "mcp-session-id";
/// Maximum number of sessions of a key.
const MAX_SESSIONS: usize = 64;
/// Maximum number of keys whose state is in memory.
const MAX_KEYS: usize = 1024;
/// Time without a request after which a session ends, and the state of a key is discarded.
const IDLE_TIMEOUT: Duration = Duration::from_secs(3600);

/// Response with the body type of the MCP library.
pub type HttpResponse = Response<BoxBody<Bytes, Infallible>>;

/// Caller of a request.
#[derive(Debug, Clone, Copy)]
pub struct HttpCaller<'a> {
    /// Secret of the key, with which tools call the API.
    pub secret: &'a str,
    /// Address of the client.
    pub address: IpAddr,
    /// Offer only tools that change nothing.
    pub is_read_only: bool,
}

/// Address of the last request with a key.
pub type LastAddress = Arc<Mutex<IpAddr>>;

/// Creates the client of the API with which tools act for the holder of a key.
pub trait ApiClients: Send + Sync {
    /// Returns a client that sends the key with this secret. Its requests come from `address`.
    fn client(&self, secret: &str, address: LastAddress) -> anyhow::Result<Client>;
}

/// Server of all callers.
pub struct HttpServer {
    clients: Box<dyn ApiClients>,
    templates: Arc<dyn Templates>,
    stopping: CancellationToken,
    /// Time without a request after which the state of a key is discarded.
    idle: Duration,
    /// State of each key, by its secret.
    keys: Mutex<HashMap<Box<str>, Arc<KeyState>>>,
}

/// Servers of a key.
struct KeyState {
    sessions: StreamableHttpService<Server, LocalSessionManager>,
    manager: Arc<LocalSessionManager>,
    without_session: StreamableHttpService<Server, NeverSessionManager>,
    last_use: Mutex<Instant>,
    address: LastAddress,
}

/// Member of a message that selects its service.
#[derive(Deserialize)]
struct MessageMethod {
    #[serde(default)]
    method: Option<String>,
}

impl HttpServer {
    /// Creates a server. Its sessions end when `stopping` is cancelled.
    pub fn new(
        clients: impl ApiClients + 'static,
        templates: Arc<dyn Templates>,
        stopping: CancellationToken,
    ) -> Self {
        Self {
            clients: Box::new(clients),
            templates,
            stopping,
            idle: IDLE_TIMEOUT,
            keys: Mutex::default(),
        }
    }

    /// Answers a request of a caller whose key is in force.
    pub async fn answer<B>(&self, caller: HttpCaller<'_>, request: Request<B>) -> HttpResponse
    where
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let state = match self.state(caller) {
            Ok(state) => state,
            Err(response) => return *response,
        };
        let is_of_session = request.headers().contains_key(SESSION_HEADER);
        let (parts, body) = request.into_parts();
        let body = match Limited::new(body, MAX_MESSAGE_BYTES).collect().await {
            Ok(body) => body.to_bytes(),
            Err(e) if e.is::<LengthLimitError>() => {
                let message = format!("a message has at most {MAX_MESSAGE_BYTES} bytes");
                return refuse(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", &message);
            }
            Err(e) => {
                let message = format!("the request was not received completely: {e}");
                return refuse(StatusCode::BAD_REQUEST, "invalid_request", &message);
            }
        };
        let is_start = || {
            let message = serde_json::from_slice::<MessageMethod>(&body);
            message.is_ok_and(|message| message.method.as_deref() == Some("initialize"))
        };
        let is_message = parts.method == Method::POST;
        // A message outside a session is answered alone. Only `initialize` starts a session.
        if is_message && !is_of_session && !is_start() {
            let request = Request::from_parts(parts, Full::new(body));
            return state.without_session.handle(request).await;
        }
        if is_message && !is_of_session && state.manager.sessions.read().await.len() >= MAX_SESSIONS
        {
            let message = format!(
                "this key has {MAX_SESSIONS} open sessions: end one with DELETE, or wait until an \
                 unused one expires after an hour"
            );
            return refuse(StatusCode::TOO_MANY_REQUESTS, "limit", &message);
        }
        let request = Request::from_parts(parts, Full::new(body));
        state.sessions.handle(request).await
    }

    /// Returns the state of a key, and discards states that were not used for a long time.
    fn state(&self, caller: HttpCaller<'_>) -> Result<Arc<KeyState>, Box<HttpResponse>> {
        let mut keys = self.keys.lock();
        if let Some(state) = keys.get(caller.secret) {
            *state.last_use.lock() = Instant::now();
            *state.address.lock() = caller.address;
            return Ok(Arc::clone(state));
        }
        keys.retain(|_, state| !state.is_unused(self.idle));
        if keys.len() >= MAX_KEYS {
            let message = "too many keys use MCP at this time: retry later";
            return Err(Box::new(refuse(
                StatusCode::SERVICE_UNAVAILABLE,
                "host_busy",
                message,
            )));
        }
        let state = self.new_state(caller).map_err(|e| {
            let status = StatusCode::INTERNAL_SERVER_ERROR;
            Box::new(refuse(status, "internal", &format!("{e:#}")))
        })?;
        let state = Arc::new(state);
        keys.insert(caller.secret.into(), Arc::clone(&state));
        Ok(state)
    }

    /// Creates the state of a key: its client, and the service for calls without a session.
    fn new_state(&self, caller: HttpCaller<'_>) -> anyhow::Result<KeyState> {
        let address = Arc::new(Mutex::new(caller.address));
        let client = self.clients.client(caller.secret, Arc::clone(&address))?;
        let options = McpOptions {
            read_only: caller.is_read_only,
            ..McpOptions::default()
        };
        let config = || {
            StreamableHttpServerConfig::default()
                // The listener has checked the name of the host.
                .disable_allowed_hosts()
                // Pages of browsers must not use the keys of agents.
                .enforce_origin_validation()
                .with_max_request_body_bytes(MAX_MESSAGE_BYTES)
                .with_cancellation_token(self.stopping.child_token())
        };
        let shared_options = McpOptions {
            without_session: true,
            ..options.clone()
        };
        let shared = Session::new(client.clone(), shared_options, Arc::clone(&self.templates))?;
        let shared = Server::new(Arc::new(shared));
        let without_session = StreamableHttpService::new(
            move || Ok(shared.clone()),
            Arc::new(NeverSessionManager::default()),
            config()
                .with_legacy_session_mode(false)
                .with_json_response(true),
        );
        let mut manager = LocalSessionManager::default();
        manager.session_config.keep_alive = Some(IDLE_TIMEOUT);
        let manager = Arc::new(manager);
        let templates = Arc::clone(&self.templates);
        let start = move || {
            let session = Session::new(client.clone(), options.clone(), Arc::clone(&templates));
            let session = session.map_err(std::io::Error::other)?;
            Ok(Server::new(Arc::new(session)).ending_session())
        };
        Ok(KeyState {
            sessions: StreamableHttpService::new(start, Arc::clone(&manager), config()),
            manager,
            without_session,
            last_use: Mutex::new(Instant::now()),
            address,
        })
    }
}

impl KeyState {
    /// Returns whether the state may be discarded. A state in use has further owners.
    fn is_unused(self: &Arc<Self>, idle: Duration) -> bool {
        let has_sessions = || match self.manager.sessions.try_read() {
            Ok(sessions) => !sessions.is_empty(),
            Err(_) => true,
        };
        Arc::strong_count(self) == 1 && self.last_use.lock().elapsed() > idle && !has_sessions()
    }
}

/// Returns an error in the shape of the API's errors.
fn refuse(status: StatusCode, error_code: &str, message: &str) -> HttpResponse {
    let body = json!({ "code": status.as_u16(), "message": message, "error_code": error_code });
    let mut response = Response::new(Full::from(body.to_string()).boxed());
    *response.status_mut() = status;
    let kind = header::HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::PrepareFuture;
    use crate::tools;
    use jiffy_agent_client::ConnectionPool;
    use std::io;
    use std::net::Ipv4Addr;
    use tokio::io::DuplexStream;

    /// Clients of an API that cannot be reached.
    struct NoApi;

    impl ApiClients for NoApi {
        fn client(&self, secret: &str, _: LastAddress) -> anyhow::Result<Client> {
            let fail = || async { Err::<DuplexStream, _>(io::Error::other("no API")) };
            Client::over(ConnectionPool::new(fail), "the daemon".to_owned(), secret)
        }
    }

    struct NoTemplates;

    impl Templates for NoTemplates {
        fn prepare(&self, template: String) -> PrepareFuture {
            Box::pin(std::future::ready(Ok(template)))
        }
    }

    fn server() -> HttpServer {
        HttpServer::new(NoApi, Arc::new(NoTemplates), CancellationToken::new())
    }

    async fn post(server: &HttpServer, secret: &str, body: Vec<u8>) -> (StatusCode, Bytes) {
        let request = Request::post("/mcp")
            .header(header::HOST, "localhost")
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json, text/event-stream")
            .body(Full::new(Bytes::from(body)))
            .unwrap();
        let caller = HttpCaller {
            secret,
            address: Ipv4Addr::LOCALHOST.into(),
            is_read_only: false,
        };
        let response = server.answer(caller, request).await;
        let status = response.status();
        (
            status,
            response.into_body().collect().await.unwrap().to_bytes(),
        )
    }

    /// Returns calls of all tools, with arguments of the types that their schemas name.
    fn messages() -> Vec<String> {
        let call = |tool: &crate::catalog::ToolEntry| {
            let properties = tool.tool.input_schema.get("properties");
            let properties = properties.and_then(serde_json::Value::as_object);
            let arguments = properties.into_iter().flatten().map(|(name, schema)| {
                let value = match schema["type"].as_str() {
                    Some("boolean") => json!(false),
                    Some("integer" | "number") => json!(1),
                    Some("object") => json!({ "a": "b" }),
                    _ => json!("x"),
                };
                (name.clone(), value)
            });
            let arguments: serde_json::Map<_, _> = arguments.collect();
            let parameters = json!({ "name": tool.tool.name, "arguments": arguments });
            json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": parameters })
        };
        let mut all: Vec<_> = tools::all().iter().map(call).collect();
        for method in [
            "tools/list",
            "resources/list",
            "resources/templates/list",
            "ping",
        ] {
            all.push(json!({ "jsonrpc": "2.0", "id": "a", "method": method, "params": {} }));
        }
        for uri in ["jiffy://templates", "jiffy://sandbox/a/files/b"] {
            let parameters = json!({ "uri": uri });
            all.push(json!({
                "jsonrpc": "2.0", "id": 2, "method": "resources/read", "params": parameters
            }));
        }
        all.into_iter().map(|message| message.to_string()).collect()
    }

    #[tokio::test]
    async fn every_message_is_answered_also_after_random_changes() {
        let server = server();
        let messages = messages();
        for message in &messages {
            let (status, body) = post(&server, "a", message.clone().into_bytes()).await;
            assert_eq!(status, StatusCode::OK, "{message}: {body:?}");
            assert!(serde_json::from_slice::<serde_json::Value>(&body).is_ok());
        }
        // A fixed sequence of pseudo-random numbers (xorshift).
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = |limit: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            usize::try_from(state % u64::try_from(limit).unwrap()).unwrap()
        };
        let parts: [&[u8]; 8] = [
            b"{",
            b"]",
            b"null",
            b"-1",
            b"1e999",
            b"\"",
            b"\xff",
            b"[[[[[[[[",
        ];
        for _ in 0..2000 {
            let mut body = messages[next(messages.len())].clone().into_bytes();
            for _ in 0..=next(3) {
                let at = next(body.len());
                let end = (at + next(8)).min(body.len());
                let part = parts[next(parts.len())];
                body.splice(at..end, part.iter().copied());
            }
            let text = String::from_utf8_lossy(&body).into_owned();
            let (status, _) = post(&server, "a", body).await;
            assert!(status.as_u16() < 500, "{status}: {text}");
        }
    }

    #[tokio::test]
    async fn states_of_keys_are_bounded_and_separate() {
        let mut server = server();
        let message = r#"{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{}}"#;
        for number in 0..MAX_KEYS {
            let caller = HttpCaller {
                secret: &number.to_string(),
                address: Ipv4Addr::LOCALHOST.into(),
                is_read_only: false,
            };
            assert!(server.state(caller).is_ok());
        }
        let (status, _) = post(&server, "one more", message.into()).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        let (status, _) = post(&server, "7", message.into()).await;
        assert_eq!(status, StatusCode::OK);
        // States that were not used for a long time make room.
        server.idle = Duration::ZERO;
        let (status, _) = post(&server, "one more", message.into()).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(server.keys.lock().len(), 1);
    }
}
