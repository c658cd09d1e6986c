//! Requests of clients to sandboxes of other members of a fleet. The gateway of this host opens a
//! stream over the members' channel to the gateway of the other member, and accepts such streams.
//!
//! A *member* is a host of the fleet. A *front* is a machine without sandboxes that passes requests
//! of clients to the members.

use crate::fleet::ForwardedCalls;
use async_trait::async_trait;
use hyper::body::Incoming;
use hyper::header::{HeaderMap, HeaderName};
use hyper::{Request, Response, StatusCode};
use jiffy_api::{Fleet, Keys};
use jiffy_fleet::channel::{Body, Client, Handler, Rejected, accept_stream};
use jiffy_fleet_core::MemberId;
use jiffy_gateway::{
    ForwardedConnection, HostStream, Location, OpenError, OtherHosts, Peer, Pending,
};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Path of streams to the gateway of a member.
pub const GATEWAY_PATH: &str = "/gateway";
/// Address of the client for which a stream is opened. Only members can send requests on the
/// channel, so that no client can set the header.
const CLIENT_ADDRESS: HeaderName = HeaderName::from_static("jiffy-client-address");
/// Present if the client uses TLS.
const CLIENT_TLS: HeaderName = HeaderName::from_static("jiffy-client-tls");
/// Maximum time until a member accepts a stream.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of accepted streams that the gateway has not taken yet.
pub const MAX_WAITING_STREAMS: usize = 256;

/// Parts of the API server that are different in a fleet.
pub struct FleetParts {
    /// Keys of the fleet.
    pub keys: Arc<Keys>,
    /// Other members.
    pub hosts: Arc<dyn OtherHosts>,
    /// Streams of other members.
    pub forwarded: mpsc::Receiver<ForwardedConnection>,
    /// Key that signs preview links on all members.
    pub signing_key: [u8; 32],
    /// Calls on sandboxes of other members.
    pub api: Fleet,
    /// Receiver of the calls of other members.
    pub calls: Arc<ForwardedCalls>,
}

/// Members of the fleet, as the gateway uses them.
pub struct FleetHosts {
    fleet: Fleet,
    client: Client,
}

impl fmt::Debug for FleetHosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FleetHosts").finish_non_exhaustive()
    }
}

impl FleetHosts {
    pub fn new(fleet: Fleet, client: Client) -> Self {
        Self { fleet, client }
    }
}

impl OtherHosts for FleetHosts {
    fn locate<'a>(&'a self, sandbox: &'a str) -> Pending<'a, Location> {
        Box::pin(async move {
            let node = self.fleet.node();
            match node.locate(self.fleet.sandbox_hash(sandbox)).await {
                // The gateway has not found the sandbox on this host.
                Ok(Some(place)) if place.member == node.id() => Location::Unknown,
                Ok(Some(place)) if place.is_live => Location::Host(place.member.to_string().into()),
                Ok(Some(place)) => {
                    Location::Unavailable(format!("its host {} was lost", place.member))
                }
                Ok(None) => Location::Unknown,
                Err(e) => Location::Unavailable(e.to_string()),
            }
        })
    }

    fn forget(&self, sandbox: &str) {
        self.fleet.node().forget(self.fleet.sandbox_hash(sandbox));
    }

    fn open<'a>(&'a self, host: &'a str, peer: Peer) -> Pending<'a, Result<HostStream, OpenError>> {
        Box::pin(async move {
            let unavailable = |reason: String| OpenError::Unavailable(reason);
            let members = self.fleet.node().members();
            let row = host.parse().ok().and_then(|id| members.row(id));
            let row = row.ok_or_else(|| unavailable(format!("{host} is no member")))?;
            let request = stream_request(peer).map_err(|e| unavailable(e.to_string()))?;
            let opened = self
                .client
                .open_stream(row.id, &row.address, request, OPEN_TIMEOUT)
                .await;
            let response = opened.map_err(|e| unavailable(e.to_string()))?;
            if response.status() != StatusCode::OK {
                let status = response.status();
                return Err(unavailable(format!("{host} rejected the stream: {status}")));
            }
            let stream: HostStream = Box::new(response.into_body());
            Ok(stream)
        })
    }

    fn lost(&self, host: Arc<str>) -> Pending<'static, ()> {
        let node = self.fleet.node().clone();
        Box::pin(async move {
            match host.parse() {
                Ok(id) => node.until_lost(id).await,
                Err(_) => std::future::pending().await,
            }
        })
    }
}

/// Accepts streams of other members, on [`GATEWAY_PATH`].
#[derive(Clone)]
pub struct GatewayStreams(mpsc::Sender<ForwardedConnection>);

impl GatewayStreams {
    /// Returns the handler, and the streams that it accepts.
    pub fn new() -> (Self, mpsc::Receiver<ForwardedConnection>) {
        let (sender, streams) = mpsc::channel(MAX_WAITING_STREAMS);
        (Self(sender), streams)
    }
}

/// Returns the request for a stream to the gateway of a member, on behalf of a client.
pub(crate) fn stream_request(peer: Peer) -> hyper::http::Result<Request<()>> {
    let mut request = Request::get(GATEWAY_PATH).header(CLIENT_ADDRESS, peer.ip.to_string());
    if peer.tls {
        request = request.header(CLIENT_TLS, "1");
    }
    request.body(())
}

/// Returns the client for which a member opens a stream.
fn client_of(headers: &HeaderMap) -> Option<Peer> {
    let address = headers.get(CLIENT_ADDRESS)?.to_str().ok()?;
    Some(Peer {
        ip: address.parse::<IpAddr>().ok()?,
        tls: headers.contains_key(CLIENT_TLS),
        local: false,
    })
}

#[async_trait]
impl Handler for GatewayStreams {
    async fn handle(&self, from: MemberId, request: Request<Incoming>) -> Response<Body> {
        let Some(peer) = client_of(request.headers()) else {
            return Rejected::new(400, "the address of the client is missing").response();
        };
        // Reserve a place in the queue first, because an accepted stream must be served.
        let Ok(permit) = self.0.try_reserve() else {
            return Rejected::new(503, "too many streams are waiting").response();
        };
        let (stream, response) = accept_stream(request);
        permit.send(ForwardedConnection {
            stream: Box::new(stream),
            peer,
            is_from_front: from.is_front(),
        });
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderValue;

    #[test]
    fn only_a_valid_address_of_a_client_is_accepted() {
        let mut headers = HeaderMap::new();
        assert_eq!(client_of(&headers), None);
        for bad in ["", "localhost", "192.0.2.7:80", "300.1.1.1"] {
            headers.insert(CLIENT_ADDRESS, HeaderValue::from_static(bad));
            assert_eq!(client_of(&headers), None, "{bad}");
        }
        headers.insert(CLIENT_ADDRESS, HeaderValue::from_static("2001:db8::1"));
        let peer = client_of(&headers).unwrap();
        assert!(!peer.tls && !peer.local);
        headers.insert(CLIENT_TLS, HeaderValue::from_static("1"));
        assert!(client_of(&headers).unwrap().tls);
    }
}
