//! Streams to ports of sandboxes on other members, and leases of these sandboxes. A *lease* removes
//! a sandbox when the connection of its client ends.
//!
//! A *member* is a host of the fleet.

use super::forward::prepare;
use super::route::is_moved;
use super::{Fleet, host_lost, unavailable};
use crate::app::App;
use crate::caller::{Caller, ClientAddress};
use crate::error::ApiError;
use crate::routes::{LEASE_PROTOCOL, PORT_PROTOCOL, expect_upgrade};
use axum::extract::Request;
use axum::http::header::{CONNECTION, UPGRADE};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use hyper_util::rt::TokioIo;
use jiffy_fleet::node::Place;
use jiffy_fleet_core::SandboxHash;
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional};

/// Stream of bytes in both directions.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

/// Stream of a client that another member forwards, as an extension of the request that opens it.
/// The handler takes the stream if it accepts the request.
#[derive(Clone)]
pub(crate) struct ForwardedStream(Arc<Mutex<Option<Box<dyn ByteStream>>>>);

impl ForwardedStream {
    /// Returns the stream. `None` if it was taken before.
    pub fn take(&self) -> Option<Box<dyn ByteStream>> {
        self.0.lock().take()
    }
}

/// Prepares a request for a stream that another member has forwarded, for the router of this
/// member. The router answers with the status 101 if it has accepted the stream. The caller must
/// have authenticated the member by its certificate.
pub fn receive_forwarded_stream(request: &mut Request, stream: Box<dyn ByteStream>) {
    super::receive_forwarded(request);
    // Members forward each request for a stream with the method GET. The route of a port has this
    // method, but the route of a lease has the method POST.
    if stream_protocol(request.uri().path()) == Some(LEASE_PROTOCOL) {
        *request.method_mut() = Method::POST;
    }
    let stream = ForwardedStream(Arc::new(Mutex::new(Some(stream))));
    request.extensions_mut().insert(stream);
}

/// Returns the protocol of the stream that a path opens: a port, or a lease. `None` if the path
/// opens no stream.
fn stream_protocol(path: &str) -> Option<&'static str> {
    let mut parts = path.trim_start_matches('/').split('/');
    if parts.next() != Some("sandboxes") {
        return None;
    }
    match parts.nth(1) {
        Some("ports") => Some(PORT_PROTOCOL),
        Some("lease") => Some(LEASE_PROTOCOL),
        _ => None,
    }
}

/// Returns whether a call opens a stream.
pub(super) fn opens_stream(request: &Request) -> bool {
    let protocol = stream_protocol(request.uri().path());
    protocol.is_some() && request.headers().contains_key(UPGRADE)
}

impl Fleet {
    /// Opens a stream to a sandbox at `place`. If the sandbox has moved, tries its new member once.
    /// `None` if the new place is this member, or no member has the sandbox: the caller then
    /// handles the request itself.
    pub(super) async fn open_stream(
        &self,
        app: &App,
        caller: &Caller,
        (hash, mut place): (SandboxHash, Place),
        request: &mut Request,
    ) -> Result<Option<Response>, ApiError> {
        let protocol = stream_protocol(request.uri().path()).unwrap_or(PORT_PROTOCOL);
        expect_upgrade(request, protocol)?;
        for attempt in 0..2 {
            if !place.is_live {
                return Err(host_lost(place.member, "it was declared dead"));
            }
            let mut opening = Request::new(axum::body::Body::empty());
            *opening.uri_mut() = request.uri().clone();
            *opening.headers_mut() = request.headers().clone();
            let client = request.extensions().get::<ClientAddress>().map(|a| a.0);
            prepare(&mut opening, Some(caller), client);
            let opening = opening.map(|_| ());
            let opened = (self.forwarder).open_stream(place.member, &place.address, opening);
            match self.until_answered(place.member, opened).await {
                Ok(Ok(stream)) => {
                    let lost = self.node.clone();
                    let member = place.member;
                    let lost = async move { lost.until_lost(member).await };
                    return Ok(Some(connect(
                        app,
                        caller,
                        (request, protocol),
                        stream,
                        lost,
                    )));
                }
                Ok(Err(response)) if !is_moved(&response) => return Ok(Some(response)),
                Ok(Err(_)) => {}
                Err(error) => {
                    // The sandbox may have moved since the place was remembered. If the request was
                    // not sent, the place is therefore looked up again once.
                    let is_stale = place.is_remembered && error.is_unsent;
                    if !is_stale || attempt > 0 {
                        return Err(host_lost(place.member, &error.reason));
                    }
                }
            }
            self.node.forget(hash);
            match self.node.locate(hash).await? {
                Some(new) if new.member != self.node.id() => place = new,
                _ => return Ok(None),
            }
        }
        Err(unavailable(
            "the sandbox moves between hosts at this moment: retry",
        ))
    }
}

/// Connects the client with a stream until either side ends, the key of the client is revoked, or
/// the host of the sandbox is lost. Returns the response that starts the stream.
fn connect(
    app: &App,
    caller: &Caller,
    (request, protocol): (&mut Request, &'static str),
    mut stream: Box<dyn ByteStream>,
    lost: impl Future<Output = ()> + Send + 'static,
) -> Response {
    let client = hyper::upgrade::on(request);
    let (keys, key) = (app.keys.clone(), caller.owner_id());
    tokio::spawn(async move {
        let Ok(client) = client.await else { return };
        let mut client = TokioIo::new(client);
        tokio::select! {
            // An error of either side is a normal end of the stream.
            _ = copy_bidirectional(&mut client, &mut stream) => {}
            () = keys.until_invalid(key.as_deref()) => {}
            () = lost => {}
        }
    });
    let headers = [(CONNECTION, "upgrade"), (UPGRADE, protocol)];
    (StatusCode::SWITCHING_PROTOCOLS, headers).into_response()
}
