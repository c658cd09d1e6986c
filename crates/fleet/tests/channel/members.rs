//! Members with certificates of one authority, and a handler that counts its calls.

use async_trait::async_trait;
use bytes::Bytes;
use hyper::body::Incoming;
use hyper::{Request, Response};
use jiffy_fleet::certificates::{Authority, MEMBER_LIFETIME, MemberKey};
use jiffy_fleet::channel::{
    Body, Client, Handler, Identity, Interrupted, JoinHandler, Limits, MessageHandler, PeerCheck,
    Rejected, Server, ServerHandle, accept_stream, empty_body,
};
use jiffy_fleet_core::{FleetId, MemberId};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// Maximum duration of a call.
pub const LIMIT: Duration = Duration::from_secs(20);
pub const SERVER: MemberId = MemberId(1);
pub const CLIENT: MemberId = MemberId(2);
/// Member that every host rejects, because it was removed from the fleet.
pub const REMOVED: MemberId = MemberId(9);

pub fn fleet() -> FleetId {
    FleetId::try_from("abcd".to_owned()).unwrap()
}

/// Authority that issues identities.
pub struct Fleet(pub Authority);

impl Fleet {
    pub fn new() -> Self {
        Self(Authority::generate(&fleet()).unwrap())
    }

    pub fn identity(&self, member: MemberId) -> Identity {
        self.identity_valid(member, SystemTime::now(), MEMBER_LIFETIME)
    }

    /// Issues an identity whose certificate is valid from `from` for `lifetime`.
    pub fn identity_valid(
        &self,
        member: MemberId,
        from: SystemTime,
        lifetime: Duration,
    ) -> Identity {
        let key = MemberKey::generate().unwrap();
        let certificate = self
            .0
            .issue(&fleet(), member, &key.request, from, lifetime)
            .unwrap();
        Identity::new(fleet(), self.0.certificate(), &certificate, &key.key).unwrap()
    }

    pub fn client(&self) -> Client {
        Client::new(self.identity(CLIENT))
    }
}

/// Handler that echoes.
#[derive(Default)]
pub struct Echo {
    pub calls: AtomicUsize,
    pub joins: AtomicUsize,
    /// Notified when a request arrives at `/never`, which is never answered.
    pub arrived: tokio::sync::Notify,
}

#[async_trait]
impl MessageHandler for Echo {
    async fn message(&self, peer: MemberId, message: Bytes) -> Result<Bytes, Rejected> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        match &message[..] {
            // Returns the name of the caller.
            b"who" => Ok(peer.to_string().into()),
            // Rejects the message.
            b"no" => Err(Rejected::new(409, "not now")),
            _ => Ok(message),
        }
    }
}

#[async_trait]
impl Handler for Echo {
    async fn handle(&self, _: MemberId, request: Request<Incoming>) -> Response<Body> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        match request.uri().path() {
            "/requests/never" => {
                self.arrived.notify_one();
                std::future::pending().await
            }
            // Opens a stream on which the host sends nothing.
            "/requests/hold" => {
                let (stream, response) = accept_stream(request);
                tokio::spawn(async move {
                    let _stream = stream;
                    std::future::pending::<()>().await;
                });
                response
            }
            "/requests/body" => {
                use http_body_util::BodyExt;
                let body = request.into_body().map_err(Interrupted::new).boxed_unsync();
                Response::new(body)
            }
            // Echoes the bytes of a stream after its end.
            "/requests/stream" => {
                let (mut stream, response) = accept_stream(request);
                tokio::spawn(async move {
                    let mut all = Vec::new();
                    // The end of the read direction does not end the write direction.
                    if stream.read_to_end(&mut all).await.is_ok() {
                        let _ = stream.write_all(&all).await;
                        let _ = stream.shutdown().await;
                    }
                });
                response
            }
            _ => Response::new(empty_body()),
        }
    }
}

#[async_trait]
impl JoinHandler for Echo {
    async fn join(&self, _: SocketAddr, request: Bytes) -> Result<Bytes, Rejected> {
        self.joins.fetch_add(1, Ordering::SeqCst);
        Ok(request)
    }
}

/// Running listener of a member.
pub struct Host {
    pub echo: Arc<Echo>,
    _handle: ServerHandle,
    pub address: String,
    /// Number of a member that was removed after the start. Zero for none.
    pub removed: Arc<AtomicU32>,
}

impl Host {
    pub async fn start(identity: Identity) -> Self {
        Self::limited(identity, Limits::default()).await
    }

    /// Starts a listener with these limits.
    pub async fn limited(identity: Identity, limits: Limits) -> Self {
        let echo = Arc::new(Echo::default());
        let removed = Arc::new(AtomicU32::new(0));
        let later = removed.clone();
        let check: PeerCheck = Arc::new(move |member| {
            if member == REMOVED || member.0 == later.load(Ordering::SeqCst) {
                return Err(format!("{member} was removed from the fleet"));
            }
            Ok(())
        });
        let handle = Server::new(identity, check)
            .limits(limits)
            .messages("/message", echo.clone())
            .requests("/requests", echo.clone())
            .join(echo.clone())
            .start(TcpListener::bind("127.0.0.1:0").await.unwrap())
            .unwrap();
        Self {
            echo,
            address: handle.local_address().to_string(),
            _handle: handle,
            removed,
        }
    }

    /// Returns the number of messages and requests that the handler has received.
    pub fn calls(&self) -> usize {
        self.echo.calls.load(Ordering::SeqCst)
    }

    /// Sends a message to the server. Returns its answer, or the text of the error.
    pub async fn message(&self, client: &Client, text: &str) -> Result<String, String> {
        let message = Bytes::from(text.to_owned());
        client
            .message(SERVER, &self.address, "/message", message, LIMIT)
            .await
            .map(|bytes| String::from_utf8(bytes.to_vec()).unwrap())
            .map_err(|error| format!("{error} {error:?}"))
    }
}
