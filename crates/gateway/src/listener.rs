//! Listens, and ends in order.

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

/// Refusals with an answer that are sent at once; further connections are closed without one.
const MAX_CONCURRENT_REFUSALS: usize = 64;
/// Time for one refusal.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause after a failed accept: it fails when descriptors run out, and then again at once.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

/// Serves clients on `listener` until `shutdown`; then takes no more requests, lets those in flight
/// finish within `GatewayLimits::drain`, and aborts the rest. Several listeners may share one
/// gateway.
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
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut shutdown => break,
        };
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(e) => {
                warn!("cannot accept a connection: {e}");
                sleep(ACCEPT_RETRY_DELAY).await;
                continue;
            }
        };
        prepare(&stream);
        let ip = from.ip().to_canonical();
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
                if let Ok(refusal) = Arc::clone(&refusals).try_acquire_owned() {
                    let tls = tls.clone();
                    tasks.spawn(async move {
                        let _ = timeout(REFUSAL_TIMEOUT, refuse(stream, tls, full)).await;
                        drop(refusal);
                    });
                }
            }
        }
    }
    drop(listener);
    tasks.finish(gateway.shared.config.limits.drain).await;
}

/// Serves clients on a Unix socket, if `may` allows their user id and they are no processes that
/// were confined. The control plane sees them as local, and they are not counted among an address's
/// connections.
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
                warn!("cannot accept a connection: {e}");
                sleep(ACCEPT_RETRY_DELAY).await;
                continue;
            }
        };
        // Credentials of the moment of connecting, from the kernel.
        let is_owner =
            |peer: &UCred| may(peer.uid()) && crate::local_peer::may_be_owner(peer.pid());
        if !stream.peer_cred().as_ref().is_ok_and(is_owner) {
            warn!("rejected a connection to the owner's socket from another or a confined process");
            continue;
        }
        // A connection over the limit is closed without an answer.
        if let Ok(permit) = gateway.shared.admission.enter(peer.ip) {
            permit.mark_known();
            let work = connection::serve(gateway.clone(), stream, peer, permit, tasks.clone());
            tasks.track(work);
        }
    }
    drop(listener);
    tasks.finish(gateway.shared.config.limits.drain).await;
}

/// Sends small answers at once, and detects vanished clients although streams may be silent for
/// hours.
pub fn prepare(stream: &TcpStream) {
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(60))
        .with_interval(Duration::from_secs(15))
        .with_retries(4);
    let set = stream
        .set_nodelay(true)
        .and_then(|()| SockRef::from(stream).set_tcp_keepalive(&keepalive));
    if let Err(e) = set {
        debug!("cannot set options of a connection: {e}");
    }
}

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
    // Nothing is made for a client before it has sent something.
    let limits = &gateway.shared.config.limits;
    let begun = tokio::select! {
        begun = timeout(limits.handshake, stream.readable()) => matches!(begun, Ok(Ok(()))),
        () = tasks.stopping() => return,
    };
    if begun {
        Box::pin(serve_tls(gateway, stream, tls, peer, permit, tasks)).await;
    } else {
        add(&gateway.shared.counters.handshakes_failed, 1);
    }
}

/// Serves a client that has begun to speak TLS.
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
                _ => "it took too long".to_owned(),
            };
            debug!(client = %peer.ip, "TLS handshake failed: {reason}");
            add(&shared.counters.handshakes_failed, 1);
        }
    }
}

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

/// Answers without reading the request. Clients of HTTP/2 see a broken connection.
async fn send_refusal<T: AsyncRead + AsyncWrite + Unpin>(
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
    // A close with bytes unread would reset the connection and take the answer with it.
    let mut rest = [0; 1024];
    while matches!(stream.read(&mut rest).await, Ok(count) if count > 0) {}
}
