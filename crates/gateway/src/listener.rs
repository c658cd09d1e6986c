//! Listeners on TCP and Unix sockets, and their graceful shutdown.

use crate::admission::{ConnectionLimitError, ConnectionPermit};
use crate::connection;
use crate::control_plane::ControlPlane;
use crate::counters::add;
use crate::gateway::Gateway;
use crate::peer::Peer;
use crate::sandboxes::Sandboxes;
use crate::tasks::ConnectionTasks;
use crate::tls::Tls;
use socket2::{SockRef, TcpKeepalive};
use std::future::Future;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::unix::UCred;
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

/// Maximum number of concurrent rejections with a response. Further connections are closed without
/// a response.
const MAX_CONCURRENT_REFUSALS: usize = 64;
/// Timeout of a rejection.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);
/// Delay after a failed accept. If descriptors are exhausted, the next accept would fail
/// immediately.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Serves clients on `listener` until `shutdown` completes. Then accepts no more requests, waits at
/// most `GatewayLimits::drain` for requests in flight, and aborts the remaining ones. Several
/// listeners may share one gateway.
pub async fn serve<S, C>(
    listener: TcpListener,
    tls: Option<Tls>,
    gateway: Gateway<S, C>,
    shutdown: impl Future<Output = ()>,
) where
    S: Sandboxes,
    C: ControlPlane,
{
    let tasks = ConnectionTasks::default();
    let refusals = Arc::new(Semaphore::new(MAX_CONCURRENT_REFUSALS));
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let Accepted { stream, ip } = tokio::select! {
            accepted = accept(&listener) => accepted,
            () = &mut shutdown => break,
        };
        prepare(&stream);
        match gateway.shared.admission.enter(ip) {
            Ok(permit) => {
                let work = serve_tcp(
                    gateway.clone(),
                    stream,
                    tls.clone(),
                    Peer {
                        ip,
                        tls: tls.is_some(),
                        local: false,
                    },
                    permit,
                    tasks.clone(),
                );
                tasks.track(work);
            }
            Err(full) => {
                add(&gateway.shared.counters.connections_refused, 1);
                // Beyond `MAX_CONCURRENT_REFUSALS`, the connection is closed at once: rejections
                // must not exhaust memory.
                if let Ok(refusal) = Arc::clone(&refusals).try_acquire_owned() {
                    let tls = tls.clone();
                    tasks.spawn(async move {
                        // Ignore errors and the timeout: the connection is closed in any case.
                        let _ = timeout(REFUSAL_TIMEOUT, refuse(stream, tls, full)).await;
                        drop(refusal);
                    });
                }
            }
        }
    }
    // New clients must reach another process, for example the next daemon, while requests complete.
    drop(listener);
    tasks.finish(gateway.shared.config.limits.drain).await;
}

/// Connection of a client.
pub(crate) struct Accepted {
    pub stream: TcpStream,
    pub ip: IpAddr,
}

/// Accepts the next connection. Waits after an error.
pub(crate) async fn accept(listener: &TcpListener) -> Accepted {
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                let ip = from.ip().to_canonical();
                return Accepted { stream, ip };
            }
            Err(e) => {
                warn!(error = %e, "cannot accept a connection");
                sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

/// Serves clients on a Unix socket. Accepts a process if `may` permits its user id and if the
/// process is not confined. The control plane treats these clients as the owner of the host. They
/// count towards the limit of all connections, but no limit per address applies to them.
pub async fn serve_local<S, C>(
    listener: UnixListener,
    gateway: Gateway<S, C>,
    may: impl Fn(u32) -> bool,
    shutdown: impl Future<Output = ()>,
) where
    S: Sandboxes,
    C: ControlPlane,
{
    let tasks = ConnectionTasks::default();
    let peer = Peer {
        ip: IpAddr::V4(Ipv4Addr::LOCALHOST),
        tls: false,
        local: true,
    };
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut shutdown => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(e) => {
                warn!(error = %e, "cannot accept a connection to the owner's socket");
                sleep(ACCEPT_RETRY_DELAY).await;
                continue;
            }
        };
        // The kernel recorded these credentials when the process connected.
        let is_owner =
            |peer: &UCred| may(peer.uid()) && crate::local_peer::may_be_owner(peer.pid());
        if !stream.peer_cred().as_ref().is_ok_and(is_owner) {
            warn!(
                "rejected a connection to the owner's socket: the process has another user or is confined"
            );
            continue;
        }
        // The loopback address only has the limits of the total number of connections. Beyond
        // them, the connection is closed without a response.
        if let Ok(permit) = gateway.shared.admission.enter(peer.ip) {
            // A client is *unknown* until it has presented a key or reached a sandbox, and unknown
            // clients have lower limits. The check above has identified this client.
            permit.mark_known();
            let work = connection::serve(gateway.clone(), stream, peer, permit, tasks.clone());
            tasks.track(work);
        }
    }
    // As in `serve`, new clients must reach the next daemon while requests complete.
    drop(listener);
    tasks.finish(gateway.shared.config.limits.drain).await;
}

/// Sets socket options. `TCP_NODELAY` sends small responses immediately. Keepalive detects a
/// vanished client after two minutes, even if its streams are silent for hours.
pub fn prepare(stream: &TcpStream) {
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(60))
        .with_interval(Duration::from_secs(15))
        .with_retries(4);
    let set = stream
        .set_nodelay(true)
        .and_then(|()| SockRef::from(stream).set_tcp_keepalive(&keepalive));
    if let Err(e) = set {
        debug!(error = %e, "cannot set socket options of a connection");
    }
}

/// Serves a TCP connection of a client, with TLS if it is configured.
async fn serve_tcp<S, C>(
    gateway: Gateway<S, C>,
    stream: TcpStream,
    tls: Option<Tls>,
    peer: Peer,
    permit: ConnectionPermit,
    tasks: ConnectionTasks,
) where
    S: Sandboxes,
    C: ControlPlane,
{
    let Some(tls) = tls else {
        return connection::serve(gateway, stream, peer, permit, tasks).await;
    };
    // Wait without allocating buffers: a client that sends nothing must cost little memory.
    let limits = &gateway.shared.config.limits;
    let is_readable = tokio::select! {
        readable = timeout(limits.handshake, stream.readable()) => matches!(readable, Ok(Ok(()))),
        () = tasks.stopping() => return,
    };
    if is_readable {
        Box::pin(serve_tls(gateway, stream, tls, peer, permit, tasks)).await;
    } else {
        add(&gateway.shared.counters.handshakes_failed, 1);
    }
}

/// Serves a client that has started a TLS handshake.
async fn serve_tls<S, C>(
    gateway: Gateway<S, C>,
    stream: TcpStream,
    tls: Tls,
    peer: Peer,
    permit: ConnectionPermit,
    tasks: ConnectionTasks,
) where
    S: Sandboxes,
    C: ControlPlane,
{
    let shared = Arc::clone(&gateway.shared);
    let handshake = timeout(shared.config.limits.handshake, tls.accept(stream));
    let result = tokio::select! {
        result = handshake => result,
        () = tasks.stopping() => return,
    };
    match result {
        Ok(Ok(stream)) => connection::serve(gateway, stream, peer, permit, tasks).await,
        other => {
            let reason = match other {
                Ok(Err(e)) => e.to_string(),
                _ => "timeout".to_owned(),
            };
            debug!(client = %peer.ip, reason, "TLS handshake failed");
            add(&shared.counters.handshakes_failed, 1);
        }
    }
}

/// Completes a TLS handshake if necessary, and sends the rejection.
async fn refuse(stream: TcpStream, tls: Option<Tls>, full: ConnectionLimitError) {
    match tls {
        None => send_refusal(stream, full).await,
        Some(tls) => {
            if let Ok(stream) = tls.accept(stream).await {
                send_refusal(stream, full).await;
            }
        }
    }
}

/// Responds without reading the request. HTTP/2 clients see a broken connection.
pub(crate) async fn send_refusal<T: AsyncRead + AsyncWrite + Unpin>(
    mut stream: T,
    full: ConnectionLimitError,
) {
    let json = format!(r#"{{"message":"{full}","code":503}}"#);
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: \
         {}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n{json}",
        json.len()
    );
    if stream.write_all(answer.as_bytes()).await.is_err() || stream.shutdown().await.is_err() {
        return;
    }
    // Closing a socket with unread bytes would reset the connection and discard the response.
    let mut rest = [0; 1024];
    while matches!(stream.read(&mut rest).await, Ok(count) if count > 0) {}
}
