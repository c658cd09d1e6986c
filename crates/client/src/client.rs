//! Client of the daemon's API: connections and requests.
//!
//! The command line and the MCP server use this client.

mod address;
mod api_error;
mod calls;
mod comparison_calls;
mod event_calls;
mod functions;
mod host_calls;
mod lease;
mod lineage_calls;
mod listed;
mod maintenance;
mod snapshot_calls;
mod stream;
mod timeout_calls;
mod volume_calls;

use crate::progress::while_waiting;
pub use address::ServerOptions;
use address::{ServerAddress, Url};
use anyhow::Context;
pub use api_error::{UnknownServer, VERSION, VERSION_HEADER, has_error_code};
use bytes::Bytes;
pub use calls::{NewSandbox, Sandbox, SandboxSettings};
pub use event_calls::SandboxChanges;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request};
use jiffy_agent_client::{AgentClient, ClientError, ConnectionPool, PooledResponse, RequestBody};
use jiffy_proto::agent::ENVD_PORT;
pub use lease::SandboxLease;
pub use lineage_calls::SandboxOrSnapshot;
pub use listed::Listed;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
pub use snapshot_calls::SnapshotAck;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::sync::mpsc::Sender;
use tokio::task::JoinHandle;

/// Maximum size of a response in bytes.
const MAX_RESPONSE_BYTES: usize = 64 << 20;
/// `Host` header of requests over the socket. The gateway always accepts this name.
const LOCAL_HOST_HEADER: &str = "localhost";

/// Header with the API key.
const KEY_HEADER: HeaderName = HeaderName::from_static("x-api-key");

/// Server that receives the requests of a client, with the headers of every request.
#[derive(Debug)]
pub struct Server {
    /// `None` for the daemon of this host.
    url: Option<Url>,
    name: String,
    headers: HeaderMap,
}

impl Server {
    fn local(name: String) -> Self {
        Self {
            url: None,
            name,
            headers: HeaderMap::from_iter([(
                header::HOST,
                HeaderValue::from_static(LOCAL_HOST_HEADER),
            )]),
        }
    }

    fn remote(address: ServerAddress) -> anyhow::Result<Self> {
        let host = HeaderValue::from_str(&address.url.authority)?;
        Ok(Self {
            name: address.url.to_string(),
            url: Some(address.url),
            headers: HeaderMap::from_iter([(header::HOST, host), (KEY_HEADER, address.key)]),
        })
    }

    /// Returns the URL of the server. `None` for the daemon of this host.
    fn url(&self) -> Option<&Url> {
        self.url.as_ref()
    }

    /// Returns the name of the server for messages.
    fn name(&self) -> &str {
        &self.name
    }

    /// Converts the error of a request without a response into a message that describes what to do.
    fn request_error(&self, error: ClientError) -> anyhow::Error {
        match (error, &self.url) {
            (ClientError::Connect(e), Some(url)) => {
                anyhow::Error::msg(stream::unreachable(url, &e))
            }
            (ClientError::Connect(_), None) => anyhow::Error::msg(format!(
                "lost the connection to {}; run `jiffy ls` to start a new daemon and to list its sandboxes",
                self.name
            )),
            (ClientError::Http(e), Some(url)) if e.is_parse() => anyhow::Error::msg(format!(
                "{url} does not respond with HTTP: check the address, and use https:// if the server uses TLS"
            )),
            // The request may have had an effect, so it is not repeated automatically.
            (e, _) => anyhow::Error::new(e).context(format!(
                "lost the connection to {} before it responded; run `jiffy ls` to check its sandboxes",
                self.name
            )),
        }
    }
}

/// Returns whether `options` or the environment specify a daemon on another host.
pub fn is_remote(options: &ServerOptions) -> anyhow::Result<bool> {
    Ok(ServerAddress::find(options)?.is_some())
}

/// Client of the API. Clones share its connections, as do the agents of its sandboxes.
#[derive(Clone)]
pub struct Client {
    connections: ConnectionPool,
    server: Arc<Server>,
    /// Host of a fleet to which reads are restricted.
    host: Option<String>,
    /// True if slow requests show their progress on standard error.
    shows_progress: bool,
}

/// Describes a request that may take long. `None` for fast requests and requests that show their
/// own progress.
fn activity(method: &Method, path: &str) -> Option<&'static str> {
    let path = path.split('?').next().unwrap_or_default();
    let words: Vec<&str> = path.split('/').filter(|w| !w.is_empty()).collect();
    match (method.as_str(), words.as_slice()) {
        ("POST", ["v2", "sandboxes"]) => Some("creating the sandbox"),
        ("POST", ["sandboxes", _, "snapshots"]) => Some("taking the snapshot"),
        ("POST", ["sandboxes", _, "pause"]) => Some("pausing the sandbox"),
        ("POST", ["sandboxes", _, "resume"]) => Some("resuming the sandbox"),
        ("POST", ["sandboxes", _, "fork"]) => Some("forking the sandbox"),
        ("POST", ["sandboxes", _, "rollback"]) => Some("rolling back the sandbox"),
        ("POST", ["sandboxes", _, "restart"]) => Some("restarting the sandbox"),
        ("POST", ["sandboxes", _, "promote"]) => Some("removing the sandbox's siblings"),
        ("POST" | "GET", ["snapshots", _, "verify"]) => Some("verifying the snapshot"),
        ("GET", ["compare"]) => Some("comparing files"),
        ("DELETE", ["sandboxes", _]) => Some("removing the sandbox"),
        // Snapshots are removed by the route of templates, as in E2B's API.
        ("DELETE", ["templates", _]) => Some("removing the snapshot"),
        _ => None,
    }
}

impl Client {
    /// Connects to a daemon on another host if `options` or the environment specify one.
    pub async fn remote(options: &ServerOptions) -> anyhow::Result<Option<Self>> {
        let Some(address) = ServerAddress::find(options)? else {
            return Ok(None);
        };
        let connections = stream::remote(&address).await?;
        let server = Arc::new(Server::remote(address)?);
        Ok(Some(Self {
            connections,
            server,
            host: None,
            shows_progress: true,
        }))
    }

    /// Creates a client of the daemon at `socket`. Messages call the daemon `name`. `stream` is an
    /// open connection to the socket.
    pub async fn local(socket: PathBuf, name: String, stream: UnixStream) -> anyhow::Result<Self> {
        Ok(Self {
            connections: stream::local(socket, stream).await?,
            server: Arc::new(Server::local(name)),
            host: None,
            shows_progress: true,
        })
    }

    /// Creates a client of a daemon that `connections` reach, with an API key. Messages call the
    /// daemon `name`.
    pub fn over(connections: ConnectionPool, name: String, key: &str) -> anyhow::Result<Self> {
        let mut key = HeaderValue::from_str(key).context("the API key has invalid characters")?;
        key.set_sensitive(true);
        let mut server = Server::local(name);
        server.headers.insert(KEY_HEADER, key);
        Ok(Self {
            connections,
            server: Arc::new(server),
            host: None,
            shows_progress: false,
        })
    }

    /// Restricts reads to a host of the fleet, if one is given. It must be a valid name of a host.
    #[must_use]
    pub fn on_host(self, host: Option<impl ToString>) -> Self {
        let host = host.map(|host| host.to_string());
        Self { host, ..self }
    }

    /// Shows no progress of slow requests: the caller draws on the terminal itself.
    #[must_use]
    pub fn without_progress(self) -> Self {
        Self {
            shows_progress: false,
            ..self
        }
    }

    /// Returns the URL of a daemon on another host, or a description of the daemon of this host.
    pub fn server_name(&self) -> &str {
        self.server.name()
    }

    /// Returns whether the daemon is on another host.
    pub fn is_remote(&self) -> bool {
        self.server.url.is_some()
    }

    /// Sends a request and returns the parsed body of the response. Errors describe what to do.
    pub async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> anyhow::Result<T> {
        let (_, response) = self.call_with_headers(method, path, body).await?;
        Ok(response)
    }

    /// Sends a request and returns the headers and the parsed body of the response.
    async fn call_with_headers<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> anyhow::Result<(HeaderMap, T)> {
        let activity = activity(&method, path).filter(|_| self.shows_progress);
        // Includes reading the body, which may also take long.
        let request = async { self.parse(self.send(method, path, body).await?).await };
        match activity {
            Some(description) => while_waiting(description, request).await,
            None => request.await,
        }
    }

    /// Returns the headers and the parsed body of a response. Fails if the response is an error, or
    /// if the server is not a compatible daemon.
    async fn parse<T: DeserializeOwned>(
        &self,
        response: PooledResponse,
    ) -> anyhow::Result<(HeaderMap, T)> {
        let server = &self.server;
        // Clone the headers, because reading the body consumes the response.
        let (status, headers) = (response.status, response.headers.clone());
        let body = response
            .collect(MAX_RESPONSE_BYTES)
            .await
            .map_err(|e| server.request_error(e))?;
        // Check the version first: the body of another server must not be interpreted.
        let Some(version) = api_error::version(&headers) else {
            return Err(api_error::unknown_server(server, status, &body));
        };
        if !status.is_success() {
            return Err(api_error::api_error(server, version, status, &body));
        }
        // Responses without content are parsed as `()`.
        let text = if body.is_empty() { b"null" } else { &body[..] };
        match serde_json::from_slice(text) {
            Ok(value) => Ok((headers, value)),
            // A daemon of another version may have changed the type of the response.
            Err(_) => Err(api_error::incompatible(
                server,
                version,
                "its response cannot be parsed",
            )),
        }
    }

    /// Sends a request with `body` as JSON. A body of `null` is omitted.
    async fn send(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> anyhow::Result<PooledResponse> {
        let body = Bytes::from(serde_json::to_vec(body)?);
        let path = match &self.host {
            Some(host) if method == Method::GET => {
                let separator = if path.contains('?') { '&' } else { '?' };
                format!("{path}{separator}host={host}")
            }
            _ => path.to_owned(),
        };
        let mut request = Request::builder().method(method).uri(path);
        let headers = request.headers_mut().context("invalid path")?;
        headers.clone_from(&self.server.headers);
        // Requests without parameters have no body.
        let body = if &body[..] == b"null" {
            RequestBody::Whole(None)
        } else {
            let json = HeaderValue::from_static("application/json");
            headers.insert(header::CONTENT_TYPE, json);
            RequestBody::whole(body)
        };
        let response = self.connections.send(request.body(body)?).await;
        response.map_err(|e| self.server.request_error(e))
    }

    /// Uploads the chunks from the returned channel to `path`. The returned task has the result.
    pub fn upload<T: DeserializeOwned + Send + 'static>(
        &self,
        path: &str,
    ) -> anyhow::Result<(Sender<Bytes>, JoinHandle<anyhow::Result<T>>)> {
        let (chunks, body) = RequestBody::channel();
        let mut request = Request::builder().method(Method::PUT).uri(path);
        let headers = request.headers_mut().context("invalid path")?;
        headers.clone_from(&self.server.headers);
        // The task sends the chunks while the caller produces them.
        let (client, request) = (self.clone(), request.body(body)?);
        let task = tokio::spawn(async move {
            let response = client
                .connections
                .send(request)
                .await
                .map_err(|e| client.server.request_error(e))?;
            client.parse(response).await.map(|(_, value)| value)
        });
        Ok((chunks, task))
    }

    /// Returns the response to a GET, whose body the caller reads in parts.
    pub async fn download(&self, path: &str) -> anyhow::Result<PooledResponse> {
        let response = self.send(Method::GET, path, &()).await?;
        if response.status.is_success() {
            return Ok(response);
        }
        match self.parse::<Value>(response).await {
            Err(e) => Err(e),
            // `parse` fails for an unsuccessful status, so this case does not occur.
            Ok(_) => anyhow::bail!("{} did not send the content", self.server.name),
        }
    }

    /// Sends a request to a server in a sandbox through the gateway.
    pub async fn request_port(
        &self,
        sandbox: &Sandbox,
        port: u16,
        method: Method,
        path: &str,
        body: Option<Bytes>,
    ) -> anyhow::Result<PooledResponse> {
        let mut request = Request::builder().method(method).uri(path);
        let headers = request.headers_mut().context("invalid path")?;
        headers.extend(self.port_headers(sandbox, port.into())?);
        let json = HeaderValue::from_static("application/json");
        headers.insert(header::CONTENT_TYPE, json);
        let response = self
            .connections
            .send(request.body(RequestBody::Whole(body))?)
            .await;
        response.map_err(|e| self.server.request_error(e))
    }

    /// Opens a stream to a TCP port of a sandbox.
    pub async fn stream(
        &self,
        id: &str,
        port: u16,
    ) -> anyhow::Result<impl AsyncRead + AsyncWrite + Send + Unpin + use<>> {
        let path = format!("/sandboxes/{id}/ports/{port}");
        self.upgrade(Method::GET, &path, "tcp").await
    }

    /// Waits for a connection of a program in the build at `path` to the SSH agent `name`. Returns
    /// the connection, in which the caller is the agent.
    pub async fn build_ssh(
        &self,
        path: &str,
        name: &str,
    ) -> anyhow::Result<impl AsyncRead + AsyncWrite + Send + Unpin + use<>> {
        let path = format!("{path}/ssh/{name}");
        self.upgrade(Method::GET, &path, "ssh-agent").await
    }

    /// Requests a lease: the sandbox is removed when the lease is dropped or this process exits.
    pub async fn lease(&self, id: &str) -> anyhow::Result<SandboxLease> {
        let path = format!("/sandboxes/{id}/lease");
        let stream = self.upgrade(Method::POST, &path, "lease").await?;
        Ok(SandboxLease::start(stream))
    }

    /// Sends a request that is answered with a stream of `protocol`.
    async fn upgrade(
        &self,
        method: Method,
        path: &str,
        protocol: &'static str,
    ) -> anyhow::Result<impl AsyncRead + AsyncWrite + Send + Unpin + use<>> {
        let mut request = Request::builder().method(method).uri(path);
        let headers = request.headers_mut().context("invalid path")?;
        headers.clone_from(&self.server.headers);
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static(protocol));
        let request = request.body(RequestBody::Whole(None))?;
        let response = self
            .connections
            .send(request)
            .await
            .map_err(|e| self.server.request_error(e))?;
        match response
            // Without status 101, the response has an error in its body.
            .into_upgraded()
            .await
            .map_err(|e| self.server.request_error(e))?
        {
            Ok(stream) => Ok(stream),
            Err(response) => match self.parse::<Value>(*response).await {
                Err(e) => Err(e),
                // A success without an upgrade violates the API.
                Ok(_) => anyhow::bail!("{} did not open a stream", self.server.name),
            },
        }
    }

    /// Returns the headers with which the gateway routes a request to a port of a sandbox.
    fn port_headers(&self, sandbox: &Sandbox, port: u32) -> anyhow::Result<HeaderMap> {
        let mut headers = HeaderMap::new();
        // The gateway checks the host name of every request.
        if let Some(host) = self.server.headers.get(header::HOST) {
            headers.insert(header::HOST, host.clone());
        }
        headers.insert("e2b-sandbox-id", HeaderValue::from_str(&sandbox.record.id)?);
        headers.insert("e2b-sandbox-port", HeaderValue::from(port));
        Ok(headers)
    }

    /// Returns a client of the agent of a sandbox, which is connected through the gateway.
    pub fn agent(&self, sandbox: &Sandbox) -> anyhow::Result<AgentClient> {
        let headers = self.port_headers(sandbox, ENVD_PORT)?;
        let agent = AgentClient::over(self.connections.clone(), headers);
        Ok(match &sandbox.token {
            Some(token) => agent.with_token(token),
            None => agent,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_slow_requests_have_a_description() {
        let of = |method: Method, path| activity(&method, path);
        assert_eq!(
            of(Method::POST, "/sandboxes/abc/fork"),
            Some("forking the sandbox")
        );
        assert_eq!(
            of(Method::DELETE, "/sandboxes/abc?record=true"),
            Some("removing the sandbox")
        );
        assert_eq!(of(Method::GET, "/v2/sandboxes?state=running"), None);
        assert_eq!(of(Method::POST, "/v3/templates"), None);
    }
}
