//! Listener of a front.
//!
//! A *front* is a process without sandboxes. It passes each connection of a client to the gateway
//! of a host of the fleet.
//!
//! The front terminates TLS and reads no requests. Authentication, routing and all limits of
//! requests are applied by the gateway of the host, as for its own clients. The front limits the
//! number of connections.

use crate::admission::{ConnectionAdmission, ConnectionLimitError};
use crate::config::GatewayLimits;
use crate::listener::{Accepted, accept, prepare, send_refusal};
use crate::other_hosts::{HostStream, Pending};
use crate::peer::Peer;
use crate::tasks::ConnectionTasks;
use crate::tls::Tls;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tracing::debug;

/// Maximum time until a client sends its first byte.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of bytes that are read before a host is selected.
const FIRST_BYTES: usize = 4096;

/// Hosts of the fleet, as a front uses them.
pub trait FrontHosts: fmt::Debug + Send + Sync {
    /// Opens a stream to the gateway of any live host, on behalf of the client `peer`. The error is
    /// a reason for clients.
    fn open(&self, peer: Peer) -> Pending<'_, Result<HostStream, String>>;
}

/// State that all connections of a front share.
#[derive(Debug)]
struct Front {
    hosts: Arc<dyn FrontHosts>,
    limits: GatewayLimits,
}

/// Passes connections to hosts until `shutdown`, then waits at most [`GatewayLimits::drain`] for
/// open connections.
pub async fn serve_front(
    listener: TcpListener,
    tls: Option<Tls>,
    limits: GatewayLimits,
    hosts: Arc<dyn FrontHosts>,
    shutdown: impl Future<Output = ()>,
) {
    // The hosts limit connections of unknown clients.
    let limits = GatewayLimits {
        unknown_connections: limits.connections,
        unknown_connections_per_client: limits.connections_per_client,
        ..limits
    };
    let admission = Arc::new(ConnectionAdmission::new(&limits, Arc::default()));
    let front = Arc::new(Front { hosts, limits });
    let tasks = ConnectionTasks::default();
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let Accepted { stream, ip } = tokio::select! {
            accepted = accept(&listener) => accepted,
            () = &mut shutdown => break,
        };
        prepare(&stream);
        // A connection beyond the limit is closed without a response.
        let Ok(permit) = admission.enter(ip) else {
            debug!(client = %ip, "rejected a connection: too many are open");
            continue;
        };
        let (front, tls) = (front.clone(), tls.clone());
        let peer = Peer {
            ip,
            tls: tls.is_some(),
            local: false,
        };
        tasks.spawn(async move {
            front.connection(stream, tls, peer).await;
            drop(permit);
        });
    }
    drop(listener);
    tasks.finish(front.limits.drain).await;
}

impl Front {
    /// Serves a connection of a client at a front: performs the TLS handshake, and passes the
    /// connection to a host.
    async fn connection(&self, stream: TcpStream, tls: Option<Tls>, peer: Peer) {
        let Some(tls) = tls else {
            // Without TLS, no protocol is negotiated, and the connection is not HTTP/2.
            return self.pass(stream, peer, false).await;
        };
        // Wait without allocating buffers: a client that sends nothing must cost little memory.
        let readable = timeout(self.limits.handshake, stream.readable()).await;
        if !matches!(readable, Ok(Ok(()))) {
            return;
        }
        match timeout(self.limits.handshake, tls.accept(stream)).await {
            Ok(Ok(stream)) => {
                let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                Box::pin(self.pass(stream, peer, is_http2)).await;
            }
            Ok(Err(error)) => debug!(client = %peer.ip, %error, "TLS handshake failed"),
            Err(_) => debug!(client = %peer.ip, "TLS handshake timed out"),
        }
    }

    /// Copies the bytes of a client to a host and back, until one side ends. `is_http2` is the
    /// negotiated protocol.
    async fn pass<T>(&self, mut client: T, peer: Peer, is_http2: bool)
    where
        T: AsyncRead + AsyncWrite + Unpin + Send,
    {
        // Clients open connections in advance: a host is needed for the first request only.
        let mut first = vec![0; FIRST_BYTES];
        let count = match timeout(FIRST_BYTE_TIMEOUT, client.read(&mut first)).await {
            Ok(Ok(count)) if count > 0 => count,
            _ => return,
        };
        first.truncate(count);
        let mut host = match self.hosts.open(peer).await {
            Ok(host) => host,
            Err(reason) => {
                debug!(client = %peer.ip, reason, "no host accepted a connection");
                // A client of HTTP/2 (whose first bytes are `PRI `) cannot read this response.
                if !is_http2 && !first.starts_with(b"PRI ") {
                    let refusal = send_refusal(client, ConnectionLimitError::NoHost);
                    // Ignore a timeout: the connection is closed in any case.
                    let _ = timeout(self.limits.handshake, refusal).await;
                }
                return;
            }
        };
        if host.write_all(&first).await.is_err() {
            return;
        }
        drop(first);
        // An error of either side is a normal end of the connection.
        let _ = copy_bidirectional(&mut client, &mut host).await;
    }
}
