//! Internal connections, which the daemon opens on behalf of functions and sandboxes.
//!
//! Such a connection is confined to the resources of one API key, independently of the content of
//! its requests. It reaches a single host name and only sandboxes of that key, and signed links
//! give it no access. For each request, the control plane applies the key of the connection's
//! origin.

use crate::connection;
use crate::control_plane::ControlPlane;
use crate::gateway::Gateway;
use crate::peer::Peer;
use crate::route::{Route, route_internal};
use crate::sandboxes::{SandboxAccess, Sandboxes};
use crate::tasks::ConnectionTasks;
use hyper::StatusCode;
use hyper::http::request::Parts;
use jiffy_proto::internal::InternalOrigin;
use std::any::Any;
use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv6Addr};
use std::os::unix::net::UnixStream as StdUnixStream;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tracing::debug;

/// Path prefix that a sandbox may request.
const FUNCTIONS_PATH: &str = "/functions/";

/// Internal connection.
pub struct InternalConnection {
    /// Origin of the connection, as known to the daemon.
    pub origin: InternalOrigin,
    /// The daemon's end, non-blocking.
    pub stream: StdUnixStream,
    /// Dropped at the end of the connection.
    pub permit: Box<dyn Any + Send + Sync>,
}

/// Routes a request of an internal connection.
pub(crate) fn decide(origin: &InternalOrigin, parts: &Parts) -> Route {
    let forbidden = |reason| Route::Refused(StatusCode::FORBIDDEN, reason);
    match (origin, route_internal(parts)) {
        (InternalOrigin::Sandbox { .. }, Route::ControlPlane)
            if !parts.uri.path().starts_with(FUNCTIONS_PATH) =>
        {
            forbidden("Sandboxes can only call functions of their API key")
        }
        (InternalOrigin::Sandbox { .. }, Route::Sandbox(_)) => {
            forbidden("Sandboxes cannot reach other sandboxes")
        }
        (_, route) => route,
    }
}

/// Returns true if a connection of this origin may reach ports of the sandbox.
pub(crate) fn reaches(origin: &InternalOrigin, access: &SandboxAccess) -> bool {
    match origin {
        InternalOrigin::Function {
            key, reaches_ports, ..
        } => {
            // An invalid API key also revokes the access of the owner's functions.
            let is_key_valid = !access.links_revoked;
            *reaches_ports && is_key_valid && access.owner.as_deref() == Some(key)
        }
        InternalOrigin::Sandbox { .. } => false,
    }
}

/// Returns an address that represents a key in the limits of connections, which are counted per /64
/// network. The address is unique local (RFC 4193), so that it differs from the address of any
/// client.
fn address(origin: &InternalOrigin) -> IpAddr {
    let (InternalOrigin::Function { key, .. } | InternalOrigin::Sandbox { key }) = origin;
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    // A collision of two hashes only makes two keys share a limit.
    let network = 0xfd << 120 | u128::from(hasher.finish() >> 8) << 64;
    Ipv6Addr::from(network | 1).into()
}

/// Serves internal connections until `shutdown`, then waits for in-flight requests.
pub async fn serve_internal<S, C>(
    connections: mpsc::Receiver<InternalConnection>,
    gateway: Gateway<S, C>,
    shutdown: impl Future<Output = ()>,
) where
    S: Sandboxes,
    C: ControlPlane,
{
    let tasks = ConnectionTasks::default();
    let drain = gateway.shared.config.limits.drain;
    let serve = |connection| {
        let InternalConnection {
            origin,
            stream,
            permit: owner_permit,
        } = connection;
        let peer = Peer {
            ip: address(&origin),
            tls: false,
            local: false,
        };
        // A connection beyond the limit is closed without a response.
        let Ok(permit) = gateway.shared.admission.enter(peer.ip) else {
            debug!(client = %peer.ip, "rejected an internal connection: too many are open");
            return;
        };
        let stream = match UnixStream::from_std(stream) {
            Ok(stream) => stream,
            Err(e) => {
                debug!(error = %e, "cannot serve an internal connection");
                return;
            }
        };
        let gateway = gateway.for_internal(origin);
        let serving = connection::serve(gateway, stream, peer, permit, tasks.clone());
        tasks.track(async move {
            serving.await;
            // The owner's permit covers the whole connection.
            drop(owner_permit);
        });
    };
    tasks.serve_queue(connections, drain, shutdown, serve).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::{SANDBOX_ID, SANDBOX_PORT};
    use hyper::Request;

    /// Returns a function as the origin of a request. `reaches_ports` states whether the function
    /// may send requests to ports of sandboxes.
    fn function(reaches_ports: bool) -> InternalOrigin {
        InternalOrigin::Function {
            key: "k".to_owned(),
            owner: None,
            name: "agent".to_owned(),
            reaches_ports,
        }
    }

    fn sandbox() -> InternalOrigin {
        InternalOrigin::Sandbox {
            key: "k".to_owned(),
        }
    }

    /// Returns the route of a request. If `headers` is true, the request names a sandbox and a port
    /// in its headers.
    fn decided(origin: &InternalOrigin, host: &str, path: &str, headers: bool) -> Route {
        let mut request = Request::get(path).header("host", host);
        if headers {
            request = request.header(SANDBOX_ID, "i1").header(SANDBOX_PORT, "80");
        }
        decide(origin, &request.body(()).unwrap().into_parts().0)
    }

    fn status(route: &Route) -> u16 {
        match route {
            Route::Refused(status, _) => status.as_u16(),
            _ => 200,
        }
    }

    #[test]
    fn one_host_name_is_served_from_inside() {
        for host in ["api.jiffy.internal", "API.jiffy.internal.:80"] {
            let route = decided(&function(true), host, "/sandboxes", false);
            assert_eq!(route, Route::ControlPlane, "{host}");
        }
        for host in [
            "localhost",
            "127.0.0.1",
            "agent--0.fn.localhost",
            "80-i1.localhost",
            "80-i1.api.jiffy.internal",
            "jiffy.internal",
            "example.com",
        ] {
            for origin in [function(true), sandbox()] {
                let route = decided(&origin, host, "/functions/a/invoke", false);
                assert_eq!(status(&route), 421, "{host}");
            }
        }
    }

    #[test]
    fn a_sandbox_reaches_functions_only_and_a_function_sandboxes_of_its_key() {
        let host = "api.jiffy.internal";
        let port = "/sandboxes/i1/proxy/80/";
        for (path, headers) in [(port, false), ("/", true)] {
            let route = decided(&function(true), host, path, headers);
            assert!(matches!(route, Route::Sandbox(_)), "{path}");
            assert_eq!(status(&decided(&sandbox(), host, path, headers)), 403);
        }
        for path in [
            "/",
            "/health",
            "/sandboxes",
            "/functions",
            "/templates/uploads/x",
        ] {
            assert_eq!(
                status(&decided(&sandbox(), host, path, false)),
                403,
                "{path}"
            );
        }
        let route = decided(&sandbox(), host, "/functions/agent/invoke/", false);
        assert_eq!(route, Route::ControlPlane);

        let access = |owner: Option<&str>, links_revoked| SandboxAccess {
            owner: owner.map(str::to_owned),
            links_revoked,
            ..SandboxAccess::default()
        };
        assert!(reaches(&function(true), &access(Some("k"), false)));
        assert!(!reaches(&function(false), &access(Some("k"), false)));
        assert!(!reaches(&function(true), &access(Some("k"), true)));
        for owner in [None, Some("other")] {
            assert!(!reaches(&function(true), &access(owner, false)));
        }
        assert!(!reaches(&sandbox(), &access(Some("k"), false)));
    }

    #[test]
    fn each_key_has_an_address_that_no_client_has() {
        let of = |key: &str| {
            address(&InternalOrigin::Sandbox {
                key: key.to_owned(),
            })
        };
        assert_eq!(of("k"), address(&function(true)));
        let IpAddr::V6(one) = of("k") else {
            panic!("{}", of("k"));
        };
        assert_eq!(one.octets()[0], 0xfd);
        assert_ne!(of("k"), of("other"));
    }
}
