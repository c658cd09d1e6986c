//! Client of the agent of one sandbox, with calls for files, processes and metrics in submodules.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

pub mod archive;
pub mod commands;
pub mod comparison;
pub mod files;
pub mod metrics;
pub mod process;
pub mod process_list;
pub mod tree;

use crate::connection_pool::{ConnectionPool, PooledResponse};
use crate::error::{ClientError, WireError};
use crate::frame;
use crate::request_body::RequestBody;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Method, Request};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::path::PathBuf;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;

/// Maximum length of a response to a unary call in bytes.
const MAX_ANSWER_BYTES: usize = 64 * 1024 * 1024;

/// Client of one agent. Clones share connections and are cheap.
#[derive(Clone)]
pub struct AgentClient {
    connections: ConnectionPool,
    /// Headers of every request: host and credentials.
    headers: HeaderMap,
}

/// Header with a sandbox's access token.
const ACCESS_TOKEN: &str = "x-access-token";

/// Request to the agent without its body.
pub(crate) struct AgentCall<'a> {
    /// HTTP method.
    pub method: Method,
    /// Path and query.
    pub path: &'a str,
    /// Content type of the body. Empty if the call has no body.
    pub content: &'static str,
    /// User in the sandbox on whose behalf the call is made.
    pub user: Option<&'a str>,
    /// Additional headers.
    pub headers: &'a [(&'static str, String)],
}

impl AgentClient {
    /// Creates a client that opens connections to the agent's `ENVD_PORT` with `connector`.
    pub fn new<F, Fut, S>(connector: F) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        // HTTP/1.1 requires a host name. The agent ignores it.
        let headers = HeaderMap::from_iter([(header::HOST, HeaderValue::from_static("agent"))]);
        Self::over(ConnectionPool::new(connector), headers)
    }

    /// Creates a client of an agent behind a gateway. `headers`, including `Host`, identify the
    /// sandbox.
    pub fn over(connections: ConnectionPool, headers: HeaderMap) -> Self {
        Self {
            connections,
            headers,
        }
    }

    /// Creates a client of an agent that listens on a Unix socket.
    pub fn unix(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        Self::new(move || UnixStream::connect(path.clone()))
    }

    /// Adds the sandbox's access token. Has no effect if the token is not a valid header value.
    pub fn with_token(mut self, token: impl Into<String>) -> Self {
        if let Ok(mut token) = HeaderValue::try_from(token.into()) {
            // Debug output of the headers must not contain the token.
            token.set_sensitive(true);
            self.headers.insert(ACCESS_TOKEN, token);
        }
        self
    }

    /// Checks that the agent responds.
    pub async fn health(&self) -> Result<(), ClientError> {
        let answer = self
            .send(
                AgentCall {
                    method: Method::GET,
                    path: "/health",
                    content: "",
                    user: None,
                    headers: &[],
                },
                RequestBody::Whole(None),
            )
            .await?;
        // Reading the response to the end returns the connection to the pool.
        self.expect_success(answer).await?.collect(1024).await?;
        Ok(())
    }

    /// Sends a request and waits for the head of its response.
    pub(crate) async fn send(
        &self,
        call: AgentCall<'_>,
        body: RequestBody,
    ) -> Result<PooledResponse, ClientError> {
        let mut request = Request::builder().method(call.method).uri(call.path);
        if let Some(headers) = request.headers_mut() {
            headers.clone_from(&self.headers);
        }
        if !call.content.is_empty() {
            request = request.header(header::CONTENT_TYPE, call.content);
        }
        if let Some(user) = call.user {
            // The envd protocol selects the user by Basic authentication without a password.
            let basic = STANDARD.encode(format!("{user}:"));
            request = request.header(header::AUTHORIZATION, format!("Basic {basic}"));
        }
        for (name, value) in call.headers {
            request = request.header(*name, value);
        }
        let request = request
            .body(body)
            // For example, an invalid value of a header.
            .map_err(|e| ClientError::Protocol(format!("cannot create the request: {e}")))?;
        self.connections.send(request).await
    }

    /// Sends bytes with POST. Fails unless the agent reports success.
    pub(crate) async fn post_bytes(
        &self,
        uri: &str,
        body: RequestBody,
    ) -> Result<PooledResponse, ClientError> {
        let call = AgentCall {
            method: Method::POST,
            path: uri,
            content: "application/octet-stream",
            user: None,
            headers: &[],
        };
        let answer = self.send(call, body).await?;
        self.expect_success(answer).await
    }

    /// Converts a status other than 2xx to the error in the response.
    pub(crate) async fn expect_success(
        &self,
        answer: PooledResponse,
    ) -> Result<PooledResponse, ClientError> {
        let status = answer.status;
        if status.is_success() {
            return Ok(answer);
        }
        // An error text is short. The limit bounds the memory for a hostile guest.
        let body = answer.collect(64 * 1024).await?;
        Err(match serde_json::from_slice::<WireError>(&body) {
            Ok(wire) => wire.into(),
            // A gateway or proxy may respond in the agent's place.
            Err(_) => ClientError::Status {
                status: status.as_u16(),
                message: format!("the agent responded with status {status}"),
            },
        })
    }

    /// Makes a call with one request message and one response message.
    pub(crate) async fn unary<T: DeserializeOwned>(
        &self,
        path: &str,
        user: Option<&str>,
        message: &impl Serialize,
    ) -> Result<T, ClientError> {
        let call = AgentCall {
            method: Method::POST,
            path,
            content: "application/json",
            user,
            headers: &[],
        };
        let answer = self
            .send(call, RequestBody::whole(frame::encode(message)?))
            .await?;
        let body = self
            .expect_success(answer)
            .await?
            .collect(MAX_ANSWER_BYTES)
            .await?;
        serde_json::from_slice(&body)
            .map_err(|e| ClientError::Protocol(format!("invalid response of {path}: {e}")))
    }

    /// Makes a call with a stream of frames in at least one direction.
    pub(crate) async fn stream(
        &self,
        path: &str,
        user: Option<&str>,
        headers: &[(&'static str, String)],
        body: RequestBody,
    ) -> Result<frame::ResponseFrames, ClientError> {
        let call = AgentCall {
            method: Method::POST,
            path,
            content: "application/connect+json",
            user,
            headers,
        };
        let answer = self.send(call, body).await?;
        Ok(frame::ResponseFrames::new(
            self.expect_success(answer).await?,
        ))
    }
}
