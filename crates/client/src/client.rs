//! Client of a control plane: its connections and its calls.

mod address;
mod calls;
mod functions;
mod lease;
mod listed;
mod maintenance;
mod refusal;
mod snapshot_calls;
mod stream;

use crate::progress::while_waiting;
pub use address::ServerOptions;
use address::{ServerAddress, Url};
use anyhow::Context;
use bytes::Bytes;
pub use calls::{NewSandbox, Sandbox, SandboxSettings};
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Method, Request};
use jiffy_agent_client::{AgentClient, ClientError, ConnectionPool, PooledResponse, RequestBody};
use jiffy_proto::agent::ENVD_PORT;
pub use lease::SandboxLease;
pub use listed::Listed;
pub use refusal::{UnknownServer, VERSION, VERSION_HEADER, is_refusal};
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

/// Longest answer in bytes.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// `Host` header of requests over the socket: one of the few that the gateway always accepts.
const LOCAL_HOST_HEADER: &str = "localhost";

/// Control plane that is asked.
#[derive(Debug)]
pub struct Server {
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
        let key = header::HeaderName::from_static("x-api-key");
        Ok(Self {
            name: address.url.to_string(),
            url: Some(address.url),
            headers: HeaderMap::from_iter([(header::HOST, host), (key, address.key)]),
        })
    }

    /// Its address; none: on this host.
    fn url(&self) -> Option<&Url> {
        self.url.as_ref()
    }

    /// As sentences name it.
    fn name(&self) -> &str {
        &self.name
    }

    /// Message when no answer came.
    fn no_answer(&self, error: ClientError) -> anyhow::Error {
        match (error, &self.url) {
            (ClientError::Connect(e), Some(url)) => {
                anyhow::Error::msg(stream::unreachable(url, &e))
            }
            (ClientError::Connect(_), None) => anyhow::Error::msg(format!(
                "{} went away; `jiffy ls` starts another and says what became of its sandboxes",
                self.name
            )),
            (ClientError::Http(e), Some(url)) if e.is_parse() => anyhow::Error::msg(format!(
                "{url} does not speak HTTP: is it right, and should it begin with https://?"
            )),
            (e, _) => anyhow::Error::new(e).context(format!(
                "{} went away before it answered; `jiffy ls` says what became of its sandboxes",
                self.name
            )),
        }
    }
}

/// True if `options` or the environment name another host's control plane.
pub fn is_remote(options: &ServerOptions) -> anyhow::Result<bool> {
    Ok(ServerAddress::find(options)?.is_some())
}

/// A client of a control plane. Clones share its connections, and so do the agents of its
/// sandboxes.
#[derive(Clone)]
pub struct Client {
    connections: ConnectionPool,
    server: Arc<Server>,
}

/// Words for what a call has done, if that may take long and nothing else shows it.
fn activity(method: &Method, path: &str) -> Option<&'static str> {
    let path = path.split('?').next().unwrap_or_default();
    let words: Vec<&str> = path.split('/').filter(|w| !w.is_empty()).collect();
    match (method.as_str(), words.as_slice()) {
        ("POST", ["v2", "sandboxes"]) => Some("making the sandbox"),
        ("POST", ["sandboxes", _, "snapshots"]) => Some("taking the snapshot"),
        ("POST", ["sandboxes", _, "pause"]) => Some("pausing the sandbox"),
        ("POST", ["sandboxes", _, "resume"]) => Some("waking the sandbox"),
        ("POST", ["sandboxes", _, "fork"]) => Some("forking the sandbox"),
        ("POST", ["sandboxes", _, "rollback"]) => Some("rolling the sandbox back"),
        ("POST", ["sandboxes", _, "restart"]) => Some("restarting the sandbox"),
        ("POST", ["sandboxes", _, "promote"]) => Some("removing the sandbox's siblings"),
        ("POST" | "GET", ["snapshots", _, "verify"]) => {
            Some("comparing the snapshot with its seal")
        }
        ("DELETE", ["sandboxes", _]) => Some("removing the sandbox"),
        ("DELETE", ["templates", _]) => Some("removing the snapshot"),
        _ => None,
    }
}

impl Client {
    /// Connects to the control plane of another host, if `options` or the environment name one.
    pub async fn remote(options: &ServerOptions) -> anyhow::Result<Option<Self>> {
        let Some(address) = ServerAddress::find(options)? else {
            return Ok(None);
        };
        let connections = stream::remote(&address).await?;
        let server = Arc::new(Server::remote(address)?);
        Ok(Some(Self {
            connections,
            server,
        }))
    }

    /// Client of the daemon behind `socket`, which messages call `name`. `stream` is a first
    /// connection to it.
    pub async fn local(socket: PathBuf, name: String, stream: UnixStream) -> anyhow::Result<Self> {
        Ok(Self {
            connections: stream::local(socket, stream).await?,
            server: Arc::new(Server::local(name)),
        })
    }

    /// True if it is the daemon of another host.
    pub fn is_remote(&self) -> bool {
        self.server.url.is_some()
    }

    /// Calls it; errors are sentences that say what to do.
    pub async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> anyhow::Result<T> {
        let (_, answer) = self.call_with_headers(method, path, body).await?;
        Ok(answer)
    }

    /// The same, with the head of the answer.
    async fn call_with_headers<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> anyhow::Result<(HeaderMap, T)> {
        let activity = activity(&method, path);
        let asked = async { self.parse(self.send(method, path, body).await?).await };
        match activity {
            Some(what) => while_waiting(what, asked).await,
            None => asked.await,
        }
    }

    /// Parsed body of an answer.
    async fn parse<T: DeserializeOwned>(
        &self,
        answer: PooledResponse,
    ) -> anyhow::Result<(HeaderMap, T)> {
        let server = &self.server;
        let (status, headers) = (answer.status, answer.headers.clone());
        let body = answer.collect(MAX_ANSWER_BYTES).await;
        let body = body.map_err(|e| server.no_answer(e))?;
        let Some(version) = refusal::version(&headers) else {
            return Err(refusal::unknown_server(server, status, &body));
        };
        if !status.is_success() {
            return Err(refusal::refusal(server, version, status, &body));
        }
        let text = if body.is_empty() { b"null" } else { &body[..] };
        match serde_json::from_slice(text) {
            Ok(answer) => Ok((headers, answer)),
            Err(_) => Err(refusal::incompatible(
                server,
                version,
                "its answer is not understood",
            )),
        }
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> anyhow::Result<PooledResponse> {
        let body = Bytes::from(serde_json::to_vec(body)?);
        let mut request = Request::builder().method(method).uri(path);
        let headers = request.headers_mut().context("not a path")?;
        headers.clone_from(&self.server.headers);
        // A call that takes nothing wants no body either.
        let body = if &body[..] == b"null" {
            RequestBody::Whole(None)
        } else {
            let json = HeaderValue::from_static("application/json");
            headers.insert(header::CONTENT_TYPE, json);
            RequestBody::whole(body)
        };
        let answer = self.connections.send(request.body(body)?).await;
        answer.map_err(|e| self.server.no_answer(e))
    }

    /// Sends to `path` what comes through the channel; how that ended is known when the task is.
    pub fn upload(
        &self,
        path: &str,
    ) -> anyhow::Result<(Sender<Bytes>, JoinHandle<anyhow::Result<()>>)> {
        let (pieces, body) = RequestBody::channel();
        let mut request = Request::builder().method(Method::PUT).uri(path);
        let headers = request.headers_mut().context("not a path")?;
        headers.clone_from(&self.server.headers);
        let (client, request) = (self.clone(), request.body(body)?);
        let call = tokio::spawn(async move {
            let answer = client.connections.send(request).await;
            let answer = answer.map_err(|e| client.server.no_answer(e))?;
            client.parse(answer).await.map(|(_, ())| ())
        });
        Ok((pieces, call))
    }

    /// Sends a request to a server in a sandbox, as clients in any language do.
    pub async fn request_port(
        &self,
        sandbox: &Sandbox,
        port: u16,
        method: Method,
        path: &str,
        body: Option<Bytes>,
    ) -> anyhow::Result<PooledResponse> {
        let mut request = Request::builder().method(method).uri(path);
        let headers = request.headers_mut().context("not a path")?;
        headers.extend(self.port_headers(sandbox, port.into())?);
        let json = HeaderValue::from_static("application/json");
        headers.insert(header::CONTENT_TYPE, json);
        let answer = self
            .connections
            .send(request.body(RequestBody::Whole(body))?)
            .await;
        answer.map_err(|e| self.server.no_answer(e))
    }

    /// A stream to a TCP port of a sandbox.
    pub async fn stream(
        &self,
        id: &str,
        port: u16,
    ) -> anyhow::Result<impl AsyncRead + AsyncWrite + Send + Unpin + use<>> {
        let path = format!("/sandboxes/{id}/ports/{port}");
        self.upgrade(Method::GET, &path, "tcp").await
    }

    /// Has a sandbox removed when the lease is dropped or this process ends, however it ends.
    pub async fn lease(&self, id: &str) -> anyhow::Result<SandboxLease> {
        let path = format!("/sandboxes/{id}/lease");
        let stream = self.upgrade(Method::POST, &path, "lease").await?;
        Ok(SandboxLease::keep(stream))
    }

    /// The stream of `protocol` that a call is answered with.
    async fn upgrade(
        &self,
        method: Method,
        path: &str,
        protocol: &'static str,
    ) -> anyhow::Result<impl AsyncRead + AsyncWrite + Send + Unpin + use<>> {
        let mut request = Request::builder().method(method).uri(path);
        let headers = request.headers_mut().context("not a path")?;
        headers.clone_from(&self.server.headers);
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static(protocol));
        let request = request.body(RequestBody::Whole(None))?;
        let answer = self.connections.send(request).await;
        let answer = answer.map_err(|e| self.server.no_answer(e))?;
        match answer
            .into_upgraded()
            .await
            .map_err(|e| self.server.no_answer(e))?
        {
            Ok(stream) => Ok(stream),
            Err(refused) => match self.parse::<Value>(*refused).await {
                Err(e) => Err(e),
                Ok(_) => anyhow::bail!("{} opened no stream", self.server.name),
            },
        }
    }

    /// Headers that lead the gateway to a port of a sandbox.
    fn port_headers(&self, sandbox: &Sandbox, port: u32) -> anyhow::Result<HeaderMap> {
        let mut headers = HeaderMap::new();
        if let Some(host) = self.server.headers.get(header::HOST) {
            headers.insert(header::HOST, host.clone());
        }
        headers.insert("e2b-sandbox-id", HeaderValue::from_str(&sandbox.record.id)?);
        headers.insert("e2b-sandbox-port", HeaderValue::from(port));
        Ok(headers)
    }

    /// A client of the agent of a sandbox, reached as clients in any language reach it.
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
    fn slow_calls_have_a_description_and_lists_have_none() {
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
