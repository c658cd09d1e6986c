//! [`Client`]: sends requests to other members over the channel between members (HTTP/2 with mutual
//! TLS). A request is either a small message with a time limit, a request with bodies of any
//! length, or a stream in both directions.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

use super::MAX_MESSAGE_BYTES;
use super::body::{Body, BodyError, Interrupted, body, read_body};
use super::error::ChannelError;
use super::identity::Identity;
use super::pool::{Class, Connection, Pool};
use super::stream::{Stream, outgoing};
use crate::certificates::member_name;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::http::uri::{Authority, Scheme};
use hyper::{Method, Request, Response, Uri};
use jiffy_fleet_core::MemberId;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// Maximum length of the reason of a rejection.
const MAX_REASON_BYTES: usize = 4096;

/// Client of all members. Clones share its connections.
#[derive(Clone)]
pub struct Client {
    identity: Identity,
    pool: Arc<Pool>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("identity", &self.identity)
            .finish_non_exhaustive()
    }
}

impl Client {
    /// Returns a client without connections.
    pub fn new(identity: Identity) -> Self {
        Self {
            identity,
            pool: Arc::default(),
        }
    }

    /// Returns the identity of this member.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Sends a message, and returns the response. The call ends within `limit`.
    ///
    /// # Errors
    /// [`ChannelError`].
    pub async fn message(
        &self,
        to: MemberId,
        address: &str,
        path: &str,
        message: Bytes,
        limit: Duration,
    ) -> Result<Bytes, ChannelError> {
        let too_large = || ChannelError::TooLarge {
            member: to,
            max: MAX_MESSAGE_BYTES,
        };
        if message.len() > MAX_MESSAGE_BYTES {
            return Err(too_large());
        }
        let started = Instant::now();
        let mut request = Request::new(body(message));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = path.parse().map_err(|error| malformed(to, error))?;
        let response = self
            .send(to, address, Class::Messages, request, limit)
            .await?;
        let status = response.status();
        let max = if status.is_success() {
            MAX_MESSAGE_BYTES
        } else {
            MAX_REASON_BYTES
        };
        let left = limit.saturating_sub(started.elapsed());
        let content =
            read_body(response.into_body(), max, left)
                .await
                .map_err(|error| match error {
                    BodyError::TooLarge(_) => too_large(),
                    BodyError::Timeout(_) => ChannelError::Timeout { member: to, limit },
                    BodyError::Interrupted(reason) => ChannelError::Lost { member: to, reason },
                })?;
        if status.is_success() {
            return Ok(content);
        }
        Err(ChannelError::Rejected {
            member: to,
            status: status.as_u16(),
            reason: String::from_utf8_lossy(&content).into_owned(),
        })
    }

    /// Sends a request with a body of any length, and returns the response when its head arrives,
    /// at most `limit` later. The bodies have no time limit: the connection is lost if the peer
    /// does not answer pings for 10 s. A URI without an authority receives the name of the member
    /// as its authority.
    ///
    /// # Errors
    /// [`ChannelError`]. A response of any status is not an error.
    pub async fn request(
        &self,
        to: MemberId,
        address: &str,
        request: Request<Body>,
        limit: Duration,
    ) -> Result<Response<Body>, ChannelError> {
        self.send(to, address, Class::Bulk, request, limit).await
    }

    /// Sends a request and opens a stream in both directions. The peer answers with
    /// [`accept_stream`](super::accept_stream), or rejects the request with another status than
    /// 200: the stream then contains the body of the rejection.
    ///
    /// # Errors
    /// [`ChannelError`].
    pub async fn open_stream(
        &self,
        to: MemberId,
        address: &str,
        request: Request<()>,
        limit: Duration,
    ) -> Result<Response<Stream>, ChannelError> {
        let (sender, written) = outgoing();
        let request = request.map(|()| written);
        let response = self.send(to, address, Class::Bulk, request, limit).await?;
        Ok(response.map(|incoming| sender.with(incoming)))
    }

    /// Ends all connections to a member, with all requests and streams in flight.
    pub fn close(&self, member: MemberId) {
        self.pool.close(member);
    }

    /// Sends a request on a connection of `class`, within `limit`.
    async fn send(
        &self,
        to: MemberId,
        address: &str,
        class: Class,
        mut request: Request<Body>,
        limit: Duration,
    ) -> Result<Response<Body>, ChannelError> {
        let uri = absolute(request.uri(), &member_name(self.identity.fleet(), to));
        *request.uri_mut() = uri.map_err(|error| malformed(to, error))?;
        let sent = self.send_once_or_twice(to, address, class, request);
        match tokio::time::timeout(limit, sent).await {
            Ok(sent) => sent,
            Err(_) => Err(ChannelError::Timeout { member: to, limit }),
        }
    }

    /// Sends a request. Repeats it on another connection if the first one was closed before the
    /// request was sent.
    async fn send_once_or_twice(
        &self,
        to: MemberId,
        address: &str,
        class: Class,
        request: Request<Body>,
    ) -> Result<Response<Body>, ChannelError> {
        let connect = || self.pool.connection(&self.identity, to, address, class);
        let mut connection = connect().await?;
        let sent = match connection.send(request).await {
            Err((_, Some(request))) => {
                connection = connect().await?;
                connection.send(request).await
            }
            sent => sent,
        };
        let response = sent.map_err(|(error, _)| error)?;
        Ok(response.map(|incoming| {
            Counted {
                incoming,
                _connection: connection,
            }
            .boxed_unsync()
        }))
    }
}

fn malformed(member: MemberId, error: impl ToString) -> ChannelError {
    ChannelError::Request {
        member,
        reason: error.to_string(),
    }
}

/// Returns the URI with scheme and authority, which HTTP/2 requires.
fn absolute(uri: &Uri, name: &str) -> Result<Uri, hyper::http::Error> {
    let mut parts = uri.clone().into_parts();
    parts.scheme = Some(Scheme::HTTPS);
    if parts.authority.is_none() {
        parts.authority = Some(Authority::try_from(name)?);
    }
    if parts.path_and_query.is_none() {
        parts.path_and_query = Some("/".parse()?);
    }
    Ok(Uri::from_parts(parts)?)
}

/// Body of a response, which counts as a request in flight of its connection.
struct Counted {
    incoming: Incoming,
    _connection: Arc<Connection>,
}

impl HttpBody for Counted {
    type Data = Bytes;
    type Error = Interrupted;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Interrupted>>> {
        Pin::new(&mut self.incoming)
            .poll_frame(cx)
            .map_err(Interrupted::new)
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}
