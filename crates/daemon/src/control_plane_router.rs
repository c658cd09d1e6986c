//! [`ControlPlaneRouter`]: answers the requests that the gateway does not pass to a sandbox. They
//! are calls of the API, and requests to functions by host name.

use crate::traces::api_span;
use hyper::Request;
use hyper::header::HeaderValue;
use jiffy_api::{Caller, ClientAddress, FunctionHost};
use jiffy_client::{VERSION, VERSION_HEADER};
use jiffy_gateway::body::Body;
use jiffy_gateway::{ClientRequestBody, ControlPlane, FunctionLabel, KnownCaller, Peer, RequestId};
use jiffy_proto::internal::InternalOrigin;
use tracing::Instrument;

/// Router of API requests, and of requests to functions by host name. It records the caller of each
/// request: the owner for clients of the owner's socket, otherwise the client address. Requests
/// from sandboxes and functions have their origin as an extension ([`InternalOrigin`]).
#[derive(Clone)]
pub struct ControlPlaneRouter {
    pub control: axum::Router,
    pub functions: axum::Router,
}

impl ControlPlane for ControlPlaneRouter {
    async fn answer(&mut self, mut request: Request<ClientRequestBody>) -> hyper::Response<Body> {
        match request.extensions().get::<Peer>().copied() {
            Some(Peer { local: true, .. }) => {
                request.extensions_mut().insert(Caller::Owner);
            }
            // The extension `InternalOrigin` identifies the caller. The address of an internal
            // connection does not belong to a client.
            Some(_) if request.extensions().get::<InternalOrigin>().is_some() => {}
            Some(peer) => {
                request.extensions_mut().insert(ClientAddress(peer.ip));
            }
            None => {}
        }
        let label = request.extensions_mut().remove::<FunctionLabel>();
        let mut response = match label {
            Some(FunctionLabel(label)) => {
                request.extensions_mut().insert(FunctionHost(label));
                // Requests to functions are not traced as calls of the API.
                return mark_known_if_invoked(self.functions.answer(request).await);
            }
            None => {
                let span = api_span(&request);
                self.control.answer(request).instrument(span).await
            }
        };
        // The gateway closes idle connections of known callers later than other connections.
        if response.extensions().get::<Caller>().is_some() {
            response.extensions_mut().insert(KnownCaller);
        }
        let version = HeaderValue::from_static(VERSION);
        response.headers_mut().insert(VERSION_HEADER, version);
        response
    }
}

/// Marks the client as known if the response has a `RequestId`, which
/// [`FunctionGateway`](crate::functions::FunctionGateway) adds when it forwards a request. A client
/// whose request reaches a sandbox is also known.
fn mark_known_if_invoked(mut response: hyper::Response<Body>) -> hyper::Response<Body> {
    if response.extensions().get::<RequestId>().is_some() {
        response.extensions_mut().insert(KnownCaller);
    }
    response
}
