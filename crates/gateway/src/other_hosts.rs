//! Other hosts of a fleet: requests to their sandboxes are forwarded to them. A *fleet* is a group
//! of hosts that share a store and their sandboxes.
//!
//! A forwarded request goes to the gateway of the other host, which checks tokens, signatures and
//! limits, and resumes the sandbox. It travels on a stream that only hosts of the fleet can open.
//! The host that opens the stream reports the address of the client. A host never forwards a
//! request of another host.

use crate::connection;
use crate::control_plane::ControlPlane;
use crate::gateway::Gateway;
use crate::peer::Peer;
use crate::sandboxes::{OpenError, Sandboxes};
use crate::tasks::ConnectionTasks;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tracing::debug;

/// Header of a response: the sandbox is not on the host that received the forwarded request.
pub(crate) const MOVED: &str = "jiffy-moved";

/// Result of an operation on another host.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Stream in both directions.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

/// Stream to the gateway of another host.
pub type HostStream = Box<dyn ByteStream>;

/// Place of a sandbox that this host does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// No host has the sandbox.
    Unknown,
    /// Name of the host that has the sandbox.
    Host(Arc<str>),
    /// The place cannot be determined at present. The text is shown to clients.
    Unavailable(String),
}

/// Other hosts of the fleet.
pub trait OtherHosts: fmt::Debug + Send + Sync {
    /// Finds the host of a sandbox that this host does not have.
    fn locate<'a>(&'a self, sandbox: &'a str) -> Pending<'a, Location>;

    /// Discards the remembered place of a sandbox, because it was wrong.
    fn forget(&self, sandbox: &str);

    /// Opens a stream to the gateway of a host, on behalf of the client `peer`.
    fn open<'a>(&'a self, host: &'a str, peer: Peer) -> Pending<'a, Result<HostStream, OpenError>>;

    /// Waits until the fleet considers the host lost.
    fn lost(&self, host: Arc<str>) -> Pending<'static, ()>;
}

/// Stream of another host, on behalf of a client.
pub struct ForwardedConnection {
    /// Stream.
    pub stream: HostStream,
    /// Client, as the other host reports it.
    pub peer: Peer,
    /// True if a front sent the stream. A *front* is a process without sandboxes that passes
    /// connections of clients to the hosts of a fleet. Requests of these clients to sandboxes of
    /// other hosts are forwarded to these hosts.
    pub is_from_front: bool,
}

/// Serves streams of other hosts until `shutdown`, then waits for in-flight requests.
pub async fn serve_forwarded<S, C>(
    connections: mpsc::Receiver<ForwardedConnection>,
    gateway: Gateway<S, C>,
    shutdown: impl Future<Output = ()>,
) where
    S: Sandboxes,
    C: ControlPlane,
{
    let tasks = ConnectionTasks::default();
    let drain = gateway.shared.config.limits.drain;
    let serve = |connection: ForwardedConnection| {
        let ForwardedConnection {
            stream,
            peer,
            is_from_front,
        } = connection;
        // A local peer would count as the owner of this host. Clients of other hosts never are.
        let peer = Peer {
            local: false,
            ..peer
        };
        // A stream beyond the limit is closed without a response.
        let Ok(permit) = gateway.shared.admission.enter(peer.ip) else {
            debug!(client = %peer.ip, "rejected a forwarded connection: too many are open");
            return;
        };
        let gateway = if is_from_front {
            gateway.clone()
        } else {
            gateway.for_forwarded()
        };
        tasks.track(connection::serve(
            gateway,
            stream,
            peer,
            permit,
            tasks.clone(),
        ));
    };
    tasks.serve_queue(connections, drain, shutdown, serve).await;
}
