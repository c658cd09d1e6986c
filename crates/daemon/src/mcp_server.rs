//! `/mcp`: the MCP server on the listeners of the API.
//!
//! Tools call the API like any other client: over connections inside this process, with the key and
//! the address of the caller. Scopes, limits and audit therefore apply to each call.

use axum::Router;
use axum::body::Body;
use axum::extract::{Extension, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use jiffy_agent_client::ConnectionPool;
use jiffy_api::{App, Caller, ClientAddress, MCP_PATH, authenticated, key_of_request};
use jiffy_client::Client;
use jiffy_gateway::{ForwardedConnection, HostStream, Peer};
use jiffy_mcp::{ApiClients, HttpCaller, HttpServer, LastAddress, PrepareFuture, Templates};
use std::io;
use std::sync::Arc;
use tokio::io::duplex;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Size of the buffer of a connection in each direction, in bytes.
const BUFFER: usize = 64 * 1024;
/// Maximum number of connections that the gateway has not taken yet.
const MAX_WAITING: usize = 256;

/// Connections of tools, which the gateway serves.
pub type McpConnections = mpsc::Receiver<ForwardedConnection>;

/// Clients of the API inside this process.
struct InProcessClients(mpsc::Sender<ForwardedConnection>);

impl ApiClients for InProcessClients {
    fn client(&self, secret: &str, address: LastAddress) -> anyhow::Result<Client> {
        let connections = self.0.clone();
        let connect = move || {
            let (connections, ip) = (connections.clone(), *address.lock());
            async move {
                let (stream, of_gateway) = duplex(BUFFER);
                let stream_of_gateway: HostStream = Box::new(of_gateway);
                let connection = ForwardedConnection {
                    stream: stream_of_gateway,
                    peer: Peer {
                        ip,
                        tls: false,
                        local: false,
                    },
                    // With this flag, the gateway also forwards requests to sandboxes of other
                    // hosts of the fleet. Its name refers to fronts, the processes that pass
                    // connections of clients to the hosts.
                    is_from_front: true,
                };
                let sent = connections.send(connection).await;
                sent.map_err(|_| io::Error::other("the daemon is stopping"))?;
                Ok(stream)
            }
        };
        Client::over(
            ConnectionPool::new(connect),
            "the daemon".to_owned(),
            secret,
        )
    }
}

/// Templates for clients over HTTP, which build no stock templates of this host.
struct ExistingTemplates;

impl Templates for ExistingTemplates {
    fn prepare(&self, template: String) -> PrepareFuture {
        // The API reports a template that does not exist.
        Box::pin(std::future::ready(Ok(template)))
    }
}

/// Returns the routes of the server, and the connections of its tools. Sessions end when `stopping`
/// is cancelled.
pub fn routes(app: &App, stopping: CancellationToken) -> (Router, McpConnections) {
    let (sender, connections) = mpsc::channel(MAX_WAITING);
    let clients = InProcessClients(sender);
    let server = HttpServer::new(clients, Arc::new(ExistingTemplates), stopping);
    let router = Router::new()
        .route(MCP_PATH, any(answer))
        .with_state(Arc::new(server));
    (authenticated(app, router), connections)
}

/// Answers a request of an MCP client with an API key.
async fn answer(
    State(server): State<Arc<HttpServer>>,
    Extension(caller): Extension<Caller>,
    address: Option<Extension<ClientAddress>>,
    request: Request,
) -> Response {
    let (Caller::Key(_), Some(Extension(ClientAddress(address)))) = (&caller, address) else {
        return refuse("the owner's socket has no MCP server: run `jiffy mcp`");
    };
    // The header was checked by `authenticated`.
    let Some(secret) = key_of_request(request.headers()).map(str::to_owned) else {
        return refuse("the request has no API key");
    };
    let caller = HttpCaller {
        secret: &secret,
        address,
        is_read_only: caller.is_read_only(),
    };
    server.answer(caller, request).await.map(Body::new)
}

fn refuse(message: &str) -> Response {
    let body = serde_json::json!({
        "code": 403, "message": message, "error_code": "forbidden",
    });
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (StatusCode::FORBIDDEN, kind, body.to_string()).into_response()
}
