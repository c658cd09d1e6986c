//! Pool of the connections from this member to other members. Messages such as heartbeats have a
//! connection of their own, so that bulk data (forwarded calls and streams) cannot delay them.
//!
//! The *head* of a request or response is its first line and its headers, without the body.

use super::body::{Body, BoxError};
use super::error::ChannelError;
use super::identity::Identity;
use super::{
    CONNECT_TIMEOUT, CONNECTION_WINDOW, HANDSHAKE_TIMEOUT, MAX_HEADER_BYTES, MAX_STREAMS,
    PING_INTERVAL, PING_TIMEOUT, STREAM_WINDOW,
};
use crate::certificates::member_name;
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use jiffy_fleet_core::MemberId;
use parking_lot::Mutex;
use rustls::CertificateError as TlsCertificateError;
use rustls::pki_types::ServerName;
use std::collections::HashMap;
use std::future::Future;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Maximum number of bulk connections to one member.
const MAX_BULK_CONNECTIONS: usize = 8;

/// Use of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Class {
    Messages,
    Bulk,
}

/// Connections to all members. Dropping the pool does not end requests in flight.
#[derive(Default)]
pub(super) struct Pool(Mutex<HashMap<(MemberId, Class), Arc<Slot>>>);

/// Connections of one class to one member.
#[derive(Default)]
struct Slot {
    connections: Mutex<Vec<Arc<Connection>>>,
    /// Locked during a connect, so that only one is in progress. Contains the time, the address and
    /// the error of the last failure.
    connecting: tokio::sync::Mutex<Option<(Instant, String, ChannelError)>>,
}

/// Connection to a member. Each request in flight holds an `Arc` of it, so the number of `Arc`s
/// shows how busy the connection is.
pub(super) struct Connection {
    member: MemberId,
    address: String,
    sender: SendRequest<Body>,
    /// Second descriptor of the socket: the first one belongs to tasks of hyper.
    socket: std::net::TcpStream,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.end();
    }
}

impl Connection {
    /// Ends the connection, with all requests in flight.
    fn end(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Sends a request and waits for the head of its response. Returns the request if the
    /// connection was closed before the request was sent.
    pub(super) async fn send(
        &self,
        request: Request<Body>,
    ) -> Result<Response<Incoming>, (ChannelError, Option<Request<Body>>)> {
        let mut sender = self.sender.clone();
        sender.try_send_request(request).await.map_err(|mut error| {
            let request = error.take_message();
            let lost = ChannelError::Lost {
                member: self.member,
                reason: reason(error.error()),
            };
            (lost, request)
        })
    }
}

impl Pool {
    /// Returns a connection to a member: an open one, or a new one.
    pub(super) async fn connection(
        &self,
        identity: &Identity,
        member: MemberId,
        address: &str,
        class: Class,
    ) -> Result<Arc<Connection>, ChannelError> {
        let slot = self.0.lock().entry((member, class)).or_default().clone();
        let started = Instant::now();
        if let Some(connection) = slot.open(address) {
            return Ok(connection);
        }
        let mut failure = slot.connecting.lock().await;
        // Another call may have connected, or failed to, while this one waited.
        if let Some(connection) = slot.open(address) {
            return Ok(connection);
        }
        // Do not repeat a connect that has failed since this call started.
        match &*failure {
            Some((at, of, error)) if *at >= started && of == address => return Err(error.clone()),
            _ => {}
        }
        match connect(identity, member, address).await {
            Ok(connection) => {
                *failure = None;
                let connection = Arc::new(connection);
                slot.connections.lock().push(connection.clone());
                Ok(connection)
            }
            Err(error) => {
                *failure = Some((Instant::now(), address.to_owned(), error.clone()));
                Err(error)
            }
        }
    }

    /// Ends all connections to a member, with all requests in flight.
    pub(super) fn close(&self, member: MemberId) {
        let mut slots = self.0.lock();
        for class in [Class::Messages, Class::Bulk] {
            if let Some(slot) = slots.remove(&(member, class)) {
                for connection in slot.connections.lock().drain(..) {
                    connection.end();
                }
            }
        }
    }
}

impl Slot {
    /// Returns an open connection with room for a request.
    fn open(&self, address: &str) -> Option<Arc<Connection>> {
        let mut connections = self.connections.lock();
        // A member may have a new address. Connections to the former one are not reused, but remain
        // open until their requests in flight are complete.
        connections.retain(|c| !c.sender.is_closed() && c.address == address);
        let least = connections.iter().min_by_key(|c| Arc::strong_count(c))?;
        // Open another connection when the least busy one has half of its maximum number of
        // requests.
        let is_full = Arc::strong_count(least) > MAX_STREAMS as usize / 2
            && connections.len() < MAX_BULK_CONNECTIONS;
        (!is_full).then(|| least.clone())
    }
}

/// Runs `future` for at most `limit`.
async fn limited<T, E: Into<BoxError>>(
    limit: Duration,
    what: &str,
    future: impl Future<Output = Result<T, E>>,
) -> Result<T, BoxError> {
    match tokio::time::timeout(limit, future).await {
        Ok(result) => result.map_err(Into::into),
        Err(_) => Err(format!("{what} took more than {} s", limit.as_secs()).into()),
    }
}

/// Connects to a member, and checks that the peer is this member.
async fn connect(
    identity: &Identity,
    member: MemberId,
    address: &str,
) -> Result<Connection, ChannelError> {
    let failed = |error: BoxError| ChannelError::Connect {
        member,
        address: address.to_owned(),
        reason: reason(&*error),
    };
    let stream = limited(CONNECT_TIMEOUT, "the connect", TcpStream::connect(address))
        .await
        .map_err(failed)?;
    // Ignore the error: small messages are then sent later, but nothing fails.
    let _ = stream.set_nodelay(true);
    let socket = stream.as_fd().try_clone_to_owned();
    let socket = socket.map_err(|error| failed(error.into()))?.into();
    let name = member_name(identity.fleet(), member);
    let name = ServerName::try_from(name).map_err(|e| failed(e.into()))?;
    let handshake = TlsConnector::from(identity.client()).connect(name, stream);
    let stream = limited(HANDSHAKE_TIMEOUT, "the TLS handshake", handshake)
        .await
        .map_err(|error| tls_error(member, address, error))?;
    let handshake = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(MAX_HEADER_BYTES)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true)
        .handshake(TokioIo::new(stream));
    let (sender, connection) = limited(HANDSHAKE_TIMEOUT, "the HTTP/2 handshake", handshake)
        .await
        .map_err(failed)?;
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%member, %error, "connection to a member ended");
        }
    });
    Ok(Connection {
        member,
        address: address.to_owned(),
        sender,
        socket,
    })
}

/// Returns the typed error of a failed TLS handshake.
fn tls_error(member: MemberId, address: &str, error: BoxError) -> ChannelError {
    let address = address.to_owned();
    let cause = error
        .downcast_ref::<std::io::Error>()
        .and_then(|error| error.get_ref())
        .and_then(|error| error.downcast_ref::<rustls::Error>());
    let reason = reason(&*error);
    match cause {
        Some(rustls::Error::InvalidCertificate(
            TlsCertificateError::NotValidForName
            | TlsCertificateError::NotValidForNameContext { .. },
        )) => ChannelError::OtherMember {
            member,
            address,
            reason,
        },
        Some(_) => ChannelError::Untrusted {
            member,
            address,
            reason,
        },
        None => ChannelError::Connect {
            member,
            address,
            reason,
        },
    }
}

/// Returns an error with its causes.
pub(super) fn reason(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
